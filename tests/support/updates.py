"""Update rules written out in NumPy's float64: what is clipped together, when, and how often."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

import clipjax
from tests.support.oracles import exact_norm, exact_tree_norm

CLIP, RADIUS, RATE = 1.0, 1.5, 0.5
BALL = clipjax.max_norm(RADIUS)

Tree = dict[str, Any]


def bounded(optimizer: Any = None, **options: Any) -> Any:
    return clipjax.bounded(
        optax.sgd(RATE) if optimizer is None else optimizer,
        clip=clipjax.clip_by_global_norm(CLIP),
        project=BALL,
        **options,
    )


def tree(seed: int, scale: float = 1.0) -> Tree:
    rng = np.random.default_rng(seed)
    shapes = {"head": (4, 2), "body": (3, 4), "bias": (4,)}
    return {k: (scale * rng.standard_normal(s)).astype(np.float32) for k, s in shapes.items()}


def start() -> Tree:
    """Weights inside the ball, some of them close to its sphere."""
    inside = projected(tree(100, 2.0), RADIUS * (1 - 1e-6))
    return {k: w.astype(np.float32) for k, w in inside.items()}


def in_float64(params: Tree) -> Tree:
    return {k: np.asarray(v, np.float64) for k, v in params.items()}


def clipped(grads: Tree, bound: float = CLIP) -> Tree:
    norm = float(exact_tree_norm(grads))
    return {k: g * min(1.0, bound / norm) for k, g in in_float64(grads).items()}


def projected(params: Tree, radius: float = RADIUS) -> Tree:
    def one(w: np.ndarray) -> np.ndarray:
        return w * np.minimum(1.0, radius / np.linalg.norm(w, axis=0)) if w.ndim == 2 else w

    return {k: one(w) for k, w in in_float64(params).items()}


def descend(params: Tree, grads: Tree, rate: float = RATE) -> Tree:
    return {k: np.asarray(params[k], np.float64) - rate * np.asarray(grads[k], np.float64) for k in params}


def assert_close(params: Tree, expected: Tree, radius: float = RADIUS) -> None:
    """Close to the expected weights, and in no case outside the ball."""
    assert set(params) == set(expected)
    for k, value in expected.items():
        np.testing.assert_allclose(np.asarray(params[k]), value, rtol=2e-6, atol=2e-6, err_msg=k)
        assert value.ndim < 2 or (exact_norm(params[k], 0) <= radius).all()


def stepper(tx: Any) -> Any:
    """A compiled step, to be called for many trainings."""

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, clipjax.metrics(state)

    return lambda *args: jax.tree.map(np.asarray, step(*args))


def train(tx: Any, params: Any, gradients: Any, step: Any = None) -> Any:
    """Yield the parameters and the metrics after each step."""
    step, state = step or stepper(tx), tx.init(params)
    for grads in gradients:
        params, state, metrics = step(params, state, grads)
        yield params, metrics


def last(steps: Any) -> Any:
    *_, final = steps
    return final
