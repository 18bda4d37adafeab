"""`spectral_cap`: the bound is certain, the cap is right, and nothing inside moves."""

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

METHODS = ("svd", "products")
SHAPES = [(1, 1), (1, 7), (7, 1), (12, 12), (20, 8), (8, 20)]
every_method = pytest.mark.parametrize("method", METHODS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


@functools.cache
def projected(method: str) -> Any:
    return jax.jit(lambda w, bound: clipjax.spectral_cap(bound, method=method)(w))


def exact(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def largest(x: Any) -> float:
    return float(np.linalg.svd(exact(x), compute_uv=False).max())


def oracle(w: Any, bound: float) -> np.ndarray:
    u, s, vh = np.linalg.svd(exact(w), full_matrices=False)
    return (u * np.minimum(s, bound)) @ vh


def with_spectrum(rng: Any, shape: tuple[int, int], spectrum: Any) -> np.ndarray:
    """A matrix of random singular vectors and the given singular values, repeated as often as needed."""
    u, _, vh = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
    return (u * np.resize(np.asarray(spectrum, np.float64), min(shape))) @ vh


# How far the result is from the exact cap, as a share of the bound, in the spectral norm, but for rounding.
TOLERANCE = {"svd": 0.0, "products": 2.0**-11 + 2.0**-13}


@every_dtype
@every_method
@given(data=st.data())
def test_the_bound_is_certain_and_the_cap_is_right(method: str, dtype: Any, data: Any) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    value = st.one_of(st.floats(0, 2), st.sampled_from([0.0, 1e-6, 0.999, 1.0, 1.001, 3.0, 300.0]))
    spectrum = data.draw(st.lists(value, min_size=1, max_size=8))
    bound = data.draw(st.sampled_from([1.0, 0.375, 100.0]))
    w = jnp.asarray((bound * with_spectrum(rng, shape, spectrum)).astype(dtype))
    result = projected(method)(w, bound)
    assert result.dtype == dtype
    assert largest(result) <= bound
    assert same_bits(projected(method)(result, bound), result)
    far = largest(exact(result) - oracle(w, bound)) / bound
    eps = float(ml_dtypes.finfo(dtype).eps)
    # Capped or not, an entry is rounded once; what is rounded is shrunk by at most twice what that costs.
    size = min(largest(w) / bound, 1.0)
    assert far <= TOLERANCE[method] * size + 1.5 * eps * math.sqrt(min(shape)) * size + 1e-7 * eps + 1e-30


@every_dtype
@every_method
def test_hostile_matrices_stay_below_the_bound(method: str, dtype: Any) -> None:
    rng = np.random.default_rng(0)
    top = float(ml_dtypes.finfo(dtype).max)
    hostile = {
        "zero": np.zeros((12, 12)),
        "far": 1e4 * rng.standard_normal((12, 12)),
        "far and near": with_spectrum(rng, (12, 12), [1e4, 1.0, 1e-4]),
        "tiny": 1e-30 * rng.standard_normal((12, 12)),
        "huge": min(1e30, top / 8) * rng.uniform(-1, 1, (12, 12)),
        "rank one": np.ones((12, 12)),
        "ill-conditioned": with_spectrum(rng, (12, 12), np.logspace(3, -30, 12)),
        "at the bound": with_spectrum(rng, (12, 12), [1.0]),
        "next above": with_spectrum(rng, (12, 12), [1 + 1e-6]),
        "flat": np.full((12, 12), top / 2),
    }
    for name, matrix in hostile.items():
        w = jnp.asarray(matrix.astype(dtype))
        for bound in (1.0, 1e-20, 1e4):
            result = projected(method)(w, bound)
            assert np.isfinite(exact(result)).all(), name
            assert largest(result) <= bound, (name, bound)
            assert same_bits(projected(method)(result, bound), result), (name, bound)
            if name == "far and near" and bound == 1.0 and dtype == np.float32:
                s = np.linalg.svd(exact(result), compute_uv=False)
                assert s[0] >= 1 - 2.0**-10


@every_method
def test_float32_loses_little(method: str) -> None:
    """The accuracy that the docstring states: some ulp by the SVD, a thousandth by products."""
    rng = np.random.default_rng(1)
    for shape in [(40, 40), (64, 24), (24, 64)]:
        spectrum = np.concatenate([np.linspace(0, 0.99, 12), np.linspace(1.1, 2.5, 12)])
        w = with_spectrum(rng, shape, spectrum).astype(np.float32)
        got = np.linalg.svd(exact(projected(method)(jnp.asarray(w), 1.0)), compute_uv=False)
        want = np.minimum(np.linalg.svd(exact(w), compute_uv=False), 1.0)
        assert (got[want == 1] >= 1 - (4e-7 if method == "svd" else 1e-3)).all()
        np.testing.assert_allclose(got[want < 1], want[want < 1], atol=4e-7)


@every_method
def test_float64(method: str) -> None:
    rng = np.random.default_rng(2)
    with jax.enable_x64(True):
        for scale in (1.0, 1e200, 1e-200):
            w = scale * with_spectrum(rng, (9, 6), [0.3, 1.7, 5.0])
            result = projected(method)(jnp.asarray(w), scale)
            assert result.dtype == np.float64
            assert largest(result) <= scale
            if method == "svd":
                assert largest(exact(result) - oracle(w, scale)) <= 2e-13 * scale


def test_what_is_exactly_at_the_bound_stays() -> None:
    for matrix in (np.eye(5), np.eye(5)[::-1], np.diag([1.0, -1.0, 0.5]), np.eye(3, 7)):
        w = jnp.asarray(matrix.astype(np.float32))
        for method in METHODS:
            assert same_bits(projected(method)(w, 1.0), w)


@every_method
def test_complex_matrices(method: str) -> None:
    rng = np.random.default_rng(3)
    w = jnp.asarray(rng.standard_normal((6, 9)) + 1j * rng.standard_normal((6, 9)), np.complex64)
    result = projected(method)(w, 1.5)
    assert largest(result) <= 1.5
    assert largest(exact(result) - oracle(w, 1.5)) <= (2e-6 if method == "svd" else 1e-3)


@every_dtype
@every_method
def test_as_a_link_the_bound_holds_after_the_sum(method: str, dtype: Any) -> None:
    tx = clipjax.spectral_cap(1.0, method=method)

    @jax.jit
    def step(params: Any, updates: Any) -> Any:
        return optax.apply_updates(params, tx.update(updates, tx.init(params), params)[0])

    rng = np.random.default_rng(4)
    for size in (0.1, 1.0, 30.0, 3000.0):
        params = {"kernel": jnp.asarray((size * rng.standard_normal((10, 7))).astype(dtype))}
        for _ in range(4):
            updates = jax.tree.map(
                lambda p: jnp.asarray((0.1 * rng.standard_normal(p.shape)).astype(p.dtype)), params
            )
            params = step(params, updates)
            assert largest(params["kernel"]) <= 1.0
            assert largest(params["kernel"]) > 0.5
        after = step(params, jax.tree.map(jnp.zeros_like, params))
        assert same_bits(after, params)


def test_the_link_holds_inside_other_wrappers() -> None:
    rng = np.random.default_rng(5)
    tx = clipjax.bounded(optax.sgd(1.0), project=clipjax.spectral_cap(1.0), nonfinite="skip")
    wrapped = optax.apply_if_finite(optax.chain(optax.sgd(1.0), clipjax.spectral_cap(1.0)), 3)
    for each in (tx, wrapped):
        params = {"kernel": jnp.asarray(rng.standard_normal((6, 6)).astype(ml_dtypes.bfloat16))}
        state, update = each.init(params), jax.jit(each.update)
        for _ in range(3):
            updates, state = update(params, state, params)
            params = optax.apply_updates(params, updates)
            assert largest(params["kernel"]) <= 1.0


# --------------------------------------------------------------------------------------------------
# Which leaves, and how they are flattened.

TREE = {
    "attention": {"query": (6, 2, 3)},
    "conv": {"kernel": (2, 2, 3, 5)},
    "dense": {"kernel": (4, 5), "bias": (5,)},
    "scanned": {"kernel": (3, 4, 5)},
}
FLATTEN: dict[str, Any] = {
    "query": (0, (1, 2)),
    "conv/kernel": ((0, 1, 2), 3),
    "scanned/*": lambda path, leaf: (-2, -1),
}


def tree() -> Any:
    rng = np.random.default_rng(6)
    return jax.tree.map(
        lambda shape: jnp.asarray(3 * rng.standard_normal(shape).astype(np.float32)),
        TREE,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def test_flatten_says_what_a_matrix_is() -> None:
    params = tree()
    result = clipjax.spectral_cap(1.0, flatten=FLATTEN)(params)
    flat = [
        (params["attention"]["query"].reshape(6, 6), result["attention"]["query"].reshape(6, 6)),
        (params["conv"]["kernel"].reshape(12, 5), result["conv"]["kernel"].reshape(12, 5)),
        (params["dense"]["kernel"], result["dense"]["kernel"]),
        *zip(params["scanned"]["kernel"], result["scanned"]["kernel"], strict=True),
    ]
    for before, after in flat:
        assert largest(after) <= 1.0
        np.testing.assert_allclose(exact(after), oracle(before, 1.0), atol=2e-6)
    assert same_bits(params["dense"]["bias"], result["dense"]["bias"])


def test_heads_in_the_middle_and_one_bound_for_each() -> None:
    """The stack is in the order of its axes, wherever they are."""
    w = jnp.asarray(np.random.default_rng(7).standard_normal((6, 3, 4)).astype(np.float32))
    bounds = np.array([0.5, 1.0, np.inf], np.float32)
    result = clipjax.spectral_cap(bounds, flatten=(0, 2))(w)
    for head, bound in enumerate(bounds):
        assert largest(result[:, head]) <= bound
        np.testing.assert_allclose(exact(result[:, head]), oracle(w[:, head], bound), atol=2e-6)
    with pytest.raises(ValueError, match=r"bound of shape \(4,\)"):
        clipjax.spectral_cap(np.ones(4), flatten=(0, 2))(w)


def test_skip_and_defaults() -> None:
    params = tree()
    skipped = clipjax.spectral_cap(1.0, flatten=clipjax.SKIP)(params)
    assert same_bits(skipped, params)
    some = clipjax.spectral_cap(1.0, flatten={**FLATTEN, "query": clipjax.SKIP})(params)
    assert same_bits(some["attention"], params["attention"])
    assert largest(some["dense"]["kernel"]) <= 1.0  # which no pattern matches


def test_what_cannot_be_flattened_is_an_error() -> None:
    params = tree()
    with pytest.raises(ValueError, match=r"'attention/query' of shape \(6, 2, 3\).*flatten="):
        clipjax.spectral_cap(1.0)(params)
    with pytest.raises(ValueError, match="'conv/kernel'"):
        clipjax.spectral_cap(1.0, flatten={"query": (0, (1, 2))})(params)
    with pytest.raises(ValueError, match="matches no leaf"):
        clipjax.spectral_cap(1.0, flatten={"quarry": (0, 1)})(params)
    with pytest.raises(ValueError, match="4 is out of range"):
        clipjax.spectral_cap(1.0, flatten={**FLATTEN, "conv/kernel": (0, 4)})(params)
    with pytest.raises(ValueError, match="names an axis twice"):
        clipjax.spectral_cap(1.0, flatten={**FLATTEN, "conv/kernel": ((0, 3), -1)})(params)
    for bad in (0, "01", (0, 1, 2), (0, 1.5), (True, 1), {0: (0, 1)}, {"a": {"b": (0, 1)}}):
        with pytest.raises(TypeError, match="flatten"):
            clipjax.spectral_cap(1.0, flatten=bad)
    with pytest.raises(ValueError, match="method must be one of 'svd', 'products', got 'qr'"):
        clipjax.spectral_cap(1.0, method="qr")  # type: ignore[arg-type]


def test_stacks_may_be_split_and_matrices_not() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), "x")
    w = jnp.asarray(np.random.default_rng(8).standard_normal((2, 4, 4)).astype(np.float32))

    def mapped(spec: Any, given: Any) -> Any:
        cap = clipjax.spectral_cap(1.0, flatten=(1, 2), specs=given)
        return jax.jit(jax.shard_map(cap.__call__, mesh=mesh, in_specs=spec, out_specs=spec))(w)

    layers, rows = PartitionSpec("x"), PartitionSpec(None, "x")
    np.testing.assert_array_equal(
        mapped(layers, layers), jax.jit(clipjax.spectral_cap(1.0, flatten=(1, 2)).__call__)(w)
    )
    with pytest.raises(ValueError, match="split over the mesh axes"):
        mapped(rows, rows)
    with pytest.raises(ValueError, match="specs"):
        mapped(layers, None)


# --------------------------------------------------------------------------------------------------
# Values that are no numbers, derivatives, metrics.


@every_method
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_entries_show_in_their_matrix_only(method: str, bad: float) -> None:
    w = np.random.default_rng(9).standard_normal((3, 5, 4)).astype(np.float32)
    cap = jax.jit(clipjax.spectral_cap(1.0, method=method, flatten=(1, 2)).__call__)
    clean = np.asarray(cap(jnp.asarray(w)))
    w[1, 2, 3] = bad
    result = np.asarray(cap(jnp.asarray(w)))
    assert np.isnan(result[1]).all()
    np.testing.assert_array_equal(result[[0, 2]], clean[[0, 2]])


@every_method
def test_bounds_of_zero_and_infinity(method: str) -> None:
    w = jnp.asarray(np.random.default_rng(10).standard_normal((5, 4)).astype(np.float32))
    assert not np.asarray(projected(method)(w, 0.0)).any()
    assert same_bits(projected(method)(w, math.inf), w)


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (3, 6)], ids=str)
@every_method
def test_derivatives_agree_with_finite_differences(method: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(11)
    w, dw, weights = (rng.standard_normal(shape) for _ in range(3))
    bound, h = 1.5, 1e-6
    assert largest(w) > bound > np.linalg.svd(w, compute_uv=False).min()
    along = (oracle(w + h * dw, bound) - oracle(w - h * dw, bound)) / (2 * h)
    along_bound = (oracle(w, bound + h) - oracle(w, bound - h)) / (2 * h)

    def cap(w: Any, bound: Any) -> Any:
        return clipjax.spectral_cap(bound, method=method)(w)

    single = [jnp.asarray(x, np.float32) for x in (w, bound, dw, weights)]
    forward = jax.jit(lambda w, b, dw: jax.jvp(cap, (w, b), (dw, jnp.zeros_like(b)))[1])(*single[:3])
    np.testing.assert_allclose(forward, along, atol=5e-6)
    reverse = jax.jit(jax.grad(lambda w, b: jnp.sum(single[3] * cap(w, b)), argnums=(0, 1)))(*single[:2])
    np.testing.assert_allclose(np.sum(np.asarray(reverse[0]) * dw), np.sum(weights * along), atol=2e-5)
    np.testing.assert_allclose(reverse[1], np.sum(weights * along_bound), atol=2e-5)


@pytest.mark.parametrize(
    "matrix",
    [np.zeros((3, 3)), np.eye(3), 2 * np.eye(3), np.ones((3, 3)), np.diag([2.0, 2.0, 0.5]), np.zeros((2, 5))],
    ids=["zero", "at the bound", "ties outside", "rank one", "ties", "zero wide"],
)
def test_derivatives_are_finite_at_ties(matrix: np.ndarray) -> None:
    w = jnp.asarray(matrix.astype(np.float32))
    gradient = jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(clipjax.spectral_cap(1.0)(w)))))(w)
    assert np.isfinite(np.asarray(gradient)).all()
    if not matrix.any():  # inside, it is the identity
        np.testing.assert_allclose(gradient, np.ones_like(matrix), atol=1e-6)


def test_metrics_tell_the_largest_singular_value() -> None:
    rng = np.random.default_rng(12)
    tx = clipjax.spectral_cap(1.0)
    params = {"a": jnp.asarray(with_spectrum(rng, (8, 6), [4.0, 1.0, 0.5]).astype(np.float32))}
    still = jax.tree.map(jnp.zeros_like, params)
    updates, state = jax.jit(tx.update)(still, tx.init(params), params)
    seen = clipjax.metrics(state)
    assert float(seen["spectral_cap/norm"]) == pytest.approx(4.0, rel=1e-5)
    assert float(seen["spectral_cap/scale"]) == pytest.approx(0.25, rel=1e-5)
    assert float(seen["spectral_cap/violation"]) == pytest.approx(3.0, rel=1e-5)
    assert float(seen["spectral_cap/clipped_fraction"]) == 1
    params = optax.apply_updates(params, updates)
    _, state = jax.jit(tx.update)(still, tx.init(params), params)
    seen = clipjax.metrics(state)
    assert float(seen["spectral_cap/violation"]) == 0
    assert float(seen["spectral_cap/clipped_fraction"]) == 0
    assert clipjax.verify(params, tx) == []
