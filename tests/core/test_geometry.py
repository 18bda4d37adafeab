"""Clips and projections are what geometry says: non-expansive, equivariant, and steps of bounded length."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from hypothesis import given
from hypothesis import strategies as st

import clipjax
from clipjax import functional
from tests.support.trees import same_bits

seeds = st.integers(0, 2**30)
radii = st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 10.0])
project = jax.jit(lambda w, r: clipjax.max_norm(r)(w))
clip = jax.jit(lambda t, c: functional.clip_by_global_norm(t, c)[0])


def weights(seed: int, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal((6, 3))).astype(np.float32)


@given(seeds, radii, st.sampled_from([1e-3, 1.0, 30.0]))
def test_projection_is_firmly_non_expansive(seed: int, radius: float, apart: float) -> None:
    """|Px - Py|² <= <Px - Py, x - y>, for each unit."""
    x = weights(seed)
    y = x + weights(seed + 1, apart)
    px, py = (np.asarray(project(v, radius), np.float64) for v in (x, y))
    moved, before = px - py, x.astype(np.float64) - y
    slack = 1e-6 * radius * np.linalg.norm(before, axis=0)  # the rounding of Px and Py to float32
    assert ((moved**2).sum(0) <= (moved * before).sum(0) + slack).all()


@given(seeds, radii, st.integers(-20, 20))
def test_clips_and_projections_are_scale_equivariant(seed: int, radius: float, exponent: int) -> None:
    """P_{sr}(sw) = s P_r(w); bit for bit for a power of two."""
    w, s = weights(seed), np.float32(2.0**exponent)
    assert same_bits(project(s * w, radius * float(s)), s * np.asarray(project(w, radius)))
    assert same_bits(clip(s * w, radius * float(s)), s * np.asarray(clip(w, radius)))


@given(seeds, radii, radii)
def test_projections_onto_two_balls_are_that_onto_the_smaller(seed: int, r: float, s: float) -> None:
    w = weights(seed)
    np.testing.assert_allclose(project(project(w, s), r), project(w, min(r, s)), rtol=1e-6, atol=1e-30)


@given(seeds, st.sampled_from([0.1, 1.0, 100.0]))
def test_grouping_does_not_matter(seed: int, bound: float) -> None:
    w = weights(seed)
    together = np.asarray(clip(w, bound))
    columns = clip([w[:, :1], (w[:, 1:], {})], bound)
    apart = np.concatenate([columns[0], columns[1][0]], axis=1)
    np.testing.assert_allclose(apart, together, rtol=3e-7)
    flipped = np.asarray(clip({"a": w[::-1].T}, bound)["a"]).T[::-1]
    np.testing.assert_allclose(flipped, together, rtol=3e-7)


@given(seeds)
def test_what_is_clipped_points_the_same_way(seed: int) -> None:
    w = weights(seed, 100.0)
    clipped = np.asarray(clip(w, 1.0), np.float64)
    expected = w.astype(np.float64) / np.linalg.norm(w.astype(np.float64))
    np.testing.assert_allclose(clipped, expected, rtol=4e-7)


RATE, STEPS = 0.1, 12


@jax.jit
def descend(grads: Any, bound: Any, momentum: Any) -> Any:
    """The path from the origin along the clipped gradients."""
    tx = optax.chain(clipjax.clip_by_global_norm(bound), optax.sgd(RATE, momentum))
    start = grads[0] * 0

    def one(carry: Any, g: Any) -> Any:
        params, state = carry
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return jax.lax.scan(one, (start, tx.init(start)), grads)[1]


@given(seeds, st.sampled_from([0.01, 0.5, 3.0]), st.sampled_from([0.0, 0.9]))
def test_sgd_moves_at_most_as_far_as_its_clip_allows(seed: int, bound: float, momentum: float) -> None:
    """After T steps: rate · bound · T, over 1 - momentum."""
    rng = np.random.default_rng(seed)
    grads = rng.standard_normal((STEPS, 6, 3)) * 10 ** rng.uniform(-3, 6, (STEPS, 1, 1))
    path = np.asarray(descend(grads.astype(np.float32), bound, momentum), np.float64)
    moved = np.linalg.norm(path.reshape(STEPS, -1), axis=1)
    limit = RATE * bound * np.arange(1, STEPS + 1) / (1 - momentum)
    assert (moved <= limit * (1 + 1e-6)).all()  # the sums of float32 round
    assert moved.max() > 0
