"""Random programs with one fault at a known line: see `programs`."""

import jax
import numpy as np
import pytest

import clipjax
from tests.explain.programs import program


def judged(seed: int) -> str:
    """Return "right", "wrong", "finite", or "accused" if the result is finite."""
    given = program(seed)
    results = jax.tree.leaves(given.run(*given.args))
    causes = clipjax.explain(given.run, *given.args)
    if all(np.isfinite(x).all() for x in results):
        return "accused" if causes else "finite"
    assert given.fault is not None, given.source
    first = causes[0]
    is_right = (
        (first.line, first.began_in) == (given.line, given.fault.began_in)
        and first.operation in given.fault.operations
        and first.iterations == (() if given.at is None else (given.at,))
    )
    return "right" if is_right else f"wrong: {first}"


@pytest.mark.parametrize("seed", range(8))
def test_the_fault_is_named(seed: int) -> None:
    assert judged(seed) in ("right", "finite")


@pytest.mark.slow
def test_the_fault_is_named_in_98_of_100_programs() -> None:
    found = {seed: judged(seed) for seed in range(50)}
    right = sum(answer == "right" for answer in found.values())
    wrong = {seed: text for seed, text in found.items() if text.startswith("wrong")}
    assert "accused" not in found.values()
    assert right >= 0.98 * (right + len(wrong)), wrong
    assert right > len(found) / 3
