"""`tangent_cone`: what would push a saturated unit further out is taken away, and nothing else."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

import clipjax
from tests.support.trees import DTYPES, same_bits
from tests.support.weights import every_kind, exact


@functools.cache
def run(axes: Any = clipjax.fan_in) -> Any:
    def step(grads: Any, weights: Any, radius: Any) -> Any:
        tx = clipjax.tangent_cone(radius, axes=axes)
        return tx.update(grads, tx.init(weights), weights)

    return jax.jit(step)


def oracle(g: Any, w: Any, radius: float, tolerance: float) -> tuple[np.ndarray, np.ndarray]:
    """The tangential gradients of columns, and which of them change."""
    g, w = exact(g), exact(w)
    inner = np.sum(g.real * w.real + g.imag * w.imag, axis=0)
    squares = np.sum(np.abs(w) ** 2, axis=0)
    outward = (np.sqrt(squares) >= radius * (1 - tolerance)) & (inner < 0)
    return np.where(outward, g - w * (inner / np.where(squares > 0, squares, 1)), g), outward


SHAPE = (50, 40)  # for every test in a dtype, so that one program is compiled for it


@pytest.mark.parametrize("dtype", [*DTYPES.values(), np.complex64], ids=[*DTYPES, "c64"])
@given(seed=st.integers(0, 2**32 - 1), radius=st.floats(0.1, 8.0), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_right_in_every_dtype(dtype: Any, seed: int, radius: float, scale: float) -> None:
    rng = np.random.default_rng(seed)

    def random(scale: float) -> np.ndarray:
        real, imaginary = scale * rng.standard_normal((2, *SHAPE))
        values = real + 1j * imaginary if dtype == np.complex64 else real
        return values.astype(dtype)

    w, g = random(0.6), random(scale)
    got, state = run()(g, w, radius)
    assert got.dtype == dtype
    eps = float(ml_dtypes.finfo(np.float32 if dtype == np.complex64 else dtype).eps)
    want, changed = oracle(g, w, radius, 8 * eps)
    sizes = np.linalg.norm(exact(g), axis=0)
    # One rounding of each entry, and of float16's subnormals.
    room = eps * sizes + (6e-8 if dtype == np.float16 else 0)
    assert (np.linalg.norm(exact(got) - want, axis=0) <= room).all()
    got = np.asarray(got)
    assert same_bits(got[:, ~changed], g[:, ~changed])
    radial = np.abs(np.sum((exact(got) * np.conj(exact(w))).real, axis=0))
    assert (radial[changed] <= (room * np.linalg.norm(exact(w), axis=0))[changed]).all()
    removed = np.linalg.norm(exact(g) - want, axis=0).max()
    seen = clipjax.metrics(state)
    np.testing.assert_allclose(seen["tangent_cone/norm"], removed, rtol=1e-5)
    assert bool(seen["tangent_cone/clipped_fraction"]) == bool(changed.any())


saturated = jax.jit(lambda w, radius: clipjax.max_norm(radius)(w))


@every_kind
def test_what_max_norm_saturated_counts_as_saturated(kind: str) -> None:
    rng, dtype = np.random.default_rng(0), DTYPES[kind]
    for radius in (0.4, 1.0, 3.0):
        w = np.asarray(saturated((5 * rng.standard_normal(SHAPE)).astype(dtype), radius))
        got, _ = run()(-w, w, radius)  # straight outward: nothing is left
        assert (np.linalg.norm(exact(got), axis=0) <= float(ml_dtypes.finfo(dtype).eps) * radius).all()
        assert same_bits(run()(w, w, radius)[0], w)  # straight inward


@every_kind
def test_saturated_is_from_eight_units_of_precision_below_the_radius_on(kind: str) -> None:
    """A norm of exactly that changes, and the next smaller one does not."""
    dtype = DTYPES[kind]
    eps = float(ml_dtypes.finfo(dtype).eps)
    radius = 1 / (8 * eps)  # a power of two, and the norm below is the odd integer next to it
    w = np.zeros(SHAPE, dtype)
    w[0, :2] = radius - 1, (radius - 1) * (1 - eps)
    assert float(w[0, 0]) == radius * (1 - 8 * eps) > float(w[0, 1])
    g = np.zeros(SHAPE, dtype)
    g[:2] = [[-1.0], [2.0]]
    got = np.asarray(run()(g, w, radius)[0])
    np.testing.assert_array_equal(got[:2, 0].astype(np.float64), [0.0, 2.0])
    assert same_bits(got[:, 1:], g[:, 1:])


def test_zero_weights_radius_zero_and_infinity() -> None:
    g = np.random.default_rng(2).standard_normal((4, 6)).astype(np.float32)
    zero = np.zeros_like(g)
    assert same_bits(run()(g, zero, 1.0)[0], g)
    for w in (zero, -g):
        assert not np.asarray(run()(g, w, 0.0)[0]).any()
        assert same_bits(run()(g, w, math.inf)[0], g)


def test_float64_at_the_ends_of_its_range() -> None:
    with jax.enable_x64(True):
        for size in (1e300, 1e-300):
            w = np.array([[3.0], [4.0]]) * size
            g = np.array([[-1.0], [0.0]]) * size
            got = np.asarray(run()(g, w, 5 * size)[0]) / size
            np.testing.assert_allclose(got, [[-0.64], [0.48]], rtol=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_units_are_nan(bad: float) -> None:
    g, w = np.ones((2, 4, 6), np.float32)
    for place in (g, w):
        place[0, 1] = bad
        got, state = run()(g, w, 0.5)
        np.testing.assert_array_equal(np.isnan(got).all(axis=0), [False, True, *[False] * 4])
        assert np.isfinite(np.asarray(got)[:, [0, 2, 3, 4, 5]]).all()
        assert int(clipjax.metrics(state)["tangent_cone/nonfinite_count"]) == 1
        place[0, 1] = 1.0


def test_it_needs_params() -> None:
    tx = clipjax.tangent_cone(1.0)
    g = np.ones((2, 2), np.float32)
    with pytest.raises(ValueError, match="params"):
        tx.update(g, tx.init(g))


def test_inside_shard_map_units_may_be_split() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), "x")
    rng = np.random.default_rng(1)
    g, w = rng.standard_normal((2, 4, 6)).astype(np.float32)
    spec = PartitionSpec("x")

    def local(given: Any) -> Any:
        def step(g: Any, w: Any) -> Any:
            tx = clipjax.tangent_cone(0.5, specs=given)
            return tx.update(g, tx.init(w), w)[0]

        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(spec, spec), out_specs=spec))

    np.testing.assert_allclose(local(spec)(g, w), run()(g, w, 0.5)[0], rtol=1e-6)
    with pytest.raises(ValueError, match="specs"):
        local(None).lower(g, w)


def test_adam_does_not_collect_what_the_projection_undoes() -> None:
    """Chained before Adam, its first moment stays on the sphere's tangent plane."""
    params: Any = {"kernel": np.array([[0.6], [0.8]], np.float32)}
    tx = clipjax.bounded(
        optax.adam(1e-2),
        clip=optax.chain(clipjax.tangent_cone(1.0), clipjax.clip_by_global_norm(1.0)),
        project=clipjax.max_norm(1.0),
    )
    grads = {"kernel": -10 * params["kernel"]}  # a loss that falls outward

    @jax.jit
    def step(state: Any, params: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return state, optax.apply_updates(params, updates)

    state = tx.init(params)
    for _ in range(3):
        state, params = step(state, params)
    assert float(clipjax.metrics(state)["tangent_cone/norm"]) == pytest.approx(10.0, rel=1e-5)
    moments = [x for x in jax.tree.leaves(state) if jnp.shape(x) == (2, 1)]
    assert len(moments) == 2
    assert max(np.abs(m).max() for m in map(np.asarray, moments)) < 1e-5
    np.testing.assert_allclose(params["kernel"], [[0.6], [0.8]], atol=1e-5)


# --------------------------------------------------------------------------------------------------
# Constrained least squares, against its solution by the conditions of Karush, Kuhn and Tucker.


@functools.cache
def least_squares(radius: float, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, B and the W that minimizes tr(WᵀAW)/2 - tr(BᵀW) with each column's norm <= radius."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    optimize = pytest.importorskip("scipy.optimize")
    x, y = digits.data / 16, np.eye(10)[digits.target]
    # In the dtype of the descent: with the problem rounded, the solution moves by more than the bar.
    a, b = ((x.T @ other / len(x)).astype(dtype).astype(np.float64) for other in (x, y))

    def solved(column: np.ndarray) -> np.ndarray:
        def w(multiplier: float) -> np.ndarray:
            return np.linalg.solve(a + multiplier * np.eye(64), column)

        # Pixels that are always 0 leave A singular; at this radius every column needs its multiplier.
        return w(optimize.brentq(lambda t: np.linalg.norm(w(t)) - radius, 1e-9, 1e3, xtol=1e-16, rtol=1e-15))

    return a, b, np.stack([solved(column) for column in b.T], axis=1)


@pytest.mark.parametrize(
    ("dtype", "bar", "how"),
    [
        pytest.param(np.float64, 1e-12, "link", id="f64-link"),
        pytest.param(np.float32, 1e-6, "call", id="f32-call"),
        pytest.param(np.float64, 1e-12, "call", id="f64-call", marks=pytest.mark.full),
        pytest.param(np.float32, 1e-6, "link", id="f32-link", marks=pytest.mark.full),
    ],
)
def test_projected_descent_reaches_the_constrained_optimum(dtype: Any, bar: float, how: str) -> None:
    radius = 0.4
    exact_a, exact_b, solution = least_squares(radius, dtype)
    # Close to the largest rate that converges: a small one gets stuck where float32 rounds the steps away.
    rate = 1.8 / np.linalg.eigvalsh(exact_a).max()
    with jax.enable_x64(dtype == np.float64):
        a, b = (x.astype(dtype) for x in (exact_a, exact_b))
        project, cone = clipjax.max_norm(radius), clipjax.tangent_cone(radius)
        tx = optax.chain(cone, optax.sgd(rate), *([project] if how == "link" else []))

        def step(_: Any, carry: Any) -> Any:
            w, state = carry
            updates, state = tx.update(jnp.matmul(a, w, precision="highest") - b, state, w)
            w = optax.apply_updates(w, updates)
            return (w if how == "link" else project(w)), state

        start = np.zeros((64, 10), dtype)
        w, state = jax.jit(lambda w: jax.lax.fori_loop(0, 8000, step, (w, tx.init(w))))(start)
        assert (np.linalg.norm(exact(w), axis=0) <= radius).all()
        assert np.abs(exact(w) - solution).max() <= bar
        assert float(clipjax.metrics(state)["tangent_cone/norm"]) > 1e-3  # the constraint pushed back

        gradient = exact_a @ solution - exact_b
        left, _ = run()(gradient.astype(dtype), solution.astype(dtype), radius)
        assert np.linalg.norm(gradient, axis=0).min() > 1e-3
        assert np.linalg.norm(exact(left), axis=0).max() <= bar
