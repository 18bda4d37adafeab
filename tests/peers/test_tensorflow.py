"""The clips of TensorFlow, and those of a custom gradient."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from clipjax import functional
from tests.peers.draws import SEEDS, assert_close, draw

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def tf() -> Any:
    return importlib.import_module("tensorflow")


@SEEDS
def test_clip_by_value(tf: Any, seed: int) -> None:
    leaves, bound = draw(seed)
    leaves[0][0, :3] = [np.nan, np.inf, -np.inf]
    low, high = -bound / 30, bound / 20
    ours = functional.clip_by_value(leaves, low, high)
    theirs = [tf.clip_by_value(x, low, high) for x in leaves]
    for a, b in zip(ours, theirs, strict=True):
        # Ours rounds limits inward, by at most an ulp.
        np.testing.assert_allclose(a, b, rtol=1.2e-7)


@SEEDS
@pytest.mark.parametrize("axes", [None, 0, -1, (0, 1), (-3, 2), (0, 1, 2)])
def test_clip_by_norm(tf: Any, seed: int, axes: Any) -> None:
    """As a function with literal axes; as a transformation they mean the same."""
    (matrix, *_, kernel), bound = draw(seed)
    own = list(axes) if isinstance(axes, tuple) else axes
    for limit in (bound, bound / 10, 0.0):
        theirs = tf.clip_by_norm(kernel, limit, axes=own)
        assert_close([functional.clip_by_norm(kernel, limit, axes=axes)], [theirs])
    if axes in (None, 0, -1, (0, 1)):
        tx = clipjax.clip_by_norm(bound / 5, axes=axes)
        assert_close(
            [tx.update(matrix, tx.init(matrix))[0]],
            [tf.clip_by_norm(matrix, bound / 5, axes=own)],
        )


@SEEDS
def test_clip_by_global_norm(tf: Any, seed: int) -> None:
    leaves, bound = draw(seed)
    ours, norm = functional.clip_by_global_norm(leaves, bound)
    theirs, their_norm = tf.clip_by_global_norm(leaves, bound)
    assert_close([*ours, norm], [*theirs, their_norm])
    assert_close([functional.global_norm(leaves)], [tf.linalg.global_norm(leaves)])
    for share in (0.5, 2.0):
        known = np.float32(share * bound)
        ours, norm = functional.clip_by_global_norm(leaves, bound, norm=known)
        theirs, their_norm = tf.clip_by_global_norm(leaves, bound, use_norm=known)
        assert_close([*ours, norm], [*theirs, their_norm])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_entry_that_is_not_finite_makes_all_nan(tf: Any, bad: float) -> None:
    leaves = [np.array([bad, 1], np.float32), np.array([2], np.float32)]
    ours, _ = functional.clip_by_global_norm(leaves, 1.0)
    theirs, _ = tf.clip_by_global_norm(leaves, 1.0)
    for x in (*ours, *theirs):
        assert np.isnan(np.asarray(x)).all()


@SEEDS
@pytest.mark.parametrize("axes", [None, 0])
def test_custom_gradient(tf: Any, seed: int, axes: Any) -> None:
    (x, *_), bound = draw(seed)
    w = np.random.default_rng(seed).uniform(1, 2, size=(6, 6)).astype(np.float32)

    @tf.custom_gradient
    def layer(x: Any) -> Any:
        return tf.identity(x), lambda g: tf.clip_by_norm(g, bound, axes=axes)

    given = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(given)
        loss = tf.reduce_sum(tf.square(layer(given)) @ w)
    ours = jax.grad(
        lambda x: jnp.sum(clipjax.clip_gradient_by_norm(x, bound, axes=axes) ** 2 @ w)
    )(x)
    # The gradients before the clip are sums of 6 products of one sign, that each
    # library adds in its order.
    assert_close([ours], [tape.gradient(loss, given)], extra=1e-6)
