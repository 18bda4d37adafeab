"""Bounds that are known only later, and limits that a dtype cannot represent."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from clipjax import functional
from tests.support.trees import DTYPES

ENTRIES = np.linspace(-1, 1, 101)


def test_a_traced_bound_below_0_counts_as_0() -> None:
    @jax.jit
    def clipped(bound: Any) -> Any:
        grads, weights = jnp.array([3.0, 4.0]), jnp.array([[3.0], [4.0]])
        tx = clipjax.clip_by_global_norm(bound)
        projection = clipjax.max_norm(bound)
        return tx.update(grads, tx.init(grads))[0], projection.apply(weights)

    for x in clipped(-1.0):
        np.testing.assert_array_equal(x, np.zeros_like(x))


@pytest.mark.parametrize(
    "limit",
    [
        10**10,
        np.int64(2**40),
    ],
)
def test_a_limit_that_int32_cannot_hold_clips_nothing(limit: Any) -> None:
    """JAX takes whole numbers for int32, which would wrap, to a negative limit or 0."""
    clips = [
        clipjax.clip_by_global_norm(limit),
        clipjax.clip_by_norm(limit),
        clipjax.clip_by_group_norm({"w": limit}),
        clipjax.clip_by_global_norm(lambda step: limit),
        clipjax.adaptive_grad_clip(0.1, eps=limit),
    ]
    functions = [
        clipjax.max_norm(limit).apply,
        clipjax.max_norm({"w": limit}).apply,
        clipjax.box(-limit, limit).apply,
        lambda tree: functional.clip_by_global_norm(tree, limit)[0],
        lambda tree: functional.clip_by_norm(tree, limit),
    ]

    def layer(tree: Any) -> Any:
        return clipjax.clip_gradient_by_global_norm(tree, limit)

    @jax.jit
    def clipped(tree: Any) -> Any:
        each = [tx.update(tree, tx.init(tree), tree)[0] for tx in clips]
        each += [function(tree) for function in functions]
        return [*each, jax.vjp(layer, tree)[1](tree)[0]]

    tree = {"w": np.float32([[3.0, 1.0], [4.0, 2.0]])}
    for result in clipped(tree):
        np.testing.assert_array_equal(result["w"], tree["w"])


LIMITS = ((-0.1, 0.3), (0.1, 0.7), (-0.7, -0.3), (0.3, 0.3000001))


def test_both_limits_are_rounded_inward() -> None:
    """In float64 no entry is beyond what the user wrote, and none is far from it."""

    @jax.jit
    def boxed(tree: Any) -> Any:
        return [clipjax.box(low, high).apply(tree) for low, high in LIMITS]

    tree = {dtype: ENTRIES.astype(jnp.dtype(dtype)) for dtype in DTYPES}
    for (low, high), result in zip(LIMITS, boxed(tree), strict=True):
        for dtype, each in result.items():
            x = np.asarray(each).astype(np.float64)
            ulp = float(jnp.finfo(dtype).eps)
            if high - low > ulp:
                assert x.min() >= low
                assert x.max() <= high
            np.testing.assert_allclose([x.min(), x.max()], [low, high], rtol=2 * ulp)


def test_a_schedule_may_return_an_array() -> None:
    kernel = np.float32([[3, 3], [4, 4]])

    @jax.jit
    def projected(step: Any) -> Any:
        radii = clipjax.max_norm(lambda step: jnp.stack([step, step + 10.0]))
        return radii.apply(kernel, step=step)

    np.testing.assert_allclose(projected(1), [[0.6, 3], [0.8, 4]], rtol=1e-5)
    tx = clipjax.clip_by_global_norm(lambda step: jnp.ones(2))
    with pytest.raises(TypeError, match="max_norm must be a schedule"):
        tx.init(kernel)


def test_equal_limits_are_allowed() -> None:
    boxed = jax.jit(clipjax.box(0.5, 0.5).apply)(ENTRIES.astype(np.float32))
    np.testing.assert_array_equal(boxed, np.full(101, 0.5, np.float32))
    ones = np.ones((1, 3), np.float32)
    twos = jax.jit(clipjax.min_max_norm(2.0, 2.0).apply)(ones)
    np.testing.assert_allclose(twos, 2 * ones, rtol=2e-6)


def test_an_array_of_bounds_broadcasts_along_axes_of_size_1_only() -> None:
    x = np.float32([[1.0, 5.0, 9.0], [-1.0, -5.0, -9.0]])
    for limits in ([[2.0], [7.0]], [[2.0, 4.0, 8.0]], [[3.0]]):
        clipped = clipjax.box(-np.float32(limits), np.float32(limits)).apply(x)
        np.testing.assert_array_equal(clipped, np.clip(x, -np.array(limits), limits))
    with pytest.raises(ValueError, match=r"high must broadcast to shape \(2, 3\)"):
        clipjax.box(-np.ones(2), np.ones(2)).apply(x)


@pytest.mark.parametrize("number", [np.float64, np.float32, np.array])
def test_numbers_of_numpy_do_what_those_of_python_do(number: Any) -> None:
    """NumPy's float64 widened the norms of float32 leaves where x64 is enabled."""
    tree = {"w": jnp.full((3, 4), 0.5)}

    def steps(number: Any) -> Any:
        links = [
            clipjax.adaptive_grad_clip(number(0.25), eps=number(0.5)),
            clipjax.zclip(decay=number(0.75), eps=number(0.125), warmup_steps=1),
            clipjax.clip_by_lognormal(decay=number(0.75), eps=number(0.125)),
            clipjax.clip_by_quantile(number(0.25), learning_rate=number(0.5)),
            clipjax.autoclip(number(12.5)),
            clipjax.adagc(decay=number(0.75), warmup_steps=1),
        ]
        found = []
        for tx in links:
            state = tx.init(tree)
            for size in np.float32([1, 2, 8]):
                grads = jax.tree.map(lambda x, size=size: size * x, tree)
                updates, state = tx.update(grads, state, tree)
                found.append((updates, state))
        return found

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        each = [jax.tree.leaves(steps(kind)) for kind in (float, number)]
    for x, y in zip(*each, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
