"""`clip_by_spectral_norm`: no singular value is above the bound, and each is what its formula says.

Matrices of several dtypes and shapes share one compiled program for each way: compiling is nearly all that
these tests cost.
"""

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
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import clipjax
from clipjax._core.dtypes import in_float64
from clipjax._matrices import caps, singular
from tests.support.trees import DTYPES, same_bits
from tests.support.weights import (
    capped,
    exact,
    largest_singular_value,
    singular_values,
    with_spectrum,
)

METHODS = ("newton_schulz", "svd")
every_method = pytest.mark.parametrize("method", METHODS)
LEAVES = {
    "square": ("f32", (12, 12)),
    "wide": ("bf16", (8, 20)),
    "tall": ("f16", (20, 8)),
    "row": ("f32", (1, 7)),
}


def soft(values: Any, bound: float) -> Any:
    """s / sqrt(1 + s² / bound²), without overflow."""
    return np.where(
        values > bound,
        bound / np.hypot(bound / np.maximum(values, 1e-300), 1),
        values / np.hypot(1, values / bound),
    )


def softened(w: Any, bound: float) -> np.ndarray:
    u, s, vh = np.linalg.svd(exact(w), full_matrices=False)
    return (u * soft(s, bound)) @ vh


@functools.cache
def clipped(is_soft: bool, method: str) -> Any:
    def clip(grads: Any, bound: Any) -> Any:
        tx = clipjax.clip_by_spectral_norm(bound, soft=is_soft, method=method)
        updates, state = tx.update(grads, tx.init(grads))
        return updates, clipjax.metrics(state)

    compiled = jax.jit(clip)
    return lambda grads, bound: jax.device_get(compiled(grads, bound))


def leaves(matrix: Any) -> dict[str, np.ndarray]:
    return {name: matrix(shape).astype(DTYPES[kind]) for name, (kind, shape) in LEAVES.items()}


def check_soft(method: str, before: Any, bound: float) -> None:
    after, _ = clipped(True, method)(before, np.float32(bound))
    for name, w in before.items():
        result, wanted = after[name], softened(w, float(np.float32(bound)))
        assert result.dtype == w.dtype
        size = largest_singular_value(wanted)
        info = ml_dtypes.finfo(w.dtype)
        # An entry is rounded once; what is above the bound by that is shrunk, by at most twice what it costs.
        rounding = 1.5 * float(info.eps) * math.sqrt(min(w.shape)) * size
        # Entries below the normal numbers lose up to the least of them.
        lost = float(info.smallest_subnormal if w.dtype == np.float16 else info.smallest_normal) * 20
        far = largest_singular_value(exact(result) - wanted)
        assert far <= rounding + lost, (name, bound, far / rounding)
        assert largest_singular_value(result) <= np.float32(bound), (name, bound)


seeds = st.integers(0, 2**32 - 1)
spectra = st.lists(
    st.one_of(st.floats(0, 2), st.sampled_from([0.0, 1e-6, 0.999, 1.0, 1.001, 3.0, 300.0])),
    min_size=1,
    max_size=8,
)


@given(seeds, spectra, st.sampled_from([1.0, 0.375, 100.0]))
def test_softly_every_singular_value_is_what_the_formula_says(
    seed: int, spectrum: list[float], bound: float
) -> None:
    rng = np.random.default_rng(seed)
    check_soft("newton_schulz", leaves(lambda shape: bound * with_spectrum(rng, shape, spectrum)), bound)


@pytest.mark.parametrize("ratio", [1e-6, 1e-3, 0.1, 1.0, 17.0, 299.0, 301.0, 1e5, 1e6, 1e15, 1e30])
@every_method
def test_softly_at_every_scale(method: str, ratio: float) -> None:
    """The largest value from far inside to far outside, the others spread below it, or all alike."""
    rng = np.random.default_rng(0)
    for spectrum in ([1.0], np.logspace(0, -9, 8), [1.0, 1 / ratio, 0.0]):
        bound = 1e-3 / ratio if ratio < 1e15 else 1e4 / ratio
        before = leaves(
            lambda shape, spectrum=spectrum, size=ratio * bound: size * with_spectrum(rng, shape, spectrum)
        )
        check_soft(method, before, bound)


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_softly_in_float64_small_values_survive_large_ones(scale: float) -> None:
    """Stages far outside lose no digits of the values below: each is right to 1e-10 of its own."""
    rng = np.random.default_rng(1)
    for top in (1.0, 200.0, 1e4, 1e7):
        spectrum = np.array([top, math.sqrt(top), 1.0, 0.5, 1e-2])
        w = scale * with_spectrum(rng, (5, 9), spectrum)
        with jax.enable_x64(True):
            result, _ = clipped(True, "newton_schulz")({"w": w}, np.float64(scale))
        assert result["w"].dtype == np.float64
        assert largest_singular_value(result["w"]) <= scale
        far = largest_singular_value(result["w"] / scale - softened(w / scale, 1.0))
        # What rounding does to the matrix itself moves its small singular vectors.
        assert far <= 1e-11 + 1e-15 * top


