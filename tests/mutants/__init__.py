"""Mistakes that the tests should find: `python -m tests.mutants`."""
