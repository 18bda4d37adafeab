"""Bounds and factors: known or traced alike, without a gradient of their own, and refused where wrong."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from tests.support.backward import MATRIX, close, pulled


@pytest.mark.parametrize(
    ("layer", "arguments"),
    [
        (clipjax.clip_gradient_by_norm, (0.5,)),
        (clipjax.clip_gradient_by_global_norm, (0.5,)),
        (clipjax.clip_gradient_by_value, (-0.25, 0.5)),
        (clipjax.clip_gradient_by_value, (0.5,)),
        (clipjax.scale_gradient, (0.5,)),
    ],
)
def test_traced_alike_with_gradient_zero(layer, arguments):
    n = np.arange(2, dtype=np.int32)

    def loss(a, bounds):
        return jnp.sum(layer({"a": a, "n": n}, *bounds)["a"] ** 2)

    @jax.jit
    def gradients(a, bounds):
        known = [tuple(kind(b) for b in arguments) for kind in (float, np.float32, np.asarray)]
        return (
            [jax.grad(loss)(a, k) for k in known],
            jax.grad(loss, argnums=(0, 1))(a, bounds),
            # A bound that depends on what is differentiated, as a constant would.
            jax.grad(lambda a: loss(a, tuple(b * jnp.sum(a) / 10 for b in bounds)))(a),
        )

    (want, *known), (got, of_bounds), dependent = gradients(MATRIX, arguments)
    assert np.abs(want - 2 * MATRIX).max() > 0.1
    for gradient in (*known, got, dependent):
        close(gradient, want)
    assert not np.any(of_bounds)


def test_a_traced_negative_bound_is_zero():
    got = jax.jit(lambda b: pulled(lambda x: clipjax.clip_gradient_by_norm(x, b), MATRIX))(-1.0)
    np.testing.assert_array_equal(got, np.zeros((2, 2)))


@pytest.mark.parametrize("layer", ["norm", "global_norm"])
@pytest.mark.parametrize(
    ("bound", "error"),
    [
        (-1.0, ValueError),
        (math.nan, ValueError),
        (np.array(-2.0), ValueError),
        ("1", TypeError),
        (True, TypeError),
        (None, TypeError),
        (1j, TypeError),
        (lambda step: 1.0, TypeError),
    ],
)
def test_bad_ones_raise_at_the_call(layer, bound, error):
    with pytest.raises(error, match="max_norm"):
        getattr(clipjax, f"clip_gradient_by_{layer}")(MATRIX, bound)


def test_bad_limits_raise_at_the_call():
    with pytest.raises(ValueError, match=r"low=2\.0 and high=1\.0"):
        clipjax.clip_gradient_by_value(MATRIX, 2.0, 1.0)
    with pytest.raises(ValueError, match="bound must be at least 0"):
        clipjax.clip_gradient_by_value(MATRIX, -1.0)
    with pytest.raises(TypeError, match="high must be a number or an array here, not a schedule"):
        clipjax.clip_gradient_by_value(MATRIX, -1.0, lambda step: 1.0)
    with pytest.raises(TypeError, match="complex, of dtype"):
        clipjax.clip_gradient_by_value(MATRIX.astype(np.complex64), -1.0, 1.0)
    with pytest.raises(ValueError, match="shape"):
        clipjax.clip_gradient_by_value(MATRIX, -1.0, np.ones(3, np.float32))


def test_bad_shapes_and_axes_raise_at_the_call():
    for shape, axes in (((2,), None), ((2, 1), 0), ((3,), 0)):
        with pytest.raises(ValueError, match="shape"):
            clipjax.clip_gradient_by_norm(MATRIX, np.ones(shape, np.float32), axes)
    with pytest.raises(ValueError, match="shape"):
        clipjax.clip_gradient_by_global_norm(MATRIX, np.ones(2, np.float32))
    with pytest.raises(ValueError, match="axes: 2 is out of range"):
        clipjax.clip_gradient_by_norm(MATRIX, 1.0, 2)
    with pytest.raises(ValueError, match="matches no leaf"):
        clipjax.clip_gradient_by_norm({"a": MATRIX}, 1.0, {"b": 0})
