"""`spectral_cap`: the bound is certain, the cap is right, and nothing inside moves.

Matrices of several dtypes and shapes share one compiled program for each method, and their bound is an
argument: compiling is nearly all that these tests cost.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clipjax
from tests.support.trees import DTYPES, same_bits
from tests.support.weights import (
    capped,
    exact,
    largest_singular_value,
    singular_values,
    with_spectrum,
)

METHODS = ("svd", "newton_schulz")
every_method = pytest.mark.parametrize("method", METHODS)
SHAPES = [(1, 1), (1, 7), (7, 1), (12, 12), (20, 8), (8, 20)]
# Every dtype with either method, and every shape; all of their combinations in the tests marked `full`.
LEAVES = {
    "svd": [("f32", (12, 12)), ("bf16", (8, 20)), ("f16", (7, 1)), ("f32", (1, 1))],
    "newton_schulz": [("f32", (12, 12)), ("bf16", (8, 20)), ("f16", (20, 8)), ("f32", (1, 7))],
}
Leaf = tuple[str, tuple[int, int]]
full = pytest.mark.full


@functools.cache
def projected(method: str) -> Any:
    return jax.jit(lambda w, bound: clipjax.spectral_cap(bound, method=method)(w))


def make(leaves: list[Leaf], matrix: Any) -> list[np.ndarray]:
    return [matrix(shape).astype(DTYPES[kind]) for kind, shape in leaves]


# How far the result is from the exact cap, as a share of the bound, in the spectral norm, but for rounding.
TOLERANCE = {"svd": 0.0, "newton_schulz": 2.0**-11 + 2.0**-13}


def check(method: str, leaves: list[Leaf], seed: int, spectrum: list[float], bound: float) -> None:
    rng = np.random.default_rng(seed)
    before = make(leaves, lambda shape: bound * with_spectrum(rng, shape, spectrum))
    after = projected(method)(before, bound)
    again = projected(method)(after, bound)
    for w, result, repeated in zip(before, after, again, strict=True):
        assert result.dtype == w.dtype
        assert largest_singular_value(result) <= bound
        assert same_bits(repeated, result)
        far = largest_singular_value(exact(result) - capped(w, bound)) / bound
        eps = float(ml_dtypes.finfo(w.dtype).eps)
        # Capped or not, an entry is rounded once; what is rounded is shrunk by at most twice what that costs.
        size = min(largest_singular_value(w) / bound, 1.0)
        rounding = 1.5 * eps * math.sqrt(min(w.shape)) * size + 1e-7 * eps + 1e-30
        assert far <= TOLERANCE[method] * size + rounding


seeds = st.integers(0, 2**32 - 1)
values = st.one_of(st.floats(0, 2), st.sampled_from([0.0, 1e-6, 0.999, 1.0, 1.001, 3.0, 300.0]))
spectra = st.lists(values, min_size=1, max_size=8)
bounds = st.sampled_from([1.0, 0.375, 100.0])


@every_method
@given(seeds, spectra, bounds)
def test_the_bound_is_certain_and_the_cap_is_right(
    method: str, seed: int, spectrum: list[float], bound: float
) -> None:
    check(method, LEAVES[method], seed, spectrum, bound)


@full
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", DTYPES)
@every_method
@given(seeds, spectra, bounds)
def test_the_bound_is_certain_for_every_dtype_and_shape(
    method: str, kind: str, shape: tuple[int, int], seed: int, spectrum: list[float], bound: float
) -> None:
    check(method, [(kind, shape)], seed, spectrum, bound)


def hostile_matrices(rng: Any, shape: tuple[int, int], top: float) -> dict[str, np.ndarray]:
    return {
        "zero": np.zeros(shape),
        "far": 1e4 * rng.standard_normal(shape),
        "far and near": with_spectrum(rng, shape, [1e4, 1.0, 1e-4]),
        "tiny": 1e-30 * rng.standard_normal(shape),
        "huge": min(1e30, top / 8) * rng.uniform(-1, 1, shape),
        "rank one": np.ones(shape),
        "ill-conditioned": with_spectrum(rng, shape, np.logspace(3, -30, min(shape))),
        "at the bound": with_spectrum(rng, shape, [1.0]),
        "next above": with_spectrum(rng, shape, [1 + 1e-6]),
        "flat": np.full(shape, top / 2),
    }


def stays_below(method: str, leaves: list[Leaf]) -> None:
    rng = np.random.default_rng(0)
    tops = [float(ml_dtypes.finfo(DTYPES[kind]).max) for kind, _ in leaves]
    hostile = [hostile_matrices(rng, shape, top) for (_, shape), top in zip(leaves, tops, strict=True)]
    for name in hostile[0]:
        before = [h[name].astype(DTYPES[kind]) for h, (kind, _) in zip(hostile, leaves, strict=True)]
        for bound in (1.0, 1e-20, 1e4):
            after = projected(method)(before, bound)
            assert same_bits(projected(method)(after, bound), after), (name, bound)
            for result in after:
                assert np.isfinite(exact(result)).all(), name
                assert largest_singular_value(result) <= bound, (name, bound)
            if name == "far and near" and bound == 1.0 and leaves[0][0] == "f32":
                assert singular_values(after[0])[0] >= 1 - 2.0**-10


@every_method
def test_hostile_matrices_stay_below_the_bound(method: str) -> None:
    stays_below(method, LEAVES[method])


@full
@pytest.mark.parametrize("kind", DTYPES)
@every_method
def test_hostile_matrices_of_every_dtype_stay_below_the_bound(method: str, kind: str) -> None:
    stays_below(method, [(kind, (12, 12))])


def first_only(method: str, matrix: np.ndarray, position: int = 0) -> list[np.ndarray]:
    """The leaves of the method's program, with one matrix at a position and zeros elsewhere."""
    leaves = make(LEAVES[method], np.zeros)
    leaves[position] = matrix.astype(leaves[position].dtype)
    assert leaves[position].shape == LEAVES[method][position][1]
    return leaves


