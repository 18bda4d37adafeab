"""`min_max_norm` and `unit_norm`: norms end between their limits, in every dtype and from anywhere.

Judged in NumPy, in float64 or wider.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import clipjax
from tests.support.oracles import exact_norm, exact_slack, ulp
from tests.support.properties import RANGE, Trial, as_bytes, tiny, weights_and_update
from tests.support.trees import DTYPES, flat, same_bits
from tests.support.weights import KINDS, every_kind, units, wide_jit

trials = st.builds(
    Trial,
    mixture=st.sampled_from(["f32", "bf16", "f16"]),
    seed=st.integers(0, 2**30),
    place=st.floats(0, 1, width=16),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
    bound=st.just(1.0),
    sparse=st.booleans(),
)
shares = st.sampled_from([0.0, 1e-30, 1e-3, 0.5, 0.999, 1.0, 1.001, 3.0, 1e5, 1e30, 1e70])


@wide_jit
def of_limits(limits: Any, w: Any, update: Any) -> tuple[Any, Any, Any]:
    """`min_max_norm(low, high, rate=rate)` by the call, and as a link, with the link's metrics."""
    low, high, rate = limits
    project = clipjax.min_max_norm(low, high, rate=rate)
    updates, state = project.update(update, project.init(w), w)
    return project(w), optax.apply_updates(w, updates), clipjax.metrics(state)


def between(limits: tuple[float, float], w: Any) -> np.ndarray:
    return np.asarray(of_limits((*limits, 1.0), w, np.zeros_like(w))[0])


def between_as_link(limits: tuple[float, float], w: Any, update: Any) -> np.ndarray:
    return np.asarray(of_limits((*limits, 1.0), w, update)[1])


def judge(what: str, before: Any, after: Any, low: float, high: float, came_from: Any) -> Iterator[str]:
    """List what is wrong with the norms of units; `came_from` are the weights before a link's step."""
    dtype = np.asarray(before).dtype
    old, new, start = (np.asarray(exact_norm(x, 0), np.longdouble) for x in (before, after, came_from))
    if not np.isfinite(np.asarray(after, np.float64)).all():
        yield f"{what}: not finite"
        return
    kept = (np.asarray(before) == np.asarray(after)).all(axis=0)
    # Norms this close to a limit may be on either side of it in float64.
    close = (np.abs(old - high) <= 1e-14 * high) | (np.abs(old - low) <= 1e-14 * low)
    slack = np.where(kept & close, 1e-14, exact_slack())
    if (new > np.longdouble(high) * (1 + slack)).any():
        yield f"{what}: {float(np.max(new / high)) - 1} of {high} above it"
    if ((old >= low) & (old <= high) & ~kept & ~close).any():
        yield f"{what}: what is between {low} and {high} has changed"
    nothing = old < float(np.finfo(np.float32).tiny)
    if (nothing & ~kept).any():
        yield f"{what}: a unit without a direction has changed"
    # A link's sum is as fine as the larger of the weights before and after. In 16 bits it is a float32.
    size = np.maximum(np.asarray(start, np.float64), low)
    allowed = 4 * ulp(low, dtype) + math.sqrt(len(before)) * tiny(dtype)
    if came_from is not before:
        allowed = np.maximum(allowed, 4 * ulp(size, dtype) + math.sqrt(len(before)) * tiny(dtype))
    short = np.asarray(low - new, np.float64)
    if (~nothing & (short > allowed)).any():
        yield f"{what}: {np.max((short / ulp(low, dtype))[~nothing])} ulp below {low}, from {old}"


@given(trials, shares, shares)
@example(Trial("f32", 1, 0.0, 0.0, 1.0), 1e70, 1e70)  # from 1e-38 to 1e32
@example(Trial("bf16", 2, 1.0, 0.0, 1.0), 1e-30, 1e-30)
@example(Trial("bf16", 3, 0.5, 4.0, 1.0, True), 1.0, 1.0)
@example(Trial("f16", 4, 0.0, 0.0, 1.0), 1e5, 1e5)  # from subnormals
@example(Trial("f32", 5, 0.5, 1.0, 1.0), 0.999, 1.001)
def test_norms_end_between_their_limits(trial: Trial, one: float, other: float) -> None:
    params, update = weights_and_update(trial)
    w, u = params["kernel"], update["kernel"]
    moved = np.asarray(optax.apply_updates(w, u))
    norms = np.asarray(exact_norm(moved, 0), np.float64)
    info = ml_dtypes.finfo(w.dtype)
    largest = float(info.max) / 4
    low, high = sorted(float(np.clip(np.median(norms) * share, 0, largest)) for share in (one, other))
    if w.dtype != np.float16 and 0 < low < 2.0**-100:
        low = 0.0  # limits whose ulp is flushed to 0
    limits = (low, max(low, high))

    direct = between(limits, moved)
    wrong = list(judge(f"min_max_norm {w.dtype}", moved, direct, *limits, moved))
    again = between(limits, direct)
    if (as_bytes(direct) != as_bytes(again)).any():
        wrong.append(f"not idempotent: {direct} {again}")
    linked = between_as_link(limits, w, u)
    wrong += judge(f"min_max_norm as a link {w.dtype}", moved, linked, *limits, w)
    assert not wrong