@every_method
def test_the_hard_clip_is_the_cap_of_weights(method: str) -> None:
    rng = np.random.default_rng(2)
    spectra = ([3.0, 0.5, 1e-3], [1e4, 1.0], [0.0], [1.0], [0.99])
    cap = jax.jit(lambda w, bound: clipjax.spectral_cap(bound, method=method)(w))
    for spectrum in spectra:
        matrix = with_spectrum(rng, (8, 20), spectrum)
        before = {kind: matrix.astype(DTYPES[kind]) for kind in ("f32", "bf16")}
        after, _ = clipped(False, method)(before, np.float32(1))
        assert same_bits(after, cap(before, np.float32(1)))
        for name, w in before.items():
            assert largest_singular_value(after[name]) <= 1
            if largest_singular_value(w) <= 0.9999:
                assert same_bits(after[name], w)
            elif w.dtype == np.float32:
                far = largest_singular_value(exact(after[name]) - capped(w, 1.0))
                assert far <= (1e-6 if method == "svd" else 1e-3)


@pytest.mark.parametrize("is_soft", [False, True], ids=["hard", "soft"])
def test_bounds_of_zero_and_infinity_and_what_is_not_finite(is_soft: bool) -> None:
    rng = np.random.default_rng(3)
    before = leaves(lambda shape: np.where(rng.random(shape) < 0.2, -0.0, rng.standard_normal(shape)))
    clip = clipped(is_soft, "newton_schulz")
    nothing, seen = clip(before, np.float32(0))
    assert not any(np.asarray(x).astype(np.float64).any() for x in nothing.values())
    assert seen["clip_by_spectral_norm/scale"] == 0
    same, seen = clip(before, np.float32(math.inf))
    assert same_bits(same, before)
    assert seen["clip_by_spectral_norm/scale"] == 1
    assert seen["clip_by_spectral_norm/clipped_fraction"] == 0
    zeros = leaves(np.zeros)
    after, seen = clip(zeros, np.float32(1))
    assert same_bits(after, zeros)
    assert seen["clip_by_spectral_norm/norm"] == 0
    for bad in (math.nan, math.inf, -math.inf):
        broken = before | {"wide": before["wide"].copy()}
        broken["wide"][2, 3] = bad
        after, seen = clip(broken, np.float32(0.5))
        assert np.isnan(exact(after["wide"])).all()
        assert all(np.isfinite(exact(x)).all() for name, x in after.items() if name != "wide")
        assert seen["clip_by_spectral_norm/nonfinite_count"] == 1


@pytest.mark.parametrize("is_soft", [False, True], ids=["hard", "soft"])
def test_complex_matrices(is_soft: bool) -> None:
    real, imaginary = np.random.default_rng(4).standard_normal((2, 6, 9))
    w = (real + 1j * imaginary).astype(np.complex64)
    result = clipped(is_soft, "svd")({"w": w}, np.float32(1.5))[0]["w"]
    assert result.dtype == np.complex64
    assert largest_singular_value(result) <= 1.5
    wanted = (softened if is_soft else capped)(w, 1.5)
    assert largest_singular_value(exact(result) - wanted) <= 2e-6


def test_metrics_tell_the_largest_singular_value_and_what_became_of_it() -> None:
    w = {"square": np.diag([3.0, 1.0, 0.5]).astype(np.float32)}
    for is_soft, factor in ((False, 0.5), (True, 1 / math.hypot(1, 2))):
        _, seen = clipped(is_soft, "svd")(w, np.float32(1.5))
        assert seen["clip_by_spectral_norm/norm"] == pytest.approx(3.0, rel=1e-6)
        assert seen["clip_by_spectral_norm/scale"] == pytest.approx(factor, rel=1e-6)
        assert seen["clip_by_spectral_norm/clipped_fraction"] == 1
        _, seen = clipped(is_soft, "svd")(w, np.float32(4))
        assert seen["clip_by_spectral_norm/clipped_fraction"] == 0


# --------------------------------------------------------------------------------------------------
# Leaves.


