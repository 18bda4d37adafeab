"""The clips and the projections of Optax, and a training with either."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import clipjax
from clipjax import functional
from tests.support.peers import CLOSE, SEEDS, assert_close, draw

pytestmark = pytest.mark.peer


PAIRS = {
    "value": (clipjax.clip_by_value, optax.clip),
    "global_norm": (clipjax.clip_by_global_norm, optax.clip_by_global_norm),
    "rms": (clipjax.clip_by_rms, optax.clip_by_block_rms),
}


@jax.jit
def clipped(grads: Any, bounds: dict[str, Any]) -> dict[str, list[Any]]:
    """By ours and by theirs."""

    def by(clip: Any, bound: Any) -> Any:
        tx = clip(bound)
        return tx.update(grads, tx.init(grads))[0]

    return {name: [by(clip, bounds[name]) for clip in pair] for name, pair in PAIRS.items()}


@SEEDS
def test_clips(seed):
    grads, bound = draw(seed)
    bounds = {"value": bound / 20, "global_norm": bound, "rms": bound / 20}
    for ours, theirs in clipped(grads, bounds).values():
        assert_close(ours, theirs)


@jax.jit
def norms(grads: Any) -> tuple[Any, Any]:
    return functional.global_norm(grads), optax.tree.norm(grads)


@SEEDS
def test_the_global_norm(seed):
    ours, theirs = norms(draw(seed)[0])
    np.testing.assert_allclose(ours, theirs, **CLOSE)


@jax.jit
def in_balls(leaves: Any, radius: Any) -> tuple[Any, Any, Any]:
    theirs = [optax.projections.projection_l2_ball(w, scale=radius) for w in leaves]
    return (
        clipjax.max_norm(radius, axes=None)(leaves),
        functional.clip_by_norm(leaves, radius),
        theirs,
    )


@SEEDS
def test_a_ball_for_each_leaf(seed):
    projected, clipped, theirs = in_balls(*draw(seed))
    assert_close(projected, theirs)
    assert_close(clipped, theirs)


def test_training_goes_the_same_way():
    random = np.random.default_rng(0)
    inputs = random.standard_normal((32, 4)).astype(np.float32)
    targets = (10 * random.standard_normal((32, 1))).astype(np.float32)
    start = {
        "hidden": random.standard_normal((4, 8)).astype(np.float32),
        "out": random.standard_normal((8, 1)).astype(np.float32),
    }
    bounds = {"global_norm": 1.0, "value": 0.1, "rms": 0.1}

    def loss(params):
        return jnp.mean((jnp.tanh(inputs @ params["hidden"]) @ params["out"] - targets) ** 2)

    def trained(clip, params):
        tx = optax.chain(clip, optax.adam(1e-2))

        def step(carry, _):
            params, state = carry
            updates, state = tx.update(jax.grad(loss)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        return lax.scan(step, (params, tx.init(params)), None, length=50)[0][0]

    @jax.jit
    def run(params):
        after = {name: [trained(clip(bounds[name]), params) for clip in pair] for name, pair in PAIRS.items()}
        return loss(params), {name: loss(ours) for name, (ours, _) in after.items()}, after

    before, losses, after = run(start)
    for name, (ours, theirs) in after.items():
        assert float(before) > 1.05 * float(losses[name])
        for key in start:
            # 50 steps carry each other's rounding along.
            np.testing.assert_allclose(ours[key], theirs[key], rtol=1e-5, atol=1e-5)
