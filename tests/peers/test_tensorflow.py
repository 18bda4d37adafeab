"""The clips of TensorFlow, by value, norm and global norm, and of a custom gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from clipjax import functional
from tests.support.backward import MATRIX
from tests.support.peers import SEEDS, assert_close, draw

pytestmark = pytest.mark.peer


@pytest.fixture
def tf():
    return pytest.importorskip("tensorflow")


@SEEDS
def test_clip_by_value(tf, seed):
    leaves, bound = draw(seed)
    low, high = -bound / 30, bound / 20
    assert_close(
        functional.clip_by_value(leaves, low, high), [tf.clip_by_value(x, low, high) for x in leaves]
    )


@SEEDS
@pytest.mark.parametrize("axes", [None, 0, 1, -1, (0, 1), (0, 2), (0, 1, 2)])
def test_clip_by_norm(tf, seed, axes):
    leaves, bound = draw(seed)
    kernel = leaves[0]
    for limit in (bound, bound / 10):
        ours = functional.clip_by_norm(kernel, limit, axes=axes)
        theirs = tf.clip_by_norm(kernel, limit, axes=list(axes) if isinstance(axes, tuple) else axes)
        assert_close([ours], [theirs])


@SEEDS
def test_clip_by_global_norm(tf, seed):
    leaves, bound = draw(seed)
    ours, norm = functional.clip_by_global_norm(leaves, bound)
    theirs, their_norm = tf.clip_by_global_norm(leaves, bound)
    assert_close([*ours, norm], [*theirs, their_norm])


@SEEDS
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_clip_by_global_norm_with_a_known_norm(tf, seed, share):
    leaves, bound = draw(seed)
    known = np.float32(share * bound)
    ours, norm = functional.clip_by_global_norm(leaves, bound, norm=known)
    theirs, their_norm = tf.clip_by_global_norm(leaves, bound, use_norm=known)
    assert_close([*ours, norm], [*theirs, their_norm])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_nonfinite_entry_makes_all_nan(tf, bad):
    leaves = [np.array([bad, 1], np.float32), np.array([2], np.float32)]
    ours, _ = functional.clip_by_global_norm(leaves, 1.0)
    theirs, _ = tf.clip_by_global_norm(leaves, 1.0)
    for a, b in zip(ours, theirs, strict=True):
        assert np.isnan(a).all()
        assert np.isnan(b.numpy()).all()


@pytest.mark.parametrize("twice", [False, True])
def test_custom_gradient(tf, twice):
    @tf.custom_gradient
    def clip(x):
        return tf.identity(x), lambda g: tf.clip_by_norm(g, 1.0)

    x = np.asarray(MATRIX)
    leaf = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(leaf)
        y = clip(leaf @ x) if twice else clip(leaf)
        loss = tf.reduce_sum(y @ x)
    ours = jax.grad(
        lambda a: jnp.sum(
            (clipjax.clip_gradient_by_norm(a @ x, 1.0) if twice else clipjax.clip_gradient_by_norm(a, 1.0))
            @ x
        )
    )(x)
    np.testing.assert_allclose(ours, tape.gradient(loss, leaf).numpy(), rtol=1e-6)
