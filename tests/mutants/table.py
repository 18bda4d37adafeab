"""All mutants."""

from __future__ import annotations

from tests.mutants import layers, numbers, places, state

MUTANTS = (*numbers.MUTANTS, *state.MUTANTS, *places.MUTANTS, *layers.MUTANTS)