def test_stacks_have_a_bound_for_each_matrix_and_vectors_pass() -> None:
    rng = np.random.default_rng(5)
    grads = {
        "scanned": {"kernel": rng.standard_normal((3, 5, 4)).astype(np.float32)},
        "conv": {
            "kernel": rng.standard_normal((2, 2, 3, 4)).astype(np.float32),
            "bias": np.full(4, 9, np.float32),
        },
        "left": rng.standard_normal((2, 3, 4)).astype(np.float32),
    }
    flatten = {"scanned/*": (1, 2), "conv/kernel": ((0, 1, 2), 3), "left": clipjax.SKIP}
    bounds = np.array([0.5, 1.0, np.inf], np.float32)

    @jax.jit
    def clip(grads: Any, bounds: Any) -> Any:
        of_stacks = clipjax.clip_by_spectral_norm(bounds, soft=True, flatten=flatten, where="scanned/*")
        of_convolutions = clipjax.clip_by_spectral_norm(1.0, flatten=flatten, where="conv/*", method="svd")
        tx = optax.chain(of_stacks, of_convolutions)
        return tx.update(grads, tx.init(grads))[0]

    after = jax.device_get(clip(grads, bounds))
    for before, result, bound in zip(
        grads["scanned"]["kernel"], after["scanned"]["kernel"], bounds, strict=True
    ):
        assert largest_singular_value(result) <= bound
        wanted = softened(before, bound) if bound < np.inf else before
        np.testing.assert_allclose(result, wanted, atol=1e-6)
    assert same_bits(after["scanned"]["kernel"][2], grads["scanned"]["kernel"][2])
    flat = after["conv"]["kernel"].reshape(12, 4)
    assert largest_singular_value(flat) <= 1
    np.testing.assert_allclose(flat, capped(grads["conv"]["kernel"].reshape(12, 4), 1.0), atol=2e-6)
    assert same_bits((after["conv"]["bias"], after["left"]), (grads["conv"]["bias"], grads["left"]))


def test_statistics_of_a_model_are_no_error() -> None:
    """Gradients are no weights: what a projection must not change may be clipped."""
    grads = {"params": {"kernel": np.eye(3, dtype=np.float32)}, "cache": {"key": np.eye(3, dtype=np.float32)}}
    assert jax.eval_shape(clipjax.clip_by_spectral_norm(1.0).init, grads)


@pytest.mark.parametrize("is_soft", [False, True], ids=["hard", "soft"])
def test_inside_shard_map_stacks_may_be_split_and_matrices_not(is_soft: bool) -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), "x")
    stack = 2 * np.random.default_rng(6).standard_normal((3, 5, 4)).astype(np.float32)

    def mapped(spec: Any, given: Any) -> Any:
        tx = clipjax.clip_by_spectral_norm(1.0, soft=is_soft, flatten=(1, 2), specs=given)

        def update(grads: Any) -> Any:
            updates, state = tx.update(grads, tx.init(grads))
            return updates, clipjax.metrics(state)["clip_by_spectral_norm/norm"]

        return jax.jit(jax.shard_map(update, mesh=mesh, in_specs=spec, out_specs=(spec, P())))

    after, norm = mapped(P("x"), P("x"))(stack)
    for before, result in zip(stack, np.asarray(after), strict=True):
        assert largest_singular_value(result) <= 1
        np.testing.assert_allclose(result, (softened if is_soft else capped)(before, 1.0), atol=1e-3)
    assert float(norm) == pytest.approx(max(map(largest_singular_value, stack)), rel=1e-5)
    with pytest.raises(ValueError, match="clip_by_spectral_norm: the matrices of leaf '' are split"):
        mapped(P(None, "x"), P(None, "x")).lower(stack)
    with pytest.raises(ValueError, match="specs"):
        mapped(P("x"), None).lower(stack)


# --------------------------------------------------------------------------------------------------
# Derivatives.


