"""`spectral_cap` in the arithmetic of a TPU, float32 and integers, carried out on a CPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipjax._core.dtypes import in_float64
from clipjax._matrices import caps, proof, singular
from tests import versions
from tests.support.trees import same_bits
from tests.support.weights import capped, exact, largest_singular_value, with_spectrum

F32 = np.dtype(np.float32)
SHAPE = (8, 20)
METHODS = {"svd": caps.by_svd, "newton_schulz": caps.by_newton_schulz}
# How far the result is from the exact cap, as a share of the bound: what Newton-Schulz aims below it, and
# some of the proof's allowance.
TOLERANCE = {"svd": 2.0**-13, "newton_schulz": 2.0**-10}


@functools.cache
def proven_on_tpu(noise: float = 0.0) -> Any:
    """The proof, with a Cholesky factor that is off by `noise`."""

    def factor(x: jax.Array, room: float) -> jax.Array:
        wrong = 1 + noise * jnp.cos(jnp.arange(1.0, 1 + min(x.shape), dtype=x.dtype))
        return jnp.nan_to_num(FACTOR(x, room)) * wrong

    def judge(w: Any, bound: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            if noise:
                patch.setattr(proof, "_factor", factor)
            return proof.is_proven(F32, w, bound.astype(np.float64))

    return jax.jit(in_float64(judge))


FACTOR = proof._factor
seeds = st.integers(0, 2**32 - 1)
tops = st.sampled_from([0.0, 0.5, 1 - 2e-5, 1 - 5e-6, 1 - 1e-6, 1 - 1e-7, 1.0, 1 + 1e-7, 1 + 1e-6, 1.1, 1e3])


@pytest.mark.parametrize("noise", [0.0, 1e-6, 1e-3, 0.1])
@given(seeds, tops, st.sampled_from([1.0, 3.7, 1e-20]), st.booleans())
def test_what_is_proven_is_inside(noise: float, seed: int, top: float, bound: float, many: bool) -> None:
    """However wrong the factorization is."""
    rng = np.random.default_rng(seed)
    bound = float(np.float32(bound))
    spectrum = np.full(8, top) if many else top * np.array([1, 1, 0.9, 0.5, 0.1, 0, 0, 0])
    w = (bound * with_spectrum(rng, SHAPE, spectrum)).astype(np.float32)
    proven = bool(proven_on_tpu(noise)(w, np.float32(bound)))
    assert not proven or largest_singular_value(w) <= bound
    if noise == 0 and top <= 1 - proof.allowance(SHAPE, F32):
        assert proven


def test_a_bound_that_float32_could_lose_is_as_0() -> None:
    w = np.full(SHAPE, 1e-27, np.float32)
    assert proven_on_tpu()(w, np.float32(1e-23))
    assert not proven_on_tpu()(w, np.float32(1e-25))
    assert proven_on_tpu()(np.zeros(SHAPE, np.float32), np.float32(0.0))
    assert proven_on_tpu()(np.ones(SHAPE, np.float32), np.float32(np.inf))
    # Squares of rows that would leave 64 bits: a sum of 16 ones of 2**60 each is 0 there.
    assert not proven_on_tpu()(np.ones((16, 16), np.float32), np.float32(1.0))


@pytest.mark.skipif(versions.jaxlib()[:2] == (0, 9), reason="XLA makes invalid code of sums of int8 products")
def test_products_of_integers_are_exact() -> None:
    rng = np.random.default_rng(0)
    whole = rng.integers(-(2**30), 2**30 + 1, (4, 9)).astype(np.int32)
    whole[0, :4] = [2**30, -(2**30), 127, -128]
    whole[1:, 0] = [0x7F7F7F, -0x808080, 128]
    wanted = whole.astype(object) @ whole.T.astype(object)
    rest = jax.jit(in_float64(lambda x: proof._without_gram(jnp.zeros((4, 4), np.int64), x)))(whole)
    assert (np.asarray(rest).astype(object) == -wanted + 2**64 * ((wanted - 2**63) // 2**64 + 1)).all()


@functools.cache
def projected(method: str) -> Any:
    def project(w: Any, bound: Any) -> Any:
        bound = jnp.asarray(bound, np.float64)
        inside = proof.is_proven(F32, w, bound)
        return singular._inside(METHODS[method], F32, w, bound, ~inside)

    return jax.jit(in_float64(project))


@pytest.mark.parametrize("method", METHODS)
@given(seeds, st.lists(st.floats(0, 5), min_size=1, max_size=8), st.sampled_from([1.0, 100.0, 1e-20]))
def test_the_bound_is_certain_and_the_cap_is_right(
    method: str, seed: int, spectrum: list[float], bound: float
) -> None:
    bound = float(np.float32(bound))
    w = (bound * with_spectrum(np.random.default_rng(seed), SHAPE, spectrum)).astype(np.float32)
    result = projected(method)(w, np.float32(bound))
    assert largest_singular_value(result) <= bound
    assert same_bits(projected(method)(result, np.float32(bound)), result)
    assert largest_singular_value(exact(result) - capped(w, bound)) <= TOLERANCE[method] * bound


@pytest.mark.parametrize("method", METHODS)
def test_edge_cases(method: str) -> None:
    rng = np.random.default_rng(1)
    w = rng.standard_normal(SHAPE).astype(np.float32)
    for scale in (1e4, 1e15, 1e30, 1e38 / 8):
        result = exact(projected(method)(scale * w, np.float32(1.0)))
        assert 0.9 < largest_singular_value(result) <= 1
    assert not np.asarray(projected(method)(w, np.float32(0.0))).any()
    assert same_bits(projected(method)(w, np.float32(np.inf)), w)
    assert same_bits(
        projected(method)(np.eye(*SHAPE, dtype=np.float32), np.float32(1.0)), np.eye(*SHAPE, dtype=F32)
    )
    w[3, 4] = np.inf
    assert np.isnan(projected(method)(w, np.float32(1.0))).all()


def test_complex_matrices() -> None:
    real, imaginary = np.random.default_rng(3).standard_normal((2, *SHAPE))
    w = (real + 1j * imaginary).astype(np.complex64)
    result = projected("svd")(w, np.float32(1.5))
    assert largest_singular_value(result) <= 1.5
    assert largest_singular_value(exact(result) - capped(w, 1.5)) <= 1.5 * TOLERANCE["svd"]
