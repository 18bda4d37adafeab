"""Beside TensorFlow, Keras, PyTorch and Optax: the same numbers, to float32 rounding.

Bounds are kept to, not met, so a clipped entry may be up to 4 ulp smaller than a peer's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from clipjax import functional

pytestmark = pytest.mark.peer

SEEDS = pytest.mark.parametrize("seed", range(5))
# 4 ulp of ours, and as many of a sum in float32 of a few hundred squares.
CLOSE = {"rtol": 2e-6, "atol": 1e-37}


def draw(seed):
    """A tree of three leaves whose scales differ by orders of magnitude, and a bound it exceeds or not."""
    random = np.random.default_rng(seed)
    shapes = [(5, 3, 4), (7,), (6, 8)]
    scales = 10.0 ** random.uniform(-2, 2, len(shapes))
    leaves = [
        (random.standard_normal(s) * scale).astype(np.float32)
        for s, scale in zip(shapes, scales, strict=True)
    ]
    norm = np.sqrt(sum(np.sum(leaf.astype(np.float64) ** 2) for leaf in leaves))
    return leaves, float(norm * random.uniform(0.05, 1.5))


def assert_close(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), **CLOSE)


def update(tx, grads):
    return jax.jit(tx.update)(grads, tx.init(grads))[0]


class TestOptax:
    @SEEDS
    @pytest.mark.parametrize(
        ("ours", "theirs"),
        [
            (clipjax.clip_by_value, optax.clip),
            (clipjax.clip_by_global_norm, optax.clip_by_global_norm),
            (clipjax.clip_by_rms, optax.clip_by_block_rms),
        ],
        ids=["value", "global_norm", "rms"],
    )
    def test_clips(self, seed, ours, theirs):
        grads, bound = draw(seed)
        bound = bound if ours is clipjax.clip_by_global_norm else bound / 20
        assert_close(update(ours(bound), grads), update(theirs(bound), grads))

    @SEEDS
    def test_the_global_norm(self, seed):
        grads, _ = draw(seed)
        np.testing.assert_allclose(functional.global_norm(grads), optax.tree.norm(grads), **CLOSE)

    @SEEDS
    def test_a_ball_for_each_leaf(self, seed):
        leaves, radius = draw(seed)
        theirs = [optax.projections.projection_l2_ball(w, scale=radius) for w in leaves]
        assert_close(clipjax.max_norm(radius, axes=None)(leaves), theirs)
        assert_close(functional.clip_by_norm(leaves, radius), theirs)

    @pytest.mark.parametrize(
        ("ours", "theirs"),
        [
            (clipjax.clip_by_global_norm(1.0), optax.clip_by_global_norm(1.0)),
            (clipjax.clip_by_value(0.1), optax.clip(0.1)),
            (clipjax.clip_by_rms(0.1), optax.clip_by_block_rms(0.1)),
        ],
        ids=["global_norm", "value", "rms"],
    )
    def test_training_goes_the_same_way(self, ours, theirs):
        random = np.random.default_rng(0)
        inputs = jnp.asarray(random.standard_normal((32, 4)), jnp.float32)
        targets = jnp.asarray(10 * random.standard_normal((32, 1)), jnp.float32)
        start = {
            "hidden": jnp.asarray(random.standard_normal((4, 8)), jnp.float32),
            "out": jnp.asarray(random.standard_normal((8, 1)), jnp.float32),
        }

        def loss(params):
            return jnp.mean((jnp.tanh(inputs @ params["hidden"]) @ params["out"] - targets) ** 2)

        def train(clip):
            tx = optax.chain(clip, optax.adam(1e-2))

            @jax.jit
            def step(params, state):
                updates, state = tx.update(jax.grad(loss)(params), state, params)
                return optax.apply_updates(params, updates), state

            params, state = start, tx.init(start)
            for _ in range(50):
                params, state = step(params, state)
            return params

        a, b = train(ours), train(theirs)
        assert float(loss(start)) > 1.05 * float(loss(a))
        for name in start:
            # 50 steps carry each other's rounding along.
            np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-5)


class TestTorch:
    @pytest.fixture
    def torch(self):
        return pytest.importorskip("torch")

    def gradients(self, torch, leaves):
        parameters = [torch.nn.Parameter(torch.zeros(leaf.shape)) for leaf in leaves]
        for parameter, leaf in zip(parameters, leaves, strict=True):
            parameter.grad = torch.tensor(leaf)
        return parameters

    @SEEDS
    @pytest.mark.parametrize("p", [1, 2, 3, np.inf])
    def test_clip_grad_norm(self, torch, seed, p):
        leaves, bound = draw(seed)
        parameters = self.gradients(torch, leaves)
        norm = torch.nn.utils.clip_grad_norm_(parameters, bound, norm_type=float(p))
        clipped, ours = functional.clip_by_global_norm(leaves, bound, ord=p)
        np.testing.assert_allclose(ours, norm.numpy(), **CLOSE)
        # Torch divides by its norm plus 1e-6.
        for a, parameter in zip(clipped, parameters, strict=True):
            np.testing.assert_allclose(a, parameter.grad.numpy(), rtol=2e-6 + 2e-6 / float(norm), atol=1e-37)

    @SEEDS
    def test_clip_grad_value(self, torch, seed):
        leaves, bound = draw(seed)
        parameters = self.gradients(torch, leaves)
        torch.nn.utils.clip_grad_value_(parameters, bound / 20)
        assert_close(functional.clip_by_value(leaves, -bound / 20, bound / 20), [p.grad for p in parameters])


class TestTensorFlow:
    @pytest.fixture
    def tf(self):
        return pytest.importorskip("tensorflow")

    @SEEDS
    def test_clip_by_value(self, tf, seed):
        leaves, bound = draw(seed)
        low, high = -bound / 30, bound / 20
        assert_close(
            functional.clip_by_value(leaves, low, high), [tf.clip_by_value(x, low, high) for x in leaves]
        )

    @SEEDS
    @pytest.mark.parametrize("axes", [None, 0, 1, -1, (0, 1), (0, 2), (0, 1, 2)])
    def test_clip_by_norm(self, tf, seed, axes):
        leaves, bound = draw(seed)
        kernel = leaves[0]
        for limit in (bound, bound / 10):
            ours = functional.clip_by_norm(kernel, limit, axes=axes)
            theirs = tf.clip_by_norm(kernel, limit, axes=list(axes) if isinstance(axes, tuple) else axes)
            assert_close([ours], [theirs])

    @SEEDS
    def test_clip_by_global_norm(self, tf, seed):
        leaves, bound = draw(seed)
        ours, norm = functional.clip_by_global_norm(leaves, bound)
        theirs, their_norm = tf.clip_by_global_norm(leaves, bound)
        assert_close([*ours, norm], [*theirs, their_norm])

    @SEEDS
    @pytest.mark.parametrize("share", [0.5, 2.0])
    def test_clip_by_global_norm_with_a_known_norm(self, tf, seed, share):
        leaves, bound = draw(seed)
        known = np.float32(share * bound)
        ours, norm = functional.clip_by_global_norm(leaves, bound, norm=known)
        theirs, their_norm = tf.clip_by_global_norm(leaves, bound, use_norm=known)
        assert_close([*ours, norm], [*theirs, their_norm])

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_a_nonfinite_entry_makes_all_nan(self, tf, bad):
        leaves = [np.array([bad, 1], np.float32), np.array([2], np.float32)]
        ours, _ = functional.clip_by_global_norm(leaves, 1.0)
        theirs, _ = tf.clip_by_global_norm(leaves, 1.0)
        for a, b in zip(ours, theirs, strict=True):
            assert np.isnan(a).all()
            assert np.isnan(b.numpy()).all()


class TestKeras:
    @pytest.fixture
    def keras(self):
        return pytest.importorskip("keras")

    def assert_max_norm(self, keras, weights, radius, axis, **rule):
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
    def test_max_norm_along_axes(self, keras, seed, axis):
        leaves, radius = draw(seed)
        axes = tuple(axis) if isinstance(axis, list) else axis
        self.assert_max_norm(keras, leaves[0], radius / 5, axis, axes=axes)

    @SEEDS
    def test_max_norm_of_dense_and_conv_kernels_as_documented(self, keras, seed):
        random = np.random.default_rng(seed)
        dense = random.standard_normal((12, 5)).astype(np.float32)
        conv = random.standard_normal((3, 3, 4, 6)).astype(np.float32)
        self.assert_max_norm(keras, dense, 2.0, 0)
        self.assert_max_norm(keras, conv, 3.0, [0, 1, 2])

    @SEEDS
    def test_clipnorm_and_global_clipnorm(self, keras, seed):
        leaves, bound = draw(seed)
        tensors = [keras.ops.convert_to_tensor(x) for x in leaves]
        each = keras.optimizers.SGD(clipnorm=bound / 3)._clip_gradients(tensors)
        together = keras.optimizers.SGD(global_clipnorm=bound)._clip_gradients(tensors)
        numpy = keras.ops.convert_to_numpy
        assert_close(functional.clip_by_norm(leaves, bound / 3), [numpy(x) for x in each])
        assert_close(functional.clip_by_global_norm(leaves, bound)[0], [numpy(x) for x in together])
