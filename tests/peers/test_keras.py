"""The constraint MaxNorm of Keras, and the clips of its optimizers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from clipjax import functional
from tests.support.peers import SEEDS, assert_close, draw

pytestmark = pytest.mark.peer


@pytest.fixture
def keras():
    return pytest.importorskip("keras")


def assert_max_norm(keras, weights, radius, axis, **rule):
    ours = clipjax.max_norm(radius, **rule)(jnp.asarray(weights))
    theirs = keras.ops.convert_to_numpy(
        keras.constraints.MaxNorm(radius, axis=axis)(keras.ops.convert_to_tensor(weights))
    )
    # Keras multiplies with clip(norm, 0, radius) / (1e-7 + norm), even inside the ball.
    reduced = tuple(axis) if isinstance(axis, list) else axis
    norms = np.sqrt(np.sum(weights.astype(np.float64) ** 2, axis=reduced))
    np.testing.assert_allclose(ours, theirs, rtol=2e-6 + 2e-7 / norms.min(), atol=1e-37)


@SEEDS
@pytest.mark.parametrize("axis", [0, 1, 2, [0, 1], [0, 2], [0, 1, 2]])
def test_max_norm_along_axes(keras, seed, axis):
    leaves, radius = draw(seed)
    axes = tuple(axis) if isinstance(axis, list) else axis
    assert_max_norm(keras, leaves[0], radius / 5, axis, axes=axes)


@SEEDS
def test_max_norm_of_dense_and_conv_kernels_as_documented(keras, seed):
    random = np.random.default_rng(seed)
    dense = random.standard_normal((12, 5)).astype(np.float32)
    conv = random.standard_normal((3, 3, 4, 6)).astype(np.float32)
    assert_max_norm(keras, dense, 2.0, 0)
    assert_max_norm(keras, conv, 3.0, [0, 1, 2])


@SEEDS
def test_clipnorm_and_global_clipnorm(keras, seed):
    leaves, bound = draw(seed)
    tensors = [keras.ops.convert_to_tensor(x) for x in leaves]
    each = keras.optimizers.SGD(clipnorm=bound / 3)._clip_gradients(tensors)
    together = keras.optimizers.SGD(global_clipnorm=bound)._clip_gradients(tensors)
    numpy = keras.ops.convert_to_numpy
    assert_close(functional.clip_by_norm(leaves, bound / 3), [numpy(x) for x in each])
    assert_close(functional.clip_by_global_norm(leaves, bound)[0], [numpy(x) for x in together])
