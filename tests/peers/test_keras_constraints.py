"""The projections of weights beside Keras's constraints of the same names."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import clipjax

pytestmark = pytest.mark.peer


@pytest.fixture
def constraints() -> Any:
    return pytest.importorskip("keras").constraints


def check(ours: Any, theirs: Any, weights: np.ndarray, axis: Any) -> None:
    keras = pytest.importorskip("keras")
    got = np.asarray(ours(jnp.asarray(weights)))
    want = keras.ops.convert_to_numpy(theirs(keras.ops.convert_to_tensor(weights)))
    # Keras multiplies by desired / (1e-7 + norm), inside the bounds, too.
    norm = np.linalg.norm(weights.astype(np.float64), axis=axis, keepdims=True)
    np.testing.assert_allclose(got, want * (1 + 1e-7 / np.where(norm > 0, norm, 1)), rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_norms(constraints: Any, scale: float, rate: float, axis: int) -> None:
    w = (scale * np.random.default_rng(7).standard_normal((6, 5))).astype(np.float32)
    w[:, 0] = 0
    for low, high in ((0.0, 1.0), (0.5, 2.0), (3.0, 3.0)):
        theirs = constraints.MinMaxNorm(low, high, rate=rate, axis=axis)
        check(clipjax.min_max_norm(low, high, rate=rate, axes=axis), theirs, w, axis)
    check(clipjax.unit_norm(axes=axis), constraints.UnitNorm(axis=axis), w, axis)
    check(clipjax.max_norm(2.0, axes=axis), constraints.MaxNorm(2.0, axis=axis), w, axis)


def test_convolutions_by_default(constraints: Any) -> None:
    w = np.random.default_rng(8).standard_normal((3, 3, 4, 6)).astype(np.float32)
    units_of_w = w.reshape(-1, 6)
    ours = clipjax.unit_norm()(jnp.asarray(w)).reshape(-1, 6)
    check(lambda _: ours, constraints.UnitNorm(axis=0), units_of_w, 0)
    theirs = np.asarray(constraints.UnitNorm(axis=[0, 1, 2])(w))
    np.testing.assert_allclose(ours, theirs.reshape(-1, 6), rtol=1e-6)


def test_entries(constraints: Any) -> None:
    w = np.random.default_rng(9).standard_normal((6, 5)).astype(np.float32)
    np.testing.assert_array_equal(clipjax.non_negative()(w), np.asarray(constraints.NonNeg()(w)))
