"""Bounds that are known only later, and limits that a dtype cannot represent."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax

ENTRIES = np.linspace(-1, 1, 101)


def test_a_traced_bound_below_0_counts_as_0() -> None:
    @jax.jit
    def clipped(bound: Any) -> Any:
        grads, weights = jnp.array([3.0, 4.0]), jnp.array([[3.0], [4.0]])
        tx = clipjax.clip_by_global_norm(bound)
        return tx.update(grads, tx.init(grads))[0], clipjax.max_norm(bound)(weights)

    for x in clipped(-1.0):
        np.testing.assert_array_equal(x, np.zeros_like(x))


@pytest.mark.parametrize(
    "limit",
    [
        10**10,
        np.int64(3 * 10**9),
        np.int64(2**40),
        np.array(2**40),
        np.longdouble(1e10),
    ],
)
def test_a_limit_that_int32_cannot_hold_clips_nothing(limit: Any) -> None:
    """JAX takes whole numbers for int32, which would wrap to a negative limit, or to 0."""
    tree = {"w": jnp.array([[3.0, 1.0], [4.0, 2.0]])}
    clips = [
        clipjax.clip_by_global_norm(limit),
        clipjax.clip_by_norm(limit),
        clipjax.clip_by_group_norm({"w": limit}),
        clipjax.clip_by_global_norm(lambda step: limit),
        clipjax.adaptive_grad_clip(0.1, eps=limit),
    ]
    each = [tx.update(tree, tx.init(tree), tree)[0] for tx in clips]
    each += [
        clipjax.max_norm(limit)(tree),
        clipjax.max_norm({"w": limit})(tree),
        clipjax.box(-limit, limit)(tree),
    ]
    each += [
        clipjax.functional.clip_by_global_norm(tree, limit)[0],
        clipjax.functional.clip_by_norm(tree, limit),
    ]
    each += [
        jax.vjp(lambda x: clipjax.clip_gradient_by_global_norm(x, limit), tree)[1](
            tree
        )[0]
    ]
    for clipped in each:
        np.testing.assert_array_equal(clipped["w"], tree["w"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_both_limits_are_rounded_inward(dtype: str) -> None:
    """Measured in float64, no entry is beyond what the user wrote; and none is far from
    it.
    """
    for low, high in ((-0.1, 0.3), (0.1, 0.7), (-0.7, -0.3), (0.3, 0.3000001)):
        x = np.asarray(clipjax.box(low, high)(jnp.asarray(ENTRIES, dtype))).astype(
            np.float64
        )
        ulp = float(jnp.finfo(dtype).eps)
        if high - low > ulp:
            assert x.min() >= low
            assert x.max() <= high
        np.testing.assert_allclose([x.min(), x.max()], [low, high], rtol=2 * ulp)


@pytest.mark.parametrize(
    "limit",
    [
        2**24 + 3,
        np.int32(2**24 + 3),
        jnp.int32(2**24 + 3),
        lambda _: jnp.int32(2**24 + 3),
        lambda _: 2**24 + 3,
    ],
)
def test_whole_limits_beyond_float32_are_rounded_inward(limit: Any) -> None:
    tx, x = clipjax.clip_by_value(limit), jnp.array([[3e7, -3e7]])
    np.testing.assert_array_equal(
        tx.update(x, tx.init(x))[0], [[2.0**24 + 2, -(2.0**24) - 2]]
    )
    step = 0 if callable(limit) else None
    np.testing.assert_array_equal(
        clipjax.box(-np.inf, limit)(x, step=step), [[2.0**24 + 2, -3e7]]
    )


def test_equal_limits_are_allowed() -> None:
    np.testing.assert_array_equal(
        clipjax.box(0.5, 0.5)(jnp.asarray(ENTRIES)), np.full(101, 0.5, np.float32)
    )
    np.testing.assert_allclose(
        clipjax.min_max_norm(2.0, 2.0)(jnp.ones((1, 3))),
        np.full((1, 3), 2.0),
        rtol=2e-6,
    )
