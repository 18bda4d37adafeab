"""`adaptive_grad_clip`: the gradient of each unit is bounded relative to the unit's weights (AGC)."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
import optax
import pytest

import clipjax
from tests.support.oracles import exact_norm
from tests.support.trees import flat, same_bits

CLIPPING, EPS = 0.02, 1e-3
SHAPES = {str(shape): shape for shape in [(), (7,), (5, 4), (3, 5, 4), (3, 3, 5, 4), (2, 3, 3, 5, 4)]}
ranks = pytest.mark.parametrize("rank", SHAPES)


def oracle(g: np.ndarray, w: np.ndarray, axis: Any) -> np.ndarray:
    g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
    bound = CLIPPING * np.maximum(np.sqrt(np.sum(w**2, axis=axis, keepdims=True)), EPS)
    norm = np.sqrt(np.sum(g**2, axis=axis, keepdims=True))
    return np.where(norm < bound, g, g * bound / np.maximum(norm, 1e-6))


@functools.cache
def draw(seed: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Gradients and weights of every rank, with units of very different sizes."""
    grads, weights = {}, {}
    for name, shape in SHAPES.items():
        rng = np.random.default_rng(seed)
        units = np.exp(2 * rng.standard_normal(shape[-1:]))
        grads[name] = np.asarray(0.01 * units * rng.standard_normal(shape), np.float32)
        weights[name] = np.asarray(rng.standard_normal(shape), np.float32)
    return grads, weights


@jax.jit
def apply(grads: Any, weights: Any) -> Any:
    """Clip each array as a tree of its own."""
    tx = clipjax.adaptive_grad_clip(CLIPPING)
    return {name: tx.update({"w": g}, tx.init(g), {"w": weights[name]}) for name, g in grads.items()}


@functools.cache
def clipped(seed: int) -> dict[str, tuple[np.ndarray, Any]]:
    return {name: (np.asarray(done["w"]), state) for name, (done, state) in apply(*draw(seed)).items()}


@pytest.mark.parametrize("seed", range(3))
@ranks
def test_it_follows_its_oracle(rank: str, seed: int) -> None:
    (g, w), (updates, state) = (tree[rank] for tree in draw(seed)), clipped(seed)[rank]
    axis = tuple(range(g.ndim - 1)) if g.ndim > 1 else None
    np.testing.assert_allclose(updates, oracle(g, w, axis), rtol=2e-6)
    bounds = CLIPPING * np.maximum(np.asarray(exact_norm(w, axis), np.float64), EPS)
    np.testing.assert_allclose(state.threshold, np.min(bounds), rtol=1e-6)
    assert state.threshold >= np.min(bounds) * (1 - 1e-14)
    assert (np.asarray(exact_norm(updates, axis)) <= bounds).all()


def test_it_equals_optax() -> None:
    """But for rank 3, of which Optax takes axis 0."""
    theirs = optax.adaptive_grad_clip(CLIPPING)
    compared = [rank for rank, shape in SHAPES.items() if len(shape) not in (0, 3)]
    grads, weights = ({rank: tree[rank] for rank in compared} for tree in draw(0))
    expected = jax.jit(theirs.update)(grads, theirs.init(weights), weights)[0]
    for rank in compared:
        np.testing.assert_allclose(clipped(0)[rank][0], expected[rank], rtol=3e-6)


@pytest.mark.parametrize("rank", ["(7,)", "(5, 4)", "(3, 3, 5, 4)"])
def test_it_is_the_one_of_output_first_layouts(rank: str) -> None:
    """Where kernels are (out, in) and (out, in, h, w), norms are over all axes but the first."""
    g, w = (tree[rank] for tree in draw(1))
    first = [g.ndim - 1, *([g.ndim - 2] if g.ndim > 1 else []), *range(g.ndim - 2)]
    axis = tuple(range(1, g.ndim)) or None
    there = oracle(g.transpose(first), w.transpose(first), axis).transpose(np.argsort(first))
    np.testing.assert_allclose(clipped(1)[rank][0], there, rtol=2e-6)


