"""Clipped gradients that can be worked out by hand."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from tests.support.backward import CLIPS, MATRIX, back, close, each_clip, expected, pulled


def test_products():
    """The gradient of a product is [[3, 7], [3, 7]]; then clipped at either factor, or in between."""

    def both_factors(x, y):
        return jnp.sum(clipjax.clip_gradient_by_norm(x, 1.0) @ clipjax.clip_gradient_by_norm(y, 0.5))

    def in_between(x):
        return jnp.sum(clipjax.clip_gradient_by_norm(x @ MATRIX, 1.0) @ MATRIX)

    @jax.jit
    def gradients(x):
        free = jax.grad(lambda x: jnp.sum(x @ MATRIX))(x)
        return free, jax.grad(both_factors, argnums=(0, 1))(x, x), jax.grad(in_between)(x)

    free, (in_x, in_y), between = gradients(MATRIX)
    np.testing.assert_array_equal(free, [[3, 7], [3, 7]])
    np.testing.assert_allclose(in_x, [[0.278543, 0.6499337]] * 2, rtol=1e-6)
    # The gradient in y is [[4, 4], [6, 6]] before.
    np.testing.assert_allclose(in_y, np.array([[4, 4], [6, 6]]) * 0.5 / math.sqrt(104), rtol=1e-6)
    np.testing.assert_allclose(between, [[1.57841039, 3.43536377]] * 2, rtol=1e-6)


def test_value_and_scale():
    # 0.1 is larger in float32, so it is rounded inwards.
    got = jax.jit(jax.grad(lambda x: clipjax.clip_gradient_by_value(x, -0.1, 0.1)))(3.0)
    assert 0.1 * (1 - 1e-7) < float(got) <= 0.1
    assert jax.grad(lambda x: clipjax.scale_gradient(x, 5.0))(3.0) == 5.0


def test_two_limits():
    """One of them at zero, and one of another size than the other; known and traced."""
    g = np.array([-3.0, -0.25, -0.1, 0.0, 0.1, 0.5, 4.0], np.float32)
    layer = jax.jit(lambda g, low: pulled(lambda x: clipjax.clip_gradient_by_value(x, low, 0.5), g))
    for low in (-0.25, 0.0):
        np.testing.assert_array_equal(layer(g, low), np.clip(g, low, 0.5))
    got = back(lambda x: clipjax.clip_gradient_by_value(x, -0.25, 0.5))(g)
    np.testing.assert_array_equal(got, np.clip(g, -0.25, 0.5))


def test_units():
    got = back(lambda x: clipjax.clip_gradient_by_norm(x, 1.0, axes=1))(MATRIX)
    np.testing.assert_allclose(got, MATRIX / np.linalg.norm(MATRIX, axis=1, keepdims=True), rtol=1e-6)


def test_axes_by_path():
    ones = np.full((2, 2), 3, np.float32)
    layer = back(lambda p: clipjax.clip_gradient_by_norm(p, 1.0, axes={"*kernel": 0}))
    got = layer({"dense": {"kernel": ones, "bias": ones[0]}})
    np.testing.assert_allclose(got["dense"]["kernel"], np.full((2, 2), math.sqrt(0.5)), rtol=1e-6)
    np.testing.assert_array_equal(got["dense"]["bias"], [3, 3])


@pytest.mark.full  # as the examples in the docstrings, which run without jit
@each_clip
def test_without_jit(name):
    got = jax.grad(lambda x: jnp.sum(MATRIX * CLIPS[name](x)))(MATRIX)
    close(got, expected(name, MATRIX))


def test_nested_in_each_other():
    def layer(x):
        x = clipjax.clip_gradient_by_value(x, -1.0, 1.0)
        x = clipjax.scale_gradient(x, 2.0)
        return clipjax.clip_gradient_by_norm(x, 5.0)

    g = np.array([3.0, 4.0, 12.0], np.float32)
    np.testing.assert_allclose(back(layer)(g), np.clip(2 * g * 5 / 13, -1, 1), rtol=1e-6)