LARGE = [pytest.param(shape, marks=full) for shape in [(40, 40), (64, 24), (24, 64)]]


@pytest.mark.parametrize("shape", [(12, 12), *LARGE])
@every_method
def test_float32_loses_little(method: str, shape: tuple[int, int]) -> None:
    """The accuracy that the docstring states: some ulp by the SVD, a thousandth by products."""
    rng = np.random.default_rng(1)
    half = min(shape) // 2
    spectrum = np.concatenate([np.linspace(0, 0.99, half), np.linspace(1.1, 2.5, half)])
    w = with_spectrum(rng, shape, spectrum).astype(np.float32)
    leaves = first_only(method, w) if shape == (12, 12) else [w]
    got = singular_values(projected(method)(leaves, 1.0)[0])
    want = np.minimum(singular_values(w), 1.0)
    assert (got[want == 1] >= 1 - (4e-7 if method == "svd" else 1e-3)).all()
    np.testing.assert_allclose(got[want < 1], want[want < 1], atol=4e-7)


@every_method
def test_what_is_exactly_at_the_bound_stays(method: str) -> None:
    eye = np.eye(12)
    for matrix in (eye, eye[::-1], np.diag([1.0, -1.0, 0.5] * 4)):
        leaves = first_only(method, matrix)
        assert same_bits(projected(method)(leaves, 1.0), leaves)
    leaves = first_only(method, np.eye(8, 20), 1)
    assert same_bits(projected(method)(leaves, 1.0), leaves)


@every_method
def test_bounds_of_zero_and_infinity(method: str) -> None:
    rng = np.random.default_rng(10)
    leaves = make(LEAVES[method], rng.standard_normal)
    assert not any(np.asarray(w).any() for w in projected(method)(leaves, 0.0))
    assert same_bits(projected(method)(leaves, math.inf), leaves)


