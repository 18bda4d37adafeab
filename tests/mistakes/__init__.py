"""Likely mistakes and what comes of them: `python -m tests.mistakes` prints the table."""
