"""No transformation keeps more for larger parameters: leaves a hundred times as large change no state.

What follows leaves keeps numbers for each leaf, of whatever size, and `hyperball` one; with `axes`, they keep
them for each unit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import clipjax
from tests.support import walk

# What keeps more for larger parameters, and why its method cannot do without.
GROWS = {
    "adagc(axes=dict)": "one number for each unit",
    "hyperball(axes=dict)": "the norm that each unit keeps",
}


def parameters(scale: int) -> Any:
    layer = {"kernel": jnp.zeros((4 * scale, 3 * scale)), "bias": jnp.zeros(3 * scale)}
    return {"dense": layer, "head": {"kernel": jnp.zeros((3 * scale, 2 * scale))}}


def numbers(tx: Any, scale: int) -> int:
    return sum(x.size for x in jax.tree.leaves(jax.eval_shape(tx.init, parameters(scale))))


@pytest.mark.parametrize("case", walk.variants(), ids=str)
def test_the_state_does_not_grow_with_the_parameters(case: walk.Case) -> None:
    # An optimizer without a state, so that what is left is what goes around it.
    plain = {"optimizer": optax.sgd(0.1)} if "optimizer" in walk.parameters(case.name) else {}
    tx = walk.build(case, **plain)
    assert (numbers(tx, 10) > numbers(tx, 1)) == (str(case) in GROWS)


def test_what_wraps_an_optimizer_keeps_its_state_once() -> None:
    tx = clipjax.bounded(
        optax.adam(1e-3),
        clip=clipjax.clip_by_global_norm(1.0),
        project=clipjax.max_norm(1.0),
        nonfinite="skip",
    )
    grown = numbers(tx, 10) - numbers(tx, 1)
    assert grown == numbers(optax.adam(1e-3), 10) - numbers(optax.adam(1e-3), 1)


def test_the_count_tells_a_state_that_grows() -> None:
    assert numbers(optax.adam(1e-3), 10) > numbers(optax.adam(1e-3), 1)


def test_there_are_such_cases() -> None:
    assert set(GROWS) <= {str(case) for case in walk.variants()}
