"""`bounded` and links inside other transformations: several projections, 16 bits in branches, and Flax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.support.oracles import exact_norm
from tests.support.trees import DTYPES, flat
from tests.support.updates import (
    BALL,
    CLIP,
    RADIUS,
    RATE,
    assert_close,
    clipped,
    descend,
    in_float64,
    last,
    projected,
    start,
    train,
    tree,
)


def orthant(params: Any) -> Any:
    return jax.tree.map(lambda w: jnp.maximum(w, 0), params)


def test_projections_are_applied_in_order() -> None:
    """Onto the ball and then onto the orthant is not onto the orthant and then onto the ball."""
    params, grads = tree(100, 2.0), tree(0)
    moved = descend(params, grads)
    ball_first = {k: np.maximum(w, 0) for k, w in projected(moved).items()}
    ball_last = projected({k: np.maximum(w, 0) for k, w in moved.items()})
    assert np.abs(flat(ball_first) - flat(ball_last)).max() > 0.01
    for project, expected in (([BALL, orthant], ball_first), ((orthant, BALL), ball_last)):
        tx = clipjax.bounded(optax.sgd(RATE), project=project)
        after, seen = last(train(tx, params, [grads]))
        assert_close(after, expected)
        assert not clipjax.verify(after, tx)
        assert {"max_norm/steps", "project/steps"} <= set(seen)

        @jax.jit
        def direct(params: Any, project: Any = project) -> Any:
            for each in project:
                params = clipjax.project(each)(params)
            return params

        assert_close(direct({k: w.astype(np.float32) for k, w in moved.items()}), expected)


def test_what_bounded_is_given_in_the_wrong_place() -> None:
    ends = clipjax.chain(optax.sgd(RATE), BALL)
    for name in ("optimizer", "clip"):
        for given in (ends, clipjax.skip_nonfinite(ends), clipjax.bounded(optax.sgd(RATE), project=BALL)):
            with pytest.raises(ValueError, match=rf"{name}: a chain that ends in clipjax.max_norm.*project="):
                clipjax.bounded(**{"optimizer": optax.sgd(RATE), name: given})
    with pytest.raises(TypeError, match=r"project must be a projection.*got 3"):
        clipjax.bounded(optax.sgd(RATE), project=[BALL, 3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"project must be a projection.*gradient transformation"):
        clipjax.bounded(optax.sgd(RATE), project=[clipjax.clip_by_norm(1.0)])


# --------------------------------------------------------------------------------------------------
# A link that widens 16-bit updates, in a branch whose other side does not.

BRANCHES: dict[str, Callable[[Any], Any]] = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "conditionally_transform": lambda tx: optax.transforms.conditionally_transform(tx, lambda step: step < 2),
    "conditionally_mask": lambda tx: optax.transforms.conditionally_mask(tx, lambda step: step < 2),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_16_bit_links_in_branches(name: str) -> None:
    def drawn(seed: int, scale: float = 1.0) -> Any:
        matrix = scale * np.random.default_rng(seed).standard_normal((4, 3))
        return {kind: matrix.astype(DTYPES[kind]) for kind in ("bf16", "f16")}

    grads = drawn(2)
    tx = BRANCHES[name](clipjax.chain(optax.sgd(RATE), BALL))
    after, _ = last(train(tx, drawn(1, 2.0), [grads, grads]))
    for kind, kernel in after.items():
        assert kernel.dtype == DTYPES[kind]
        assert 0.95 * RADIUS < exact_norm(kernel, 0).max() <= RADIUS


# --------------------------------------------------------------------------------------------------
# Flax, with the projection called on the new parameters.


def test_a_flax_train_state() -> None:
    train_state = pytest.importorskip("flax.training.train_state")
    tx = optax.chain(clipjax.clip_by_global_norm(CLIP), optax.sgd(RATE))
    state = train_state.TrainState.create(apply_fn=None, params=start(), tx=tx)

    @jax.jit
    def step(state: Any, grads: Any) -> Any:
        state = state.apply_gradients(grads=grads)
        return state.replace(params=BALL(state.params))

    expected = in_float64(start())
    for i in range(3):
        state = step(state, tree(i, 3.0))
        expected = projected(descend(expected, clipped(tree(i, 3.0))))
        assert_close(state.params, expected)
    assert clipjax.metrics(state)["clip_by_global_norm/steps"] == 3


def test_an_nnx_optimizer() -> None:
    nnx = pytest.importorskip("flax.nnx")
    model, ball = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), clipjax.max_norm(0.5)
    tx = optax.chain(clipjax.clip_by_global_norm(CLIP), optax.sgd(RATE))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 3)), np.float32)

    def loss(model: Any) -> jax.Array:
        return jnp.sum((model(x) - 5) ** 2)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        grads = nnx.grad(loss)(model)
        optimizer.update(model, grads)
        nnx.update(model, ball(nnx.state(model, nnx.Param)))
        return grads

    for _ in range(4):
        before = {"bias": model.bias[...], "kernel": model.kernel[...]}
        grads = step(model, optimizer)
        grads = {"bias": grads["bias"][...], "kernel": grads["kernel"][...]}
        after = {"bias": model.bias[...], "kernel": model.kernel[...]}
        assert_close(after, projected(descend(before, clipped(grads)), 0.5), 0.5)
        assert not clipjax.verify(nnx.state(model, nnx.Param), ball)
    assert exact_norm(model.kernel[...], 0).max() > 0.99 * 0.5
    assert clipjax.metrics(optimizer.opt_state)["clip_by_global_norm/clipped_fraction"] > 0
