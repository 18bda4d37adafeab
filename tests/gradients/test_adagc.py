"""`adagc`: a threshold for each leaf, that follows the leaf's own past norms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import clipjax
from tests.support import norm_rules
from tests.support.norm_rules import PARAMS, Run, leaf_norms, leaves_of_norm, runner, sequence
from tests.support.trees import same_bits

# A small bound clips every step of the warm-up, so that norms before and after differ.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"warmup_norms": "after", "warmup_steps": 20, "max_norm": 0.1},
    {"warmup_steps": 0},
    {"relative_bound": 0.9, "decay": 0.8, "max_norm": 0.05, "warmup_steps": 7},
]


@functools.cache
def program() -> Callable[[Any], dict[str, Run]]:
    return runner({str(options): clipjax.adagc(**options) for options in OPTIONS})


@functools.cache
def runs(seed: int) -> tuple[Any, dict[str, Run]]:
    stacked = leaves_of_norm(sequence(seed) / sequence(seed).mean(), seed)
    stacked["kernel"] *= np.float32(np.exp(np.random.default_rng(seed).standard_normal()))
    return stacked, program()(stacked)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_follows_its_oracle(options: dict[str, Any], seed: int) -> None:
    stacked, done = runs(seed)
    expected = norm_rules.adagc(leaf_norms(stacked), **options)
    np.testing.assert_allclose(leaf_norms(done[str(options)].updates), expected, rtol=1e-5)
    assert (expected < leaf_norms(stacked) * (1 - 1e-3)).any(axis=1).sum() >= 5
    assert done[str(options)].state.gammas.shape == (2,)


@jax.jit
def update(warmup_steps: Any, grads: Any, state: Any) -> Any:
    return clipjax.adagc(warmup_steps=warmup_steps).update(grads, state)


def with_bias(value: float) -> dict[str, np.ndarray]:
    return {**PARAMS, "bias": np.full(3, value, np.float32)}


def test_a_leaf_without_a_gradient_is_not_held_at_zero() -> None:
    """Where gamma could be 0, a leaf that starts to learn later would never move."""
    state = clipjax.adagc().init(PARAMS)
    for i in range(20):
        _, state = update(5, with_bias(i % 2 == 0 and i <= 5), state)
    updates, state = update(5, PARAMS, state)
    assert same_bits(updates["bias"], PARAMS["bias"])


def test_zeros_alone_in_the_warm_up_leave_the_first_norm_as_gamma() -> None:
    state = clipjax.adagc().init(PARAMS)
    for bias in (0, 0, 0, 3, 300):
        updates, state = update(2, with_bias(bias), state)
    np.testing.assert_allclose(np.linalg.norm(updates["bias"]), 1.04 * 3 * math.sqrt(3), rtol=1e-6)


def test_other_leaves_than_it_started_with_are_an_error() -> None:
    tx = clipjax.adagc()
    with pytest.raises(ValueError, match=r"adagc.* 1 .*2"):
        jax.eval_shape(tx.update, {"a": np.ones(2, np.float32)}, tx.init(PARAMS))