# For every test from here on, so that one program is compiled for a dtype. Updates are those of float32.
SHAPE = (16, 64)
STILL = np.zeros(SHAPE, np.float32)


def to_norm_one(w: Any, update: Any) -> tuple[Any, Any, Any]:
    """By the call, and as a link, with the link's metrics."""
    project = clipjax.unit_norm()
    updates, state = project.update(update, project.init(w), w)
    return project(w), optax.apply_updates(w, updates), clipjax.metrics(state)


HOW = {"eager": to_norm_one, "jit": jax.jit(to_norm_one)}
NORMS = [1e-37, 1e-30, 1e-6, 0.5, 0.999, 1.001, 100.0, 16000.0, 1e30, 3e38]
FROM_ANYWHERE = [
    pytest.param(
        *(kind, norm, how),
        id=f"{kind}-{norm}-{how}",
        # Eagerly it is the same arithmetic, compiled operation by operation.
        marks=[pytest.mark.full] if how == "eager" else [],
    )
    for kind in KINDS
    for norm in NORMS
    for how in HOW
    if RANGE[kind][0] <= math.log10(norm) <= RANGE[kind][1] + 0.2
]


@pytest.mark.parametrize(("kind", "norm", "how"), FROM_ANYWHERE)
def test_units_come_to_norm_one_from_anywhere(kind: str, norm: float, how: str) -> None:
    once, linked, _ = HOW[how](units(kind, norm, SHAPE), STILL)
    assert same_bits(HOW[how](once, STILL)[0], once)
    new, linked = exact_norm(once, 0), exact_norm(linked, 0)
    assert (new <= 1).all()
    assert (new >= 1 - 4 * ulp(1.0, DTYPES[kind])).all()
    assert (linked <= 1).all()
    if norm <= 16000:
        # In float32 a step from afar is as coarse as its start; in 16 bits it is a float32, and finer.
        size = max(norm, 1.0) if kind == "f32" else 1.0
        assert (linked >= 1 - 4 * ulp(size, DTYPES[kind]) - 16000 * 2.0**-23).all()


@pytest.mark.parametrize("far", [3.0, 100.0, 16000.0])
@every_kind
def test_a_link_never_rounds_a_growing_unit_above_its_limit(kind: str, far: float) -> None:
    """The step takes weights from afar to norm 0.5, from where they grow to 1, as coarsely as they came."""
    rng = np.random.default_rng(2)
    w = units(kind, far, SHAPE)
    inside = 0.5 * rng.standard_normal(w.shape) / 4
    update = (inside - w.astype(np.float64)).astype(np.float32)
    moved = exact_norm(optax.apply_updates(w, update), 0)
    assert (moved < 0.95).all()
    for ends in (HOW["jit"](w, update)[1], between_as_link((0.98, 1.0), w, update)):
        norms = exact_norm(ends, 0)
        assert (norms <= 1).all()
        coarse = 4 * ulp(1.0, DTYPES[kind]) + 4 * far * 2.0**-23
        assert (norms >= 0.98 - coarse).all()


def test_wide_leaves_grow_and_shrink_far() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((1000, 4)) * np.array([1e-250, 1e-3, 1.0, 1e250])
    for radius in (1e-40, 1.0, 1e200):
        once = between((radius, radius), w)
        assert once.dtype == np.float64
        np.testing.assert_allclose(np.asarray(exact_norm(once, 0) / radius, np.float64), 1, rtol=1e-14)
        assert (exact_norm(once, 0) <= radius).all()
        assert same_bits(between((radius, radius), once), once)


