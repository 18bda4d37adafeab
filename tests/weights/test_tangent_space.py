"""`tangent_space`: nothing is left of a gradient along its weights, whatever these are."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

import clipjax
from tests.support.trees import DTYPES, same_bits
from tests.support.weights import every_kind, exact

SHAPE = (50, 40)  # for every test in a dtype, so that one program is compiled for it


@functools.cache
def run(keep_norm: bool = True, axes: Any = 0) -> Any:
    tx = clipjax.tangent_space(axes=axes, keep_norm=keep_norm)
    return jax.jit(lambda grads, weights: tx.update(grads, tx.init(weights), weights))


def tangential(g: np.ndarray, w: np.ndarray) -> np.ndarray:
    """What is left of columns, in float64 or wider, each leaf first brought to a size near 1."""
    w = w / np.where(np.abs(w).max() > 0, np.abs(w).max(), 1)
    inner = np.sum((np.conj(w) * g).real, axis=0)
    squares = np.sum(np.abs(w) ** 2, axis=0)
    return g - w * (inner / np.where(squares > 0, squares, 1))


def sizes(x: np.ndarray) -> np.ndarray:
    unit = max(np.abs(x).max(), 1e-300)
    return unit * np.sqrt(np.sum(np.abs(x / unit) ** 2, axis=0))


def eps_of(dtype: Any) -> float:
    return float(ml_dtypes.finfo(np.float32 if dtype == np.complex64 else dtype).eps)


def drawn(rng: Any, dtype: Any, scale: float) -> np.ndarray:
    real, imaginary = scale * rng.standard_normal((2, *SHAPE))
    return (real + 1j * imaginary if dtype == np.complex64 else real).astype(dtype)


SCALES = st.sampled_from([1e-30, 1e-3, 1.0, 1e3, 1e30])


@pytest.mark.parametrize("dtype", [*DTYPES.values(), np.complex64], ids=[*DTYPES, "c64"])
@given(
    seed=st.integers(0, 2**32 - 1), of_grad=SCALES, of_weight=SCALES, along=st.sampled_from([0.0, 3.0, 100.0])
)
def test_right_in_every_dtype(dtype: Any, seed: int, of_grad: float, of_weight: float, along: float) -> None:
    rng = np.random.default_rng(seed)
    if dtype == np.float16:
        of_grad, of_weight = (float(np.clip(x, 1e-2, 1e2)) for x in (of_grad, of_weight))
    along = min(along, 0.05 / eps_of(dtype))  # or nothing would be left
    w, g = drawn(rng, dtype, of_weight), drawn(rng, dtype, of_grad)
    g = (exact(g) + along * of_grad / of_weight * exact(w)).astype(dtype)  # with more of it along the weights
    eps, want, size = eps_of(dtype), tangential(exact(g), exact(w)), sizes(exact(g))
    for keep_norm in (True, False):
        got, state = run(keep_norm)(g, w)
        assert got.dtype == dtype
        got = exact(got)
        expected = want * (size / sizes(want)) if keep_norm else want
        # Rounded entries, and float16's subnormals.
        room = 2 * eps * size + (6e-8 * math.sqrt(SHAPE[0]) if dtype == np.float16 else 0)
        assert (sizes(got - expected) <= room).all()
        if keep_norm:
            assert (np.abs(sizes(got) - size) <= room).all()
        inner = np.abs(np.sum((np.conj(exact(w) / of_weight) * (got / of_grad)).real, axis=0))
        assert (inner <= room / of_grad * sizes(exact(w)) / of_weight).all()
        seen = clipjax.metrics(state)
        removed = sizes(exact(g) - want).max()
        np.testing.assert_allclose(seen["tangent_space/norm"], removed, rtol=1e-4)
        np.testing.assert_allclose(seen["tangent_space/scale"], (sizes(want) / size).min(), rtol=1e-2)
        assert seen["tangent_space/clipped_fraction"] == 1


@every_kind
def test_nothing_is_left_of_a_gradient_along_the_weights(kind: str) -> None:
    """What rounding leaves of it is no direction: it becomes 0, and is not made as long as the gradient."""
    w = drawn(np.random.default_rng(0), DTYPES[kind], 1.0)
    for factor in (-3.0, 1 / 3, 1e-2):
        g = (factor * exact(w)).astype(w.dtype)  # rounded anew
        for keep_norm in (True, False):
            got, state = run(keep_norm)(g, w)
            assert not np.asarray(got).any()
            assert clipjax.metrics(state)["tangent_space/scale"] == 0


@pytest.mark.parametrize("small", [1e-3, 1e-5, 1e-6])
def test_what_little_is_tangential_is_told_from_noise(small: float) -> None:
    """The error of the direction grows as the docstring says."""
    rng = np.random.default_rng(1)
    w = drawn(rng, np.float32, 1.0)
    g = (exact(w) + small * rng.standard_normal(SHAPE)).astype(np.float32)
    size, t = sizes(exact(g)), sizes(tangential(exact(g), exact(w)))
    got = exact(run()(g, w)[0])
    np.testing.assert_allclose(sizes(got), size, rtol=2 * eps_of(np.float32))
    inner = np.abs(np.sum(got * exact(w), axis=0))
    assert (inner <= (eps_of(np.float32) + 2.0**-30 * size / t) * size * sizes(exact(w))).all()


@every_kind
def test_zero_weights_right_angles_and_zero_gradients_keep_their_bits(kind: str) -> None:
    g = drawn(np.random.default_rng(2), DTYPES[kind], 1.0)
    g[0] = -0.0
    zero, across = np.zeros_like(g), np.zeros_like(g)
    across[0] = 3  # where the gradient is 0
    for w in (zero, across):
        got, state = run()(g, w)
        assert same_bits(got, g)
        assert clipjax.metrics(state)["tangent_space/clipped_fraction"] == 0
    for w in (zero, g):
        assert same_bits(run()(-zero, w)[0], -zero)


def test_a_unit_of_one_entry_has_no_tangent() -> None:
    tree = {"scale": np.float32(3.0), "kernel": np.ones((1, 4), np.float32)}
    got, _ = run(axes=clipjax.fan_in)(tree, tree)
    assert got["scale"] == 3
    assert not np.asarray(got["kernel"]).any()
    assert not np.asarray(run(axes=None)(tree, tree)[0]["scale"]).any()


def test_float64_at_the_ends_of_its_range() -> None:
    with jax.enable_x64(True):
        for of_weight, of_grad in ((1e300, 1e-300), (1e-300, 1e300)):
            w, g = np.array([[3.0], [4.0]]) * of_weight, np.array([[-5.0], [0.0]]) * of_grad
            np.testing.assert_allclose(run()(g, w)[0] / of_grad, [[-4.0], [3.0]], rtol=1e-14)
            np.testing.assert_allclose(run(keep_norm=False)(g, w)[0] / of_grad, [[-3.2], [2.4]], rtol=1e-14)


def test_the_largest_and_the_smallest_norms_of_float32() -> None:
    for size in (1e-37, 5e37):
        w, g = np.array([[1.0], [1.0]], np.float32), np.array([[size], [size * (1 + 2.0**-20)]], np.float32)
        got = exact(run()(g, w)[0])  # made a million times as long
        np.testing.assert_allclose(got / size, [[-1.0], [1.0]], rtol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_units_are_nan(bad: float) -> None:
    g, w = np.ones((2, *SHAPE), np.float32)
    g[0] = 0
    for place in (g, w):
        place[1, 1] = bad
        got, state = run()(g, w)
        np.testing.assert_array_equal(np.isnan(got).all(axis=0), np.arange(SHAPE[1]) == 1)
        assert np.isfinite(np.delete(np.asarray(got), 1, axis=1)).all()
        assert clipjax.metrics(state)["tangent_space/nonfinite_count"] == 1
        place[1, 1] = 1.0


@pytest.mark.parametrize("keep_norm", [True, False])
def test_derivatives(keep_norm: bool) -> None:
    """Against differences of the formula in float64, in the gradient and in the weights."""
    rng = np.random.default_rng(3)
    g, w, dg, dw, of = rng.standard_normal((5, 6, 3))

    def formula(g: np.ndarray, w: np.ndarray) -> float:
        t = tangential(g, w)
        return float(np.sum(of * (t * sizes(g) / sizes(t) if keep_norm else t)))

    with jax.enable_x64(True):
        total = jax.grad(lambda g, w: jnp.sum(of * run(keep_norm)(g, w)[0]), (0, 1))
        slopes = map(np.asarray, jax.jit(total)(g, w))
    step = 1e-6
    expected = (formula(g + step * dg, w + step * dw) - formula(g - step * dg, w - step * dw)) / (2 * step)
    np.testing.assert_allclose(sum(map(np.vdot, slopes, (dg, dw))), expected, rtol=1e-8)


def test_leaves_that_axes_skip_are_left_alone() -> None:
    tree = {"kernel": np.ones((2, 3), np.float32), "bias": np.ones(3, np.float32)}
    tx = clipjax.tangent_space(axes={"kernel": None})
    got, _ = tx.update(tree, tx.init(tree), tree)
    assert same_bits(got["bias"], tree["bias"])
    assert not np.asarray(got["kernel"]).any()


def test_inside_shard_map_units_may_be_split() -> None:
    mesh, spec = Mesh(np.array(jax.devices()[:1]), "x"), PartitionSpec("x")
    g, w = np.random.default_rng(1).standard_normal((2, *SHAPE)).astype(np.float32)
    tx = clipjax.tangent_space(axes=0, specs=spec)
    local = jax.shard_map(
        lambda g, w: tx.update(g, tx.init(w), w)[0], mesh=mesh, in_specs=(spec, spec), out_specs=spec
    )
    np.testing.assert_allclose(jax.jit(local)(g, w), run()(g, w)[0], rtol=1e-6)


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_keep_norm_is_a_bool(value: Any) -> None:
    with pytest.raises(TypeError, match=f"keep_norm must be True or False, got {value!r}"):
        clipjax.tangent_space(keep_norm=value)


def test_weights_turn_and_get_no_longer() -> None:
    """Of separable logistic regression, whose loss falls as the weights get longer."""
    x = np.random.default_rng(4).standard_normal((40, 5)).astype(np.float32)
    y = np.sign(x @ np.arange(1, 6, dtype=np.float32))

    def loss(w: Any) -> Any:
        return jnp.mean(jnp.logaddexp(0.0, -y * (x @ w)))

    tx = clipjax.tangent_space()

    @jax.jit
    def train(w: Any) -> Any:
        def step(_: Any, w: Any) -> Any:
            return w - 1e-3 * tx.update(jax.grad(loss)(w), None, w)[0]

        return jax.lax.fori_loop(0, 200, step, w)

    start = np.ones(5, np.float32)
    end = train(start)
    length = np.linalg.norm(exact(end))
    # Each step is at right angles: the squares of their lengths, of at most 1e-3 each, add up.
    assert abs(length**2 - 5) < 200 * 1e-6
    assert loss(end) < loss(start)
    assert np.abs(end - start).max() > 1e-3
