"""Comparisons with other libraries; each is skipped where the library is not installed."""
