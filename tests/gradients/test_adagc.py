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


# --------------------------------------------------------------------------------------------------
# Units.

LAYERS = 4


@functools.cache
def stack() -> dict[str, np.ndarray]:
    """Gradients over 30 steps: layers whose sizes have nothing in common, in one leaf, and a leaf alone."""
    rng = np.random.default_rng(3)
    sizes = np.exp(0.5 * rng.standard_normal((30, LAYERS + 1))) * 10.0 ** np.arange(-2, LAYERS - 1)
    layers = rng.standard_normal((30, LAYERS, 5, 3)) * sizes[:, :LAYERS, None, None]
    head = rng.standard_normal((30, 6)) * sizes[:, -1:]
    return {"head": head.astype(np.float32), "layers": layers.astype(np.float32)}


@functools.partial(jax.jit, static_argnums=0)
def follow(tx: Any, stacked: Any) -> Any:
    def one(state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state)
        return state, updates

    return jax.lax.scan(one, tx.init(jax.tree.map(lambda x: x[0], stacked)), stacked)


SHORT: dict[str, Any] = {"warmup_steps": 5, "max_norm": 3.0}
OF_LAYERS = clipjax.adagc(axes={"layers": (1, 2), "head": None}, **SHORT)
OF_LEAVES = clipjax.adagc(**SHORT)


def test_each_layer_of_a_stack_follows_its_own_past() -> None:
    state, updates = follow(OF_LAYERS, stack())
    before, after = (
        leaf_norms([tree["head"], *np.moveaxis(np.asarray(tree["layers"]), 1, 0)])
        for tree in (stack(), updates)
    )
    np.testing.assert_allclose(after, norm_rules.adagc(before, **SHORT), rtol=1e-5)
    assert [x.shape for x in state.gammas] == [(), (LAYERS, 1, 1)]
    assert [x.dtype for x in state.gammas] == [np.float32] * 2


def test_a_stack_is_clipped_as_its_layers_are_apart() -> None:
    layers = {f"{i}": stack()["layers"][:, i] for i in range(LAYERS)}
    state, together = follow(OF_LAYERS, stack())
    alone, apart = follow(OF_LEAVES, {"head": stack()["head"], **layers})
    np.testing.assert_allclose(together["head"], apart["head"], rtol=1e-6)
    for i in range(LAYERS):
        np.testing.assert_allclose(together["layers"][:, i], apart[str(i)], rtol=1e-6)
    assert state.adagc.clipped == alone.adagc.clipped > 5
    shown, expected = ([*s.adagc[:2], s.threshold] for s in (state, alone))
    np.testing.assert_allclose(shown, expected, rtol=1e-6)


@pytest.mark.parametrize("axes", [{"*": None}, {"layers": (0, 1, 2), "head": 0}], ids=str)
def test_one_unit_a_leaf_is_what_it_is_without_axes(axes: Any) -> None:
    """Bit for bit, but for the layout of the state."""
    plain, expected = follow(OF_LEAVES, stack())
    state, updates = follow(clipjax.adagc(axes=axes, **SHORT), stack())
    assert same_bits(updates, expected)
    assert same_bits(np.concatenate([np.ravel(x) for x in state.gammas]), plain.gammas)
    assert same_bits((*state[:2], state.taken), (*plain[:2], plain.taken))


@pytest.mark.parametrize("axes", [{"layers": (1, 2)}, {"layers": (1, 2), "head": clipjax.SKIP}], ids=str)
def test_leaves_without_units_are_left_alone_and_do_not_count(axes: Any) -> None:
    state, updates = follow(clipjax.adagc(axes=axes, **SHORT), stack())
    alone, expected = follow(clipjax.adagc(axes=(1, 2), **SHORT), {"layers": stack()["layers"]})
    assert same_bits(updates, {"head": stack()["head"], **expected})
    assert same_bits(state, alone)


def test_nothing_but_skipped_leaves_works() -> None:
    tx = clipjax.adagc(axes=lambda path, leaf: clipjax.SKIP)
    updates, state = tx.update(PARAMS, tx.init(PARAMS))
    assert same_bits(updates, PARAMS)
    assert state.gammas == ()


def test_other_units_than_it_started_with_are_an_error() -> None:
    tx = clipjax.adagc(axes={"kernel": 0})
    state = tx.init({"kernel": np.ones((4, 3), np.float32)})
    with pytest.raises(ValueError, match=r"adagc.*'kernel'.*\(1, 2\).*\(1, 3\).*shard_map"):
        jax.eval_shape(tx.update, {"kernel": np.ones((4, 2), np.float32)}, state)


def test_other_leaves_than_it_started_with_are_an_error() -> None:
    tx = clipjax.adagc()
    with pytest.raises(ValueError, match=r"adagc.* 1 .*2"):
        jax.eval_shape(tx.update, {"a": np.ones(2, np.float32)}, tx.init(PARAMS))
