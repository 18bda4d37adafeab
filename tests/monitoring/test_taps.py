"""Taps: the gradient with respect to `clipjax.tap()` is what the clips saw."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import clipjax

NAN, INF = np.nan, np.inf
X = {"a": jnp.ones(3), "empty": jnp.zeros((0, 2)), "none": None}
# Gradients that a clip at 1 sees: an array and a vector.
GRADS = {
    "a": np.array([[3.0, 4.0], [0.3, 0.4], [NAN, 1.0]], np.float32),
    "b": np.array([0.5, 0.0], np.float32),
}
CLIPS = {
    "value": (
        lambda x, tap: clipjax.clip_gradient_by_value(x, -1.0, 1.0, tap=tap),
        lambda grads: [np.abs(x).max() for x in grads.values()],
    ),
    "norm": (
        lambda x, tap: clipjax.clip_gradient_by_norm(x, 1.0, tap=tap),
        lambda grads: [np.linalg.norm(x) for x in grads.values()],
    ),
    "units": (
        lambda x, tap: clipjax.clip_gradient_by_norm(x, 1.0, axes=-1, tap=tap),
        lambda grads: [
            norm
            for x in grads.values()
            for norm in np.atleast_1d(np.linalg.norm(np.float64(x), axis=-1))
        ],
    ),
    "global": (
        lambda x, tap: clipjax.clip_gradient_by_global_norm(x, 1.0, tap=tap),
        lambda grads: [
            np.linalg.norm(np.concatenate([*map(np.ravel, grads.values())]))
        ],
    ),
}


def inner(x: Any, grads: Any) -> jax.Array:
    """A number whose gradient with respect to x is `grads`."""
    return sum(
        jnp.sum(a * b) for a, b in zip(*map(jax.tree.leaves, (x, grads)), strict=True)
    )


def sums_of(norms: Any) -> list[float]:
    norms = np.array(norms, np.float64)
    finite = norms[np.isfinite(norms)]
    return [norms.size, np.sum(finite > 1), norms.size - finite.size, finite.sum()]


@pytest.mark.parametrize("name", CLIPS)
def test_a_tap_sums_what_a_clip_sees(name: str) -> None:
    """And changes neither the value nor the gradient."""
    clip, norms_of = CLIPS[name]

    def loss(x: Any, tap: Any, grads: Any) -> jax.Array:
        return inner(clip(x, tap), grads)

    @jax.jit
    def with_and_without(x: Any, tap: Any, grads: Any) -> Any:
        both = jax.value_and_grad(loss, argnums=(0, 1))(x, tap, grads)
        return both, jax.value_and_grad(loss)(x, None, grads)

    ones = jax.tree.map(np.ones_like, GRADS)
    finite = GRADS | {"a": np.nan_to_num(GRADS["a"], nan=0.5)}
    for grads in (GRADS, finite):
        both, alone = with_and_without(ones, clipjax.tap(), grads)
        value, (gradient, sums) = both
        jax.tree.map(np.testing.assert_array_equal, (value, gradient), alone)
        np.testing.assert_allclose(sums, sums_of(norms_of(grads)), rtol=1e-6)
    seen = clipjax.tapped(sums)
    norms = np.array(norms_of(finite))
    assert float(seen["count"]) == norms.size
    np.testing.assert_allclose(seen["mean_norm"], norms.mean(), rtol=1e-6)
    np.testing.assert_allclose(seen["clipped_fraction"], np.mean(norms > 1))


def test_taps_add_up_over_scan_remat_vmap_and_uses() -> None:
    """A recurrence of examples, twice, one of them in 16 bits."""
    steps, examples = 5, 3
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(steps, 4)), np.float32)

    def run(x: Any, tap: Any, dtype: Any) -> jax.Array:
        @jax.checkpoint
        def cell(carry: Any, w: Any) -> Any:
            carry = clipjax.clip_gradient_by_norm(carry, 1.0, tap=tap)
            return 1.5 * carry * w.astype(dtype), None

        return jnp.sum(jax.lax.scan(cell, x.astype(dtype), weights)[0])

    def loss(x: Any, tap: Any) -> jax.Array:
        one = jax.vmap(run, (0, None, None))
        return jnp.sum(one(x, tap, np.float32)) + jnp.sum(one(x, tap, jnp.bfloat16))

    x = jnp.asarray(rng.normal(size=(examples, 4)), np.float32)
    sums = jax.jit(jax.grad(loss, argnums=1))(x, clipjax.tap())

    expected = np.zeros(4)
    gradient = np.ones(4)
    for w in np.float64(weights)[::-1]:
        gradient = 1.5 * w * gradient
        norm = np.linalg.norm(gradient)
        expected += sums_of([norm])
        gradient *= min(1, 1 / norm)
    np.testing.assert_allclose(sums, 2 * examples * expected, rtol=1e-2)
    assert sums[0] == 2 * examples * steps

    each = jax.vmap(jax.grad(run, argnums=1), (0, None, None))(x, clipjax.tap(), float)
    np.testing.assert_allclose(clipjax.tapped(each)["count"], [steps] * examples)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", ["value", "norm", "global"])
def test_devices_count_a_norm_once(name: str, own: bool) -> None:
    """Also where each device has a tap of its own, whose gradients are added."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    clip, norms_of = CLIPS[name]
    rng = np.random.default_rng(0)
    grads = {k: rng.normal(size=(16, 3)).astype(np.float32) for k in "ab"}
    grads["b"] *= 0.01
    ones = jax.tree.map(jnp.ones_like, grads)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P()
    )
    def sums_on(x: Any, tap: Any, grads: Any) -> Any:
        def loss(tap: Any) -> jax.Array:
            mine = jax.lax.pcast(tap, "data", to="varying") if own else tap
            return jax.lax.psum(inner(clip(x, mine), grads), "data")

        return jax.grad(loss)(tap)

    sums = sums_on(ones, clipjax.tap(), grads)
    np.testing.assert_allclose(sums, sums_of(norms_of(grads)), rtol=1e-5)


