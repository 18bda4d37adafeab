"""Derivatives of projections, by the weights, the limits and the rate: those of central differences."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax

# The function, and factors of its limits, and the rate: those of one function share a compiled program.
DIFFERENTIABLE = {
    "grow": (clipjax.min_max_norm, 10.0, 20.0, 1.0),
    "shrink": (clipjax.min_max_norm, 0.1, 0.2, 1.0),
    "inside": (clipjax.min_max_norm, 1e-3, 1e3, 1.0),
    "a part": (clipjax.min_max_norm, 10.0, 20.0, 0.3),
    "the other part": (clipjax.min_max_norm, 0.1, 0.2, 0.3),
    "unit": (lambda low, high, rate: clipjax.unit_norm(), 1.0, 1.0, 1.0),
    "box": (lambda low, high, rate: clipjax.box(low, high), -0.3, 0.4, 1.0),
    "non_negative": (lambda low, high, rate: clipjax.non_negative(), 1.0, 1.0, 1.0),
}
SHAPE = (3, 2)


@functools.cache
def gradient_and_values(make: Any) -> Any:
    """At each point, of weights and two limits, a weighted sum; and at the first its derivatives."""

    def of(points: Any, weights: Any, low: Any, high: Any, rate: Any) -> Any:
        def value(point: Any) -> jax.Array:
            project = make(low * point[-2], high * point[-1], rate=rate)
            return jnp.sum(weights * project(point[:-2].reshape(SHAPE)))

        return jax.grad(value)(points[0]), jax.vmap(value)(points)

    return jax.jit(of)


@pytest.mark.parametrize("name", list(DIFFERENTIABLE))
def test_derivatives_equal_central_differences(name: str) -> None:
    rng = np.random.default_rng(5)
    w, weights = rng.standard_normal((2, *SHAPE))
    h, here = 1e-6, np.array([*w.ravel(), 1.0, 1.0])
    steps = h * np.eye(len(here))
    make, *arguments = DIFFERENTIABLE[name]
    with jax.enable_x64(True):
        points = np.concatenate([here[None], here + steps, here - steps])
        gradient, values = gradient_and_values(make)(points, weights, *map(np.float64, arguments))
    assert gradient.dtype == np.float64
    above, below = np.asarray(values)[1:].reshape(2, -1)
    np.testing.assert_allclose(gradient, (above - below) / (2 * h), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("high", [2.0, math.inf])
def test_derivatives_are_finite_at_zero_and_in_the_rate(high: float) -> None:
    w = np.array([[0.0, 0.3, 1.2], [0.0, 0.4, 1.6]], np.float32)  # norms 0, 0.5, 2
    gradient, slope = by_weights_and_rate(w, 0.5, high)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[:, 0], 1.0)
    np.testing.assert_allclose(slope, 0.7 * (1 / 0.5 - 1), rtol=1e-5)


@jax.jit
def by_weights_and_rate(w: Any, rate: Any, high: Any) -> Any:
    return jax.grad(lambda w, rate: jnp.sum(clipjax.min_max_norm(1.0, high, rate=rate)(w)), argnums=(0, 1))(
        w, rate
    )


def test_derivatives_are_finite_at_zero() -> None:
    @jax.jit
    def gradients(w: Any) -> Any:
        projects = clipjax.unit_norm(), clipjax.box(-1.0, 1.0), clipjax.non_negative()
        return [jax.grad(lambda w, project=p: jnp.sum(project(w)))(w) for p in projects]

    for each in gradients(np.zeros((2, 2), np.float32)):
        assert np.isfinite(each).all()