@pytest.mark.parametrize("method", ["svd", pytest.param("newton_schulz", marks=full)])
def test_float64(method: str) -> None:
    rng = np.random.default_rng(2)
    for scale in (1.0, 1e200, 1e-200):
        w = scale * with_spectrum(rng, (9, 6), [0.3, 1.7, 5.0])
        with jax.enable_x64(True):
            result = projected(method)(w, np.float64(scale))
        assert result.dtype == np.float64
        assert largest_singular_value(result) <= scale
        if method == "svd":
            assert largest_singular_value(exact(result) - capped(w, scale)) <= 2e-13 * scale


@pytest.mark.parametrize("method", ["svd", pytest.param("newton_schulz", marks=full)])
def test_complex_matrices(method: str) -> None:
    real, imaginary = np.random.default_rng(3).standard_normal((2, 6, 9))
    w = (real + 1j * imaginary).astype(np.complex64)
    result = projected(method)(w, 1.5)
    assert result.dtype == np.complex64
    assert largest_singular_value(result) <= 1.5
    far = largest_singular_value(exact(result) - capped(w, 1.5))
    assert far <= (2e-6 if method == "svd" else 1e-3)


# --------------------------------------------------------------------------------------------------
# As a link.


def chained(method: str) -> Any:
    return optax.chain(optax.identity(), clipjax.spectral_cap(1.0, method=method))


WRAPPED = {
    "chain": chained,
    "bounded": lambda method: clipjax.bounded(
        optax.identity(), project=clipjax.spectral_cap(1.0, method=method), nonfinite="skip"
    ),
    "apply_if_finite": lambda method: optax.apply_if_finite(chained(method), 3),
}


@functools.cache
def stepper(wrap: str, method: str) -> Any:
    tx = WRAPPED[wrap](method)

    def step(params: Any, updates: Any) -> Any:
        updates, state = tx.update(updates, tx.init(params), params)
        return optax.apply_updates(params, updates), clipjax.metrics(state)

    return jax.jit(step)


LINKS = [("chain", "svd", "f32"), ("bounded", "svd", "bf16"), ("apply_if_finite", "svd", "f16")]


@pytest.mark.parametrize(
    ("wrap", "method", "kind"),
    [
        pytest.param(*case, marks=[] if case in LINKS else full, id="-".join(case))
        for case in itertools.product(WRAPPED, METHODS, DTYPES)
    ],
)
def test_as_a_link_the_bound_holds_after_the_sum(wrap: str, method: str, kind: str) -> None:
    step = stepper(wrap, method)
    rng = np.random.default_rng(4)
    for size in (0.1, 1.0, 30.0, 3000.0):
        params: Any = {"kernel": (size * rng.standard_normal((12, 7))).astype(DTYPES[kind])}
        for _ in range(4):
            updates = {"kernel": (0.1 * rng.standard_normal((12, 7))).astype(DTYPES[kind])}
            params, _ = step(params, updates)
            assert largest_singular_value(params["kernel"]) <= 1.0
            # Inside `apply_if_finite` the step keeps the dtype of 16 bits, which is coarse from afar.
            if wrap != "apply_if_finite" or size <= 1:
                assert largest_singular_value(params["kernel"]) > 0.5
        after, _ = step(params, {"kernel": np.zeros((12, 7), DTYPES[kind])})
        assert same_bits(after, params)


def test_metrics_tell_the_largest_singular_value() -> None:
    rng = np.random.default_rng(12)
    step = stepper("chain", "svd")
    params: Any = {"kernel": with_spectrum(rng, (12, 7), [4.0, 1.0, 0.5]).astype(np.float32)}
    still = jax.tree.map(np.zeros_like, params)
    params, seen = step(params, still)
    assert float(seen["spectral_cap/norm"]) == pytest.approx(4.0, rel=1e-5)
    assert float(seen["spectral_cap/scale"]) == pytest.approx(0.25, rel=1e-5)
    assert float(seen["spectral_cap/violation"]) == pytest.approx(3.0, rel=1e-5)
    assert float(seen["spectral_cap/clipped_fraction"]) == 1
    _, seen = step(params, still)
    assert float(seen["spectral_cap/violation"]) == 0
    assert float(seen["spectral_cap/clipped_fraction"]) == 0
    assert clipjax.verify(params, clipjax.spectral_cap(1.0)) == []