@pytest.mark.parametrize("norm", [1e-30, 0.5, 100.0])
def test_complex_units(norm: float) -> None:
    rng = np.random.default_rng(0)
    z = rng.standard_normal((6, 3)) + 1j * rng.standard_normal((6, 3))
    z = (norm * z / np.linalg.norm(z, axis=0)).astype(np.complex64)
    once, linked, _ = HOW["jit"](z, np.zeros_like(z))
    np.testing.assert_allclose(once, z / norm, rtol=1e-6, atol=1e-7)
    assert same_bits(HOW["jit"](once, np.zeros_like(z))[0], once)
    for new in (exact_norm(once, 0), exact_norm(linked, 0)):
        assert (new <= 1).all()
    assert (exact_norm(once, 0) >= 1 - 4 * ulp(1.0, np.float32)).all()


@every_kind
def test_units_of_norm_zero_stay(kind: str) -> None:
    zero = np.zeros(SHAPE, DTYPES[kind])
    zero[0, 0] = -0.0
    for name, found in (
        ("unit_norm", HOW["jit"](zero, STILL)),
        ("min_max_norm", of_limits((0.5, 2.0, 1.0), zero, STILL)),
        ("min_max_norm", of_limits((0.5, 2.0, 0.5), zero, STILL)),
    ):
        called, linked, seen = found
        assert same_bits(called, zero)
        assert not flat(linked).any()
        assert float(seen[f"{name}/violation"]) == 0


def test_nan_and_infinity_show() -> None:
    w = units("f32", 1.005, SHAPE)
    w[0, 1], w[0, 2] = math.nan, math.inf
    for each in (HOW["jit"](w, STILL), of_limits((0.5, 2.0, 0.0), w, STILL)):
        for result in each[:2]:
            bad = np.isnan(np.asarray(result)).all(axis=0)
            np.testing.assert_array_equal(bad, [False, True, True] + [False] * 61)
    # In units that the limit bounds, and whose own entries are finite.
    for limits in ((math.nan, 2.0, 1.0), (0.5, math.nan, 1.0), (3.0, 4.0, math.nan)):
        assert np.isnan(np.asarray(of_limits(limits, w, STILL)[0])).all()


# --------------------------------------------------------------------------------------------------
# A part of the way.


@given(
    st.integers(0, 2**30),
    st.sampled_from([0.0, 0.01, 0.3, 0.9, 1.0]),
    st.sampled_from([1e-30, 0.1, 1.0, 30.0, 1e30]),
)
def test_the_formula_holds_for_any_rate(seed: int, rate: float, scale: float) -> None:
    w = (scale * np.random.default_rng(seed).standard_normal(SHAPE)).astype(np.float32)
    norm = np.linalg.norm(w.astype(np.float64), axis=0)
    low, high = 3.6, 4.4  # of the norms that are not scaled, some are between them and some not
    expected = w * (rate * np.clip(norm, low, high) + (1 - rate) * norm) / norm
    got = np.asarray(of_limits((low, high, rate), w, STILL)[0])
    np.testing.assert_allclose(got, expected, rtol=5e-7)
    inside = (norm >= low) & (norm <= high)
    assert scale != 1.0 or 0 < inside.sum() < len(inside)
    assert same_bits(got[:, inside], w[:, inside])
    assert rate > 0 or same_bits(got, w)


@pytest.mark.parametrize("norm", [0.25, 3.0])
@pytest.mark.parametrize("rate", [1e-8, 1e-4, 0.1])
@every_kind
def test_small_rates_never_lead_away(kind: str, rate: float, norm: float) -> None:
    """Rounding towards zero must not shrink a unit that is to grow, nor take it past its limit."""
    w: Any = units(kind, norm, SHAPE)
    norms = [np.asarray(exact_norm(w, 0), np.float64)]
    for _ in range(300 if rate == 0.1 else 20):
        w = of_limits((1.0, 2.0, rate), w, STILL)[0]
        norms.append(np.asarray(exact_norm(w, 0), np.float64))
    changes = np.diff(norms, axis=0)
    assert (changes >= 0).all() if norm < 1 else (changes <= 0).all()
    if norm < 1:
        assert (norms[-1] <= 1).all()
    else:
        assert (norms[-1] >= 2 - 8 * ulp(1.0, DTYPES[kind])).all()
    if rate == 0.1 and kind == "f32":
        np.testing.assert_allclose(norms[-1], 1 if norm < 1 else 2, rtol=1e-5)