@functools.cache
def derivatives(method: str) -> Any:
    """Along a direction, and of a weighted sum by the matrix and by the bound."""

    def of(w: Any, bound: Any, along: Any, weights: Any) -> Any:
        def clip(w: Any, bound: Any) -> Any:
            tx = clipjax.clip_by_spectral_norm(bound, soft=True, method=method)
            return tx.update(w, tx.init(w))[0]

        forward = jax.jvp(clip, (w, bound), (along, jnp.zeros_like(bound)))[1]
        return forward, *jax.vjp(clip, w, bound)[1](weights)

    return jax.jit(of)


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (3, 6)], ids=str)
def test_soft_derivatives_agree_with_finite_differences(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(7)
    w, dw, weights = (rng.standard_normal(shape) for _ in range(3))
    for bound in (0.2, 1.5, 30.0):
        h = 1e-6
        along = (softened(w + h * dw, bound) - softened(w - h * dw, bound)) / (2 * h)
        along_bound = (softened(w, bound + h) - softened(w, bound - h)) / (2 * h)
        arguments = (np.asarray(x, np.float32) for x in (w, bound, dw, weights))
        forward, *reverse = derivatives("newton_schulz")(*arguments)
        np.testing.assert_allclose(forward, along, atol=5e-6)
        np.testing.assert_allclose(np.sum(np.asarray(reverse[0]) * dw), np.sum(weights * along), atol=2e-5)
        np.testing.assert_allclose(reverse[1], np.sum(weights * along_bound), atol=2e-5)


@pytest.mark.parametrize("bound", [0.0, 1e-30, 1.0, 1e30, math.inf])
def test_soft_derivatives_are_finite_at_ties_and_at_zero(bound: float) -> None:
    for matrix in (np.zeros((4, 4)), np.eye(4), 1e15 * np.eye(4), np.ones((4, 4)), np.diag([2.0, 2, 0, 0])):
        w, weights = matrix.astype(np.float32), np.cos(matrix).astype(np.float32)
        found = derivatives("newton_schulz")(w, np.float32(bound), np.ones_like(w), weights)
        assert all(np.isfinite(np.asarray(each)).all() for each in found)
        if bound == math.inf or (not matrix.any() and bound > 0):
            np.testing.assert_allclose(found[1], weights, atol=1e-5)
        if bound == 0:
            assert not np.asarray(found[1]).any()


# --------------------------------------------------------------------------------------------------
# In the arithmetic of a TPU, carried out here.


@functools.cache
def on_tpu() -> Any:
    def clip(w: Any, bound: Any) -> Any:
        bound = jnp.asarray(bound, np.float64)
        return singular._inside(caps.softly_by_svd, np.dtype(np.float32), w, bound, bound < np.inf)

    return jax.jit(in_float64(clip))


@given(seeds, spectra, st.sampled_from([1.0, 100.0, 1e-20]))
def test_softly_on_a_tpu(seed: int, spectrum: list[float], bound: float) -> None:
    w = (bound * with_spectrum(np.random.default_rng(seed), (8, 20), spectrum)).astype(np.float32)
    result = on_tpu()(w, np.float32(bound))
    limit = float(np.float32(bound))
    assert largest_singular_value(result) <= limit
    assert largest_singular_value(exact(result) - softened(w, limit)) <= 3e-5 * limit


def test_softly_on_a_tpu_far_outside_and_far_inside() -> None:
    w = np.random.default_rng(8).standard_normal((8, 20)).astype(np.float32)
    for scale in (1e4, 1e15, 1e30, 1e38 / 8):
        assert 0.9 < largest_singular_value(on_tpu()(scale * w, np.float32(1))) <= 1
    for scale in (1e-6, 1e-15, 1e-30):
        np.testing.assert_allclose(
            on_tpu()(scale * w, np.float32(1)), scale * w, rtol=1e-5, atol=1e-6 * scale
        )
    assert not np.asarray(on_tpu()(w, np.float32(0))).any()
    assert same_bits(on_tpu()(w, np.float32(np.inf)), w)


# --------------------------------------------------------------------------------------------------
# Arguments.


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"soft": 1}, TypeError, "soft must be True or False, got 1"),
        ({"soft": "yes"}, TypeError, "soft must be True or False, got 'yes'"),
        ({"method": "qr"}, ValueError, "method must be one of 'svd', 'newton_schulz', got 'qr'"),
        ({"flatten": (1, 2, 3)}, TypeError, "flatten must be a pair"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        clipjax.clip_by_spectral_norm(1.0, **options)


def test_it_bounds_what_an_optimizer_makes_of_gradients() -> None:
    """Between an optimizer and its learning rate, as published for the soft clip."""
    grads = {"kernel": np.random.default_rng(9).standard_normal((12, 7)).astype(np.float32)}
    tx = optax.chain(
        optax.scale_by_adam(), clipjax.clip_by_spectral_norm(0.5, soft=True), optax.scale(-0.125)
    )
    updates, _ = jax.jit(lambda grads: tx.update(grads, tx.init(grads)))(grads)
    assert 0.9 * 0.5 / 8 < singular_values(updates["kernel"])[0] <= 0.5 / 8
