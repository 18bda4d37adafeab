"""Several projections of one tree: their order, on the same weights and on different parts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
from hypothesis import given
from hypothesis import strategies as st

import clipjax
from tests.support.oracles import exact_norm, ulp
from tests.support.trees import DTYPES, flat, same_bits
from tests.support.weights import every_kind, like, step_with


def nearest_in_both(w: np.ndarray, radius: float) -> np.ndarray:
    """Dykstra's algorithm: the nearest point of the orthant and the ball, for each column, in float64."""
    x, p, q = w.astype(np.float64), np.zeros(w.shape), np.zeros(w.shape)
    for _ in range(2000):
        y = np.maximum(x + p, 0)
        p = x + p - y
        norm = np.linalg.norm(y + q, axis=0)
        x = (y + q) * np.minimum(1, radius / np.maximum(norm, 1e-300))
        q = y + q - x
    return x


@jax.jit
def both_orders(w: Any, radius: Any) -> tuple[Any, Any, Any]:
    """Non-negative first, by the calls and as links, and the ball first."""
    positive, ball = clipjax.non_negative(), clipjax.max_norm(radius)
    return ball(positive(w)), step_with(optax.chain(positive, ball), w, like(w, 0)), positive(ball(w))


@given(st.integers(0, 2**30), st.sampled_from([0.125, 1.0, 10.0]))
def test_non_negative_then_max_norm_projects_onto_both(seed: int, radius: float) -> None:
    w = np.random.default_rng(seed).standard_normal((5, 3)).astype(np.float32)
    nearest = nearest_in_both(w, radius)
    called, linked, other = both_orders(w, radius)
    np.testing.assert_allclose(called, nearest, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(linked, nearest, rtol=1e-5, atol=1e-6)
    # The other order is in both as well, and no nearer.
    other = np.asarray(other, np.float64)
    assert (other >= 0).all()
    assert (exact_norm(other, 0) <= radius).all()
    way, other_way = (np.linalg.norm(x - w, axis=0) for x in (nearest, other))
    assert (way <= other_way * (1 + 1e-6)).all()


def test_the_other_order_ends_elsewhere() -> None:
    called, _, other = both_orders(np.array([[3.0], [-4.0]], np.float32), 1.0)
    np.testing.assert_allclose(called, [[1.0], [0.0]], rtol=1e-6)
    np.testing.assert_allclose(other, [[0.6], [0.0]], rtol=1e-6)


@every_kind
def test_links_on_the_same_weights_keep_both_bounds(kind: str) -> None:
    """Two links, one after the other: the second must not undo the first by a rounding."""
    rng = np.random.default_rng(3)
    tx = optax.chain(optax.sgd(1.0), clipjax.non_negative(), clipjax.unit_norm())
    step = jax.jit(lambda w, g: step_with(tx, w, g))
    w: Any = np.abs(rng.standard_normal((9, 4)))
    w = (w / np.linalg.norm(w, axis=0)).astype(DTYPES[kind])
    for _ in range(5):
        w = step(w, (0.3 * rng.standard_normal((9, 4))).astype(DTYPES[kind]))
        assert (np.asarray(w, np.float64) >= 0).all()
        norms = exact_norm(w, 0)
        assert (norms <= 1).all()
        assert (norms >= 1 - 4 * ulp(2.0, DTYPES[kind])).all()


def test_projections_of_different_parts() -> None:
    rng = np.random.default_rng(4)
    params = {k: (2 * rng.standard_normal((4, 3))).astype(np.float32) for k in ("a", "b", "c", "d")}
    parts = [
        clipjax.unit_norm(axes={"a": 0}),
        clipjax.min_max_norm(0.5, 1.0, axes={"b": 1}),
        clipjax.non_negative(where="c"),
        clipjax.box(-0.5, 0.5, where="d"),
    ]

    @jax.jit
    def results(p: Any) -> Any:
        return (
            functools.reduce(lambda p, project: project(p), parts, p),
            functools.reduce(lambda p, project: project(p), parts[::-1], p),
            step_with(optax.chain(*parts), p, like(p, 0)),
            [project(p) for project in parts],
        )

    expected, backwards, linked, alone = results(params)
    assert same_bits(expected, backwards)
    np.testing.assert_allclose(flat(linked), flat(expected), rtol=0, atol=2e-6)
    assert (exact_norm(linked["a"], 0) <= 1).all()
    assert (exact_norm(linked["b"], 1) <= 1).all()
    assert (flat(linked["c"]) >= 0).all()
    assert (np.abs(flat(linked["d"])) <= 0.5).all()
    for key, after in zip(params, alone, strict=True):
        assert all(same_bits(after[k], params[k]) == (k != key) for k in params)