def hundredfold(tree: Any) -> Any:
    return jax.tree.map(lambda x: 100 * x, tree)


def test_it_leaves_the_head_out_by_one_entry() -> None:
    ones = functools.partial(np.ones, dtype=np.float32)
    params = {"head": {"bias": ones(3), "kernel": ones((4, 3))}, "body": {"kernel": ones((4, 4))}}
    tx = clipjax.adaptive_grad_clip(axes={"head/*": clipjax.SKIP, "*": clipjax.fan_in_or_whole})
    updates, _ = jax.jit(tx.update)(hundredfold(params), tx.init(params), params)
    assert same_bits(updates["head"], hundredfold(params["head"]))
    np.testing.assert_allclose(updates["body"]["kernel"], 0.01, rtol=1e-6)


def test_it_takes_every_form_of_axes() -> None:
    params = {"bias": np.ones((2, 3), np.float32), "kernel": np.ones((4, 3), np.float32)}
    forms = [None, 0, (0, 1), clipjax.fan_in, {"kernel": 1, "bias": None}]

    @jax.jit
    def updates(grads: Any) -> Any:
        every = [clipjax.adaptive_grad_clip(0.5, axes=axes) for axes in forms]
        return [tx.update(grads, tx.init(params), params)[0] for tx in every]

    for form, done in zip(forms, updates(hundredfold(params)), strict=True):
        np.testing.assert_allclose(flat(done), 0.5, rtol=1e-6, err_msg=str(form))


@jax.jit
def descend(rate: Any, grads: Any, params: Any) -> Any:
    tx = optax.chain(clipjax.adaptive_grad_clip(0.03, EPS), optax.sgd(rate))
    updates, _ = tx.update(grads, tx.init(params), params)
    return updates, optax.apply_updates(params, updates)


@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_with_sgd_it_moves_no_unit_further_than_its_share(rate: float) -> None:
    """|dW_i| <= rate * clipping * max(|W_i|, eps)."""
    rng = np.random.default_rng(1)
    params: Any = {
        "kernel": rng.standard_normal((6, 5)).astype(np.float32),
        "bias": np.zeros(5, np.float32),
    }
    params["kernel"][:, 0] = 0
    for i in range(20):
        grads = jax.tree.map(
            lambda x, i=i: (rng.standard_normal(x.shape) + 10.0 ** (i % 7 - 3)).astype(np.float32), params
        )
        updates, moved_to = descend(rate, grads, params)
        for name, axis in (("kernel", 0), ("bias", None)):
            moved, weight = (
                np.asarray(exact_norm(tree[name], axis), np.float64) for tree in (updates, params)
            )
            # SGD rounds rate * update once, here by a rate that is rounded to float32.
            limit = float(np.float32(rate)) * 0.03 * np.maximum(weight, EPS)
            assert (moved <= limit * (1 + 2.0**-23)).all()
        params = jax.tree.map(np.asarray, moved_to)


def test_it_needs_params() -> None:
    tx, params = clipjax.adaptive_grad_clip(), np.ones(3, np.float32)
    with pytest.raises(ValueError, match=r"adaptive_grad_clip.*params"):
        tx.update(params, tx.init(params))


@jax.jit
def clip_ones(clipping: Any, eps: Any, weights: Any) -> Any:
    tx = clipjax.adaptive_grad_clip(clipping, eps)
    return tx.update(np.ones((4, 3), np.float32), tx.init(weights), weights)[0]


def test_weights_that_are_not_finite_show() -> None:
    weights = np.ones((4, 3), np.float32)
    weights[0, 1] = np.nan
    assert np.isnan(clip_ones(0.01, 1e-3, weights)).any(axis=0).tolist() == [False, True, False]


@pytest.mark.parametrize("clipping", [0.0, math.inf])
def test_a_share_may_be_zero_or_infinite(clipping: float) -> None:
    """Of weights of 0, too."""
    zeros = np.zeros((4, 3), np.float32)
    np.testing.assert_array_equal(clip_ones(clipping, 0.0, zeros), clipping > 0)
