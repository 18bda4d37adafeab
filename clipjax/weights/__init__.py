"""Projections of weights."""