def test_empty_leaves_have_no_norm() -> None:
    for name in ("value", "norm"):
        clip, _ = CLIPS[name]
        slope = jax.grad(lambda tap, clip=clip: 3 * jnp.sum(clip(X, tap)["a"]))
        grads = jax.jit(slope)(clipjax.tap())
        assert float(clipjax.tapped(grads)["count"]) == 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bounds_of_another_dtype_and_rank(dtype: str) -> None:
    """JAX refuses to compare these where its rules of promotion are strict."""
    x = np.ones((2, 3), jnp.dtype(dtype))
    bound = np.float32([1, 2, 9])

    def loss(x: Any, tap: Any) -> jax.Array:
        x = clipjax.clip_gradient_by_norm(x, bound, axes=0, tap=tap)
        x = clipjax.clip_gradient_by_value(x, -bound, np.float64(5.0), tap=tap)
        x = clipjax.clip_gradient_by_global_norm(x, bound[0], tap=tap)
        return jnp.sum(jnp.asarray(4.0, dtype) * x)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        sums = jax.jit(jax.grad(loss, argnums=1))(x, clipjax.tap())
    # The whole, its entries of 4 / 96**0.5, and units of norm 2**0.5 times these.
    assert sums[:3].tolist() == [5, 1, 0]


def test_a_tap_whose_gradient_is_not_taken_costs_nothing() -> None:
    def program(tap: Any) -> str:
        def loss(x: Any) -> Any:
            return jnp.sum(clipjax.clip_gradient_by_norm(x, 1.0, tap=tap) ** 2)

        return jax.jit(jax.grad(loss)).lower(jnp.ones(3)).as_text()

    assert program(clipjax.tap()) == program(None)
