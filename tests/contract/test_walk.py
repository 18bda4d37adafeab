"""The walk over the namespace finds and builds every public transformation, so that none goes untested."""

import optax
import pytest

import clipjax
from tests.support.walk import (
    ARGUMENTS,
    is_transformation,
    make,
    names,
    public_callables,
    required,
    returns_transformation,
)


@pytest.mark.parametrize("name", sorted(public_callables()))
def test_the_walk_can_build_every_transformation(name: str) -> None:
    function = public_callables()[name]
    if not returns_transformation(function):
        assert not is_transformation(name), f"{name} returns a transformation: its annotation must say so"
        return
    missing = [key for key in required(name) if key not in ARGUMENTS]
    assert not missing, (
        f"clipjax.{name} has required parameters {missing} without a value: add them to "
        f"ARGUMENTS in tests/support/walk.py, so that the contract is tested for it"
    )
    assert isinstance(make(name), optax.GradientTransformation)


def test_the_walk_finds_the_transformations() -> None:
    assert {
        "clip_by_value",
        "clip_by_global_norm",
        "max_norm",
        "project",
        "bounded",
        "skip_nonfinite",
    } <= set(names())
    assert set(clipjax.__all__) <= set(dir(clipjax))
