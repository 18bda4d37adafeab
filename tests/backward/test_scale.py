"""A scaled gradient is one product with the factor, rounded once to the dtype of the gradient."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

import clipjax
from tests.support.backward import back, each_dtype, pulled
from tests.support.oracles import INF
from tests.support.trees import DTYPES


@jax.jit
def scaled(g, factor):
    return pulled(lambda x: clipjax.scale_gradient(x, factor), g)


@each_dtype
def test_is_one_rounding(dtype):
    rng = np.random.default_rng(0)
    g = (rng.standard_normal(100) + (1j * rng.standard_normal(100) if dtype is np.complex64 else 0)).astype(
        dtype
    )
    wide = np.complex64 if dtype is np.complex64 else np.float32
    want = (g.astype(wide) * np.float32(0.3)).astype(dtype)
    for got in (back(lambda x: clipjax.scale_gradient(x, 0.3))(g), scaled(g, 0.3)):
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got), want)


def test_an_array_of_factors():
    """Known or traced, of another dtype than the gradient, too."""
    factors = np.array([[0.0], [-1.0]], np.float32)
    want = np.broadcast_to(factors, (2, 3))
    g = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(back(lambda x: clipjax.scale_gradient(x, factors))(g), want)
    for dtype in DTYPES.values():
        got = scaled(g.astype(dtype), factors)
        assert got.dtype == dtype
        np.testing.assert_array_equal(np.asarray(got, np.float32), want)


def test_float64():
    with jax.enable_x64(True):
        got = back(lambda x: clipjax.scale_gradient(x, 0.3))(np.array([1 / 3]))
        assert got.dtype == np.float64
        assert got[0] == 0.3 * (1 / 3)


def test_errors():
    x = np.ones(2, np.float32)
    for factor, error in (
        (math.nan, ValueError),
        (INF, ValueError),
        ("2", TypeError),
        (True, TypeError),
        (1j, TypeError),
        (lambda step: 1.0, TypeError),
    ):
        with pytest.raises(error, match="factor"):
            clipjax.scale_gradient(x, factor)
    with pytest.raises(ValueError, match="shape"):
        clipjax.scale_gradient(x, np.ones(3, np.float32))
