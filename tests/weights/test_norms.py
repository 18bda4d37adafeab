"""Projections of norms, where their bounds are at odds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax


def test_the_upper_bound_wins_where_traced_bounds_cross() -> None:
    """Known ones raise; traced ones cannot."""

    @jax.jit
    def projected(weights: Any, low: Any, high: Any) -> Any:
        return clipjax.min_max_norm(low, high).apply(weights)

    for dtype, error in ((np.float32, 2e-6), (jnp.bfloat16, 1e-2)):
        weights = jnp.asarray(
            np.random.default_rng(0).normal(size=(50, 8)) * 2.0 ** np.arange(-4, 4),
            dtype,
        )
        once = projected(weights, 5.0, 1.0)
        np.testing.assert_allclose(
            np.linalg.norm(np.asarray(once, np.float64), axis=0), np.ones(8), rtol=error
        )
        np.testing.assert_array_equal(once, projected(once, 5.0, 1.0))


def test_a_rate_that_rises_above_1_turns_no_weights_over() -> None:
    project = clipjax.min_max_norm(1.0, 2.0, rate=lambda step: 3.0)
    projected = jax.jit(project.apply)(np.float32([[3.0], [4.0]]), step=0)
    np.testing.assert_allclose(projected, [[1.2], [1.6]], rtol=2e-6)


def test_an_infinite_norm_is_not_inside_an_infinite_bound() -> None:
    projected = clipjax.min_max_norm(0.0, np.inf).apply(np.float32([[np.inf], [1]]))
    assert np.isnan(projected).all()


def test_bounds_of_units_broadcast() -> None:
    """An array bounds units one by one."""
    project = clipjax.max_norm(np.float32([1.0, 2.5]))
    projected = jax.jit(project.apply)(np.float32([[3.0, 3.0], [4.0, 4.0]]))
    np.testing.assert_allclose(projected, [[0.6, 1.5], [0.8, 2.0]], rtol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "inside"),
    [("float32", 3.6e-6), ("float16", 1.9e-3), ("bfloat16", 1.5e-2)],
)
def test_norms_just_below_the_lower_bound_count_as_inside(
    dtype: str, inside: float
) -> None:
    """So what was brought up to it, less the margin, is not moved again."""
    weights = jnp.asarray([[1 - inside, 1 - 1.5 * inside]], dtype)
    for project in (clipjax.unit_norm(), clipjax.min_max_norm(1.0, 2.0)):
        changed = np.asarray(jax.jit(project.apply)(weights) != weights)
        assert changed.tolist() == [[False, True]], project
