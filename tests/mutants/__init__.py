"""Defects that the tests must see: `python -m tests.mutants` puts each into a copy, and runs its tests."""
