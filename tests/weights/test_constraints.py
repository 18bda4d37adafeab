"""The projections of units between two norms and of entries onto boxes: bounds, order, derivatives, peers.

Judged in NumPy, in float64 or wider.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import clipjax
from tests.support.oracles import exact_norm, exact_slack, ulp
from tests.support.properties import RANGE, Trial, as_bytes, draw, tiny, weights_and_update
from tests.support.trees import DTYPES, flat, same_bits

KINDS = sorted(DTYPES)
every_kind = pytest.mark.parametrize("kind", KINDS)
seeds = st.integers(0, 2**30)


def step_with(tx: Any, params: Any, update: Any, state: Any = None) -> Any:
    """The parameters after one step of a link."""
    updates, _ = tx.update(update, tx.init(params) if state is None else state, params)
    return optax.apply_updates(params, updates)


def wide_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Jit a function whose first argument are float64 limits, which stand for Python floats."""
    compiled = jax.jit(function)

    def call(limits: tuple[float, ...], *args: Any) -> Any:
        with jax.enable_x64(True):
            return compiled(tuple(jnp.float64(x) for x in limits), *args)

    return call


# --------------------------------------------------------------------------------------------------
# Norms between two limits.

trials = st.builds(
    Trial,
    mixture=st.sampled_from(["f32", "bf16", "f16"]),
    seed=seeds,
    place=st.floats(0, 1, width=16),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
    bound=st.just(1.0),
    sparse=st.booleans(),
)
shares = st.sampled_from([0.0, 1e-30, 1e-3, 0.5, 0.999, 1.0, 1.001, 3.0, 1e5, 1e30, 1e70])

between = wide_jit(lambda limits, w: clipjax.min_max_norm(*limits)(w))
between_as_link = wide_jit(lambda limits, w, u: step_with(clipjax.min_max_norm(*limits), w, u))


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

    direct = np.asarray(between(limits, moved))
    wrong = list(judge(f"min_max_norm {w.dtype}", moved, direct, *limits, moved))
    again = np.asarray(between(limits, direct))
    if (as_bytes(direct) != as_bytes(again)).any():
        wrong.append(f"not idempotent: {direct} {again}")
    linked = np.asarray(between_as_link(limits, w, u))
    wrong += judge(f"min_max_norm as a link {w.dtype}", moved, linked, *limits, w)
    assert not wrong


def units(kind: str, norm: float, shape: tuple[int, int] = (16, 4)) -> jax.Array:
    w = np.random.default_rng(1).standard_normal(shape)
    return jnp.asarray((norm * w / np.linalg.norm(w, axis=0)).astype(DTYPES[kind]))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("norm", [1e-37, 1e-30, 1e-6, 0.5, 0.999, 1.001, 100.0, 16000.0, 1e30, 3e38])
@every_kind
def test_units_come_to_norm_one_from_anywhere(kind: str, norm: float, jit: bool) -> None:
    if not RANGE[kind][0] <= math.log10(norm) <= RANGE[kind][1] + 0.2:
        pytest.skip("out of the range of the dtype")
    w, project = units(kind, norm), clipjax.unit_norm()
    call = jax.jit(project.__call__) if jit else project
    link = functools.partial(step_with, project)
    w_link = (jax.jit(link) if jit else link)(w, jnp.zeros_like(w))
    once = call(w)
    assert same_bits(call(once), once)
    new, linked = exact_norm(once, 0), exact_norm(w_link, 0)
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
    w = units(kind, far, (16, 64))
    inside = 0.5 * rng.standard_normal(w.shape) / 4
    update = jnp.asarray((inside - np.asarray(w, np.float64)).astype(np.float32))
    moved = np.asarray(exact_norm(optax.apply_updates(w, update), 0))
    assert (moved < 0.95).all()
    for project in (clipjax.unit_norm(), clipjax.min_max_norm(0.98, 1.0)):
        ends = jax.jit(functools.partial(step_with, project))(w, update)
        norms = exact_norm(ends, 0)
        assert (norms <= 1).all()
        coarse = 4 * ulp(1.0, DTYPES[kind]) + 4 * far * 2.0**-23
        assert (norms >= 0.98 - coarse).all()


def test_wide_leaves_grow_and_shrink_far() -> None:
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        w = rng.standard_normal((1000, 4)) * np.array([1e-250, 1e-3, 1.0, 1e250])
        for radius in (1e-40, 1.0, 1e200):
            project = jax.jit(clipjax.min_max_norm(radius, radius).__call__)
            once = project(jnp.asarray(w))
            np.testing.assert_allclose(np.asarray(exact_norm(once, 0) / radius, np.float64), 1, rtol=1e-14)
            assert (exact_norm(once, 0) <= radius).all()
            assert same_bits(project(once), once)


@pytest.mark.parametrize("norm", [1e-30, 0.5, 100.0])
def test_complex_units(norm: float) -> None:
    rng = np.random.default_rng(0)
    z = rng.standard_normal((6, 3)) + 1j * rng.standard_normal((6, 3))
    z = (norm * z / np.linalg.norm(z, axis=0)).astype(np.complex64)
    once = clipjax.unit_norm()(z)
    np.testing.assert_allclose(once, z / norm, rtol=1e-6, atol=1e-7)
    assert same_bits(clipjax.unit_norm()(once), once)
    linked = step_with(clipjax.unit_norm(), jnp.asarray(z), jnp.zeros_like(z))
    for new in (exact_norm(once, 0), exact_norm(linked, 0)):
        assert (new <= 1).all()
    assert (exact_norm(once, 0) >= 1 - 4 * ulp(1.0, np.float32)).all()


@every_kind
def test_units_of_norm_zero_stay(kind: str) -> None:
    zero = jnp.zeros((3, 2), DTYPES[kind]).at[0, 0].set(-0.0)
    for project in (
        clipjax.unit_norm(),
        clipjax.min_max_norm(0.5, 2.0),
        clipjax.min_max_norm(0.5, 2.0, rate=0.5),
    ):
        assert same_bits(project(zero), zero)
        assert same_bits(jax.jit(project.__call__)(zero), zero)
        assert not flat(step_with(project, zero, zero)).any()
        assert (
            float(
                clipjax.metrics(project.update(zero, project.init(zero), zero)[1])[METRIC[project.name[:18]]]
            )
            == 0
        )


METRIC = {"clipjax.unit_norm(": "unit_norm/violation", "clipjax.min_max_no": "min_max_norm/violation"}


def test_nan_and_infinity_show() -> None:
    w = jnp.asarray([[1.0, math.nan, math.inf], [0.1, 1.0, 1.0]])
    for project in (clipjax.unit_norm(), clipjax.min_max_norm(0.5, 2.0, rate=0.0)):
        bad = np.isnan(np.asarray(project(w))).all(axis=0)
        np.testing.assert_array_equal(bad, [False, True, True])
    for limits in ((math.nan, 1.0), (0.5, math.nan)):
        assert np.isnan(np.asarray(jax.jit(lambda a, b: clipjax.min_max_norm(a, b)(w))(*limits))).any()
    assert np.isnan(np.asarray(jax.jit(lambda r: clipjax.min_max_norm(3.0, 4.0, rate=r)(w))(math.nan))).any()


# --------------------------------------------------------------------------------------------------
# A part of the way.


@given(seeds, st.sampled_from([0.0, 0.01, 0.3, 0.9, 1.0]), st.sampled_from([1e-30, 0.1, 1.0, 30.0, 1e30]))
def test_the_formula_holds_for_any_rate(seed: int, rate: float, scale: float) -> None:
    w = (scale * np.random.default_rng(seed).standard_normal((6, 5))).astype(np.float32)
    norm = np.linalg.norm(w.astype(np.float64), axis=0)
    expected = w * (rate * np.clip(norm, 0.9, 2.0) + (1 - rate) * norm) / norm
    got = np.asarray(in_part(w, rate))
    np.testing.assert_allclose(got, expected, rtol=5e-7)
    inside = (norm >= 0.9) & (norm <= 2.0)
    assert same_bits(got[:, inside], w[:, inside])
    assert rate > 0 or same_bits(got, w)


in_part = jax.jit(lambda w, rate: clipjax.min_max_norm(0.9, 2.0, rate=rate)(w))


@pytest.mark.parametrize("norm", [0.25, 3.0])
@pytest.mark.parametrize("rate", [1e-8, 1e-4, 0.1])
@every_kind
def test_small_rates_never_lead_away(kind: str, rate: float, norm: float) -> None:
    """Rounding towards zero must not shrink a unit that is to grow, nor take it past its limit."""
    w = units(kind, norm)
    norms = [np.asarray(exact_norm(w, 0), np.float64)]
    for _ in range(300 if rate == 0.1 else 20):
        w = approach(w, rate)
        norms.append(np.asarray(exact_norm(w, 0), np.float64))
    changes = np.diff(norms, axis=0)
    assert (changes >= 0).all() if norm < 1 else (changes <= 0).all()
    if norm < 1:
        assert (norms[-1] <= 1).all()
    else:
        assert (norms[-1] >= 2 - 8 * ulp(1.0, DTYPES[kind])).all()
    if rate == 0.1 and kind == "f32":
        np.testing.assert_allclose(norms[-1], 1 if norm < 1 else 2, rtol=1e-5)


approach = jax.jit(lambda w, rate: clipjax.min_max_norm(1.0, 2.0, rate=rate)(w))


# --------------------------------------------------------------------------------------------------
# Entries.


@given(
    trials, st.sampled_from([(-1.0, 1.0), (0.0, 1.0), (0.1, 0.3), (-0.7, -0.1), (0.1, 0.1), (0.0, math.inf)])
)
def test_entries_end_inside_their_limits(trial: Trial, limits: tuple[float, float]) -> None:
    """By the call from anywhere; as a link from inside, as it left them."""
    far = draw(trial)["kernel"]
    kind = trial.mixture
    rng = np.random.default_rng(trial.seed)
    once = np.asarray(boxed(limits, far))
    assert same_bits(boxed(limits, once), once)
    near = np.asarray(boxed(limits, rng.standard_normal(far.shape).astype(DTYPES[kind])))
    update = (10.0 ** rng.uniform(-9, 2, far.shape) * rng.standard_normal(far.shape)).astype(DTYPES[kind])
    linked = np.asarray(boxed_as_link(limits, near, update))
    moved = np.asarray(optax.apply_updates(near, update))
    # A limit that the dtype does not hold is rounded inwards; 0.1 and 0.1 leave it nothing to hold.
    low, high = limits
    if low == high:
        assert (np.abs(np.asarray(once, np.float64) - low) <= ulp(low, DTYPES[kind])).all()
        return
    for name, before, after in (("call", far, once), ("link", moved, linked)):
        before, after = np.asarray(before, np.float64), np.asarray(after, np.float64)
        assert ((after >= low) & (after <= high)).all(), name
        inside = (before >= low) & (before <= high)
        np.testing.assert_array_equal(after[inside], before[inside])
        # A link's step is a float32, and as coarse as the way it goes.
        coarse = ulp(low, DTYPES[kind]) + ulp(high if math.isfinite(high) else 0.0, DTYPES[kind]) + 2.0**-22
        np.testing.assert_allclose(
            after, np.clip(before, low, high), rtol=0, atol=coarse if name == "link" else coarse - 2.0**-22
        )


boxed = wide_jit(lambda limits, w: clipjax.box(*limits)(w))
boxed_as_link = wide_jit(lambda limits, w, u: step_with(clipjax.box(*limits), w, u))


@every_kind
def test_non_negative(kind: str) -> None:
    w = jnp.asarray(np.array([-1.0, -0.0, 0.0, 2.0, math.inf, -math.inf, math.nan, -1e-7], DTYPES[kind]))
    for project in (clipjax.non_negative(), jax.jit(clipjax.non_negative().__call__)):
        after = project(w)
        expected = jnp.asarray(np.array([0.0, 0.0, 0.0, 2.0, math.inf, 0.0, math.nan, 0.0], DTYPES[kind]))
        assert same_bits(after, expected)
    assert float(clipjax.non_negative()(jnp.asarray(-1e-40))) == 0  # -0.0 and subnormals, too
    for start in (1e-7, 0.3, 1.0, 300.0):
        p = jnp.full((4,), start, DTYPES[kind])
        u = jnp.asarray(-np.array([0.5, 1.0, 1.001, 3.0]) * start, DTYPES[kind])
        end = np.asarray(step_with(clipjax.non_negative(), p, u), np.float64)
        assert (end >= 0).all()
        assert (end[-2:] == 0).all()


@every_kind
@given(seeds, st.sampled_from([(0.0, math.inf), (-0.5, 0.25)]))
def test_projections_of_entries_are_non_expansive(kind: str, seed: int, limits: tuple[float, float]) -> None:
    """Rounding to nearest is monotone, so that this holds to the last bit."""
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, 8, 3)).astype(DTYPES[kind])
    px, py = (np.asarray(boxed(limits, v), np.float64) for v in (x, y))
    assert (np.abs(px - py) <= np.abs(x.astype(np.float64) - y.astype(np.float64))).all()


def test_limits_may_be_arrays_and_schedules() -> None:
    w = jnp.asarray([[0.5, 5.0], [-3.0, 20.0]])
    low, high = jnp.asarray([-1.0, 0.0]), jnp.asarray([1.0, 10.0])
    project = clipjax.box(low, high)
    np.testing.assert_array_equal(project(w), [[0.5, 5.0], [-1.0, 10.0]])
    inside = jnp.asarray([[0.5, 5.0]])
    for weights, clipped in ((w, 1), (inside, 0)):
        seen = clipjax.metrics(project.update(jnp.zeros_like(weights), project.init(weights), weights)[1])
        assert seen["box/clipped_fraction"] == clipped
        assert seen["box/norm"] == np.abs(weights).max()
        assert seen["box/scale"] == np.abs(project(weights)).max() / np.abs(weights).max()
    scheduled = clipjax.box(lambda n: -1.0 - n, lambda n: 1.0 + n)
    np.testing.assert_array_equal(scheduled(w, 1), [[0.5, 2.0], [-2.0, 2.0]])
    with pytest.raises(ValueError, match=r"bound of shape \(2,\) does not fit a leaf, of shape \(3,\)"):
        project(jnp.zeros(3))
    # One limit for each unit, and a rate that is a schedule.
    kernel = jnp.asarray([[3.0, 0.3], [4.0, 0.4]])
    each = clipjax.min_max_norm(jnp.asarray([1.0, 2.0]), np.asarray([[2.0, 2.0]]))
    np.testing.assert_allclose(np.linalg.norm(each(kernel), axis=0), [2.0, 2.0], rtol=1e-6)
    half = clipjax.min_max_norm(lambda n: 1.0 * n, lambda n: 2.0 * n, rate=lambda n: 0.5 * n)
    np.testing.assert_allclose(np.linalg.norm(half(kernel, 1), axis=0), [3.5, 0.75], rtol=1e-6)
    over = clipjax.min_max_norm(1.0, 2.0, rate=lambda n: 1.0 + n)  # a rate above 1 is 1
    assert same_bits(over(kernel, 1), clipjax.min_max_norm(1.0, 2.0)(kernel))
    state = half.init(kernel)
    update = jax.jit(half.update)
    norms = []
    for _ in range(3):
        updates, state = update(jnp.zeros_like(kernel), state, kernel)
        norms.append(np.linalg.norm(optax.apply_updates(kernel, updates), axis=0))
    np.testing.assert_allclose(norms, [[5.0, 0.5], [3.5, 0.75], [4.0, 2.0]], rtol=1e-6)


@pytest.mark.parametrize("make", [clipjax.min_max_norm, clipjax.box], ids=["min_max_norm", "box"])
def test_the_upper_limit_holds_where_a_traced_lower_one_is_above_it(make: Any) -> None:
    w = jnp.asarray([[0.1], [0.2]])
    after = jax.jit(lambda low, high: make(low, high)(w))(3.0, 1.0)
    assert exact_norm(after, 0) <= 1 if make is clipjax.min_max_norm else (np.asarray(after) == 1).all()


# --------------------------------------------------------------------------------------------------
# Which leaves.

TREE = {
    "first": {"kernel": -jnp.ones((2, 2)), "bias": -jnp.ones(2)},
    "second": {"kernel": -jnp.ones((2, 2)), "steps": jnp.array(-3)},
}


@pytest.mark.parametrize(
    ("where", "chosen"),
    [
        (None, {"first/kernel", "first/bias", "second/kernel"}),
        ("kernel", {"first/kernel", "second/kernel"}),
        ("first/*", {"first/kernel", "first/bias"}),
        (["second/kernel", "bias"], {"first/bias", "second/kernel"}),
        (("*",), {"first/kernel", "first/bias", "second/kernel"}),
        ("steps", set()),
        (lambda path, leaf: leaf.ndim == 1, {"first/bias"}),
    ],
)
def test_where_chooses_leaves(where: Any, chosen: set[str]) -> None:
    for project in (clipjax.non_negative(where=where), clipjax.box(0.0, 1.0, where=where)):
        for after in (project(TREE), step_with(project, TREE, jax.tree.map(jnp.zeros_like, TREE))):
            changed = {
                jax.tree_util.keystr(path, simple=True, separator="/")
                for path, leaf in jax.tree_util.tree_flatten_with_path(after)[0]
                if np.all(leaf == 0)
            }
            assert changed == chosen
        assert {m.path for m in project.measure(TREE, None)} == chosen


@pytest.mark.parametrize(
    ("where", "error", "text"),
    [
        (3, TypeError, "where must be path patterns.*got 3"),
        ([1], TypeError, r"where must be path patterns.*got \[1\]"),
        ({"kernel": True}, TypeError, "where must be path patterns.*got {'kernel': True}"),
        ([], ValueError, r"where must name at least one path pattern, got \[\]"),
    ],
)
def test_a_bad_where_raises_when_built(where: Any, error: type[Exception], text: str) -> None:
    for make in (clipjax.non_negative, functools.partial(clipjax.box, 0, 1)):
        with pytest.raises(error, match=text):
            make(where=where)


def test_a_bad_where_raises_when_called() -> None:
    with pytest.raises(ValueError, match=r"where: the pattern 'kernels' matches no leaf(.|\n)*first/kernel"):
        clipjax.non_negative(where=["bias", "kernels"])(TREE)
    with pytest.raises(
        TypeError, match=r"where: a rule must return a bool, got \(0,\) for leaf 'first/kernel'"
    ):
        clipjax.non_negative(
            where=lambda path, leaf: clipjax.fan_in(path, leaf) if leaf.ndim == 2 else False
        )(TREE)
    masked = optax.masked(clipjax.non_negative(where="bias"), {"first": False, "second": True})
    with pytest.raises(ValueError, match="'bias' matches no leaf"):
        masked.update(TREE, masked.init(TREE), TREE)
    for project in (clipjax.box(0.0, 1.0), clipjax.non_negative()):
        with pytest.raises(TypeError, match="complex leaf, of dtype complex64"):
            project(jnp.ones(2, np.complex64))
    assert same_bits(clipjax.non_negative(where="x")({"x": jnp.ones(1), "z": 1j})["z"], jnp.asarray(1j))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: clipjax.min_max_norm(2.0, 1.0), "low must not be above high, got low=2.0 and high=1.0"),
        (lambda: clipjax.min_max_norm(-1.0, 1.0), "low must be at least 0, got -1.0"),
        (lambda: clipjax.min_max_norm(math.inf, math.inf), "low must be finite, got inf"),
        (lambda: clipjax.min_max_norm(0.0, 1.0, rate=1.5), "rate must be at most 1, got 1.5"),
        (lambda: clipjax.min_max_norm(0.0, 1.0, rate=-0.5), "rate must be at least 0, got -0.5"),
        (lambda: clipjax.min_max_norm(0.0, 1.0, rate=math.nan), "rate must not be NaN, got nan"),
        (lambda: clipjax.min_max_norm(0.0, 1.0, rate="1"), "rate must be a number.*got '1'"),
        (lambda: clipjax.min_max_norm(0.0, 1.0, axes=1.5), "axes must be ints.*got 1.5"),
        (lambda: clipjax.unit_norm(axes="kernel"), "axes must be ints.*got 'kernel'"),
        (lambda: clipjax.box(1.0, -1.0), "low must not be above high, got low=1.0 and high=-1.0"),
        (lambda: clipjax.box(np.array([0.0, 2.0]), 1.0), "low must not be above high, got low=array"),
    ],
)
def test_bad_arguments_raise_when_built(make: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        make()


# --------------------------------------------------------------------------------------------------
# Derivatives, against central differences in float64.

DIFFERENTIABLE = {
    "grow": lambda low, high: clipjax.min_max_norm(10 * low, 20 * high),
    "shrink": lambda low, high: clipjax.min_max_norm(0.1 * low, 0.2 * high),
    "inside": lambda low, high: clipjax.min_max_norm(1e-3 * low, 1e3 * high),
    "a part": lambda low, high: clipjax.min_max_norm(10 * low, 20 * high, rate=0.3),
    "the other part": lambda low, high: clipjax.min_max_norm(0.1 * low, 0.2 * high, rate=0.3),
    "unit": lambda low, high: clipjax.unit_norm(),
    "box": lambda low, high: clipjax.box(-0.3 * low, 0.4 * high),
    "non_negative": lambda low, high: clipjax.non_negative(),
}


@pytest.mark.parametrize("name", list(DIFFERENTIABLE))
def test_derivatives_equal_central_differences(name: str) -> None:
    rng = np.random.default_rng(5)
    with jax.enable_x64(True):
        w, weights = (jnp.asarray(rng.standard_normal((3, 2))) for _ in range(2))

        @jax.jit
        def value(w: Any, low: Any, high: Any) -> jax.Array:
            return jnp.sum(weights * DIFFERENTIABLE[name](low, high)(w))

        gradient, *slopes = jax.jit(jax.grad(value, argnums=(0, 1, 2)))(w, 1.0, 1.0)
        h = 1e-6
        for index in np.ndindex(w.shape):
            numeric = (value(w.at[index].add(h), 1.0, 1.0) - value(w.at[index].add(-h), 1.0, 1.0)) / (2 * h)
            np.testing.assert_allclose(gradient[index], numeric, rtol=1e-6, atol=1e-7)
        numeric = [
            (value(w, 1 + h, 1.0) - value(w, 1 - h, 1.0)) / (2 * h),
            (value(w, 1.0, 1 + h) - value(w, 1.0, 1 - h)) / (2 * h),
        ]
        np.testing.assert_allclose(slopes, numeric, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("high", [2.0, math.inf])
def test_derivatives_are_finite_at_zero_and_in_the_rate(high: float) -> None:
    def value(w: Any, rate: Any) -> jax.Array:
        return jnp.sum(clipjax.min_max_norm(1.0, high, rate=rate)(w))

    w = jnp.asarray([[0.0, 0.3, 1.2], [0.0, 0.4, 1.6]])  # norms 0, 0.5, 2
    gradient, slope = jax.jit(jax.grad(value, argnums=(0, 1)))(w, 0.5)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[:, 0], 1.0)
    np.testing.assert_allclose(slope, 0.7 * (1 / 0.5 - 1), rtol=1e-5)
    for project in (clipjax.unit_norm(), clipjax.box(-1.0, 1.0), clipjax.non_negative()):
        assert np.isfinite(jax.grad(lambda w, project=project: jnp.sum(project(w)))(jnp.zeros((2, 2)))).all()


# --------------------------------------------------------------------------------------------------
# Together.


def nearest_in_both(w: np.ndarray, radius: float) -> np.ndarray:
    """Dykstra's algorithm: the nearest point of the orthant and the ball, for each column, in float64."""
    x, p, q = w.astype(np.float64), np.zeros(w.shape), np.zeros(w.shape)
    for _ in range(2000):
        y = np.maximum(x + p, 0)
        p = x + p - y
        norm = np.linalg.norm(y + q, axis=0)
        x = (y + q) * np.minimum(1, radius / np.maximum(norm, 1e-300))
        q = y + q - x
    return x


@given(seeds, st.sampled_from([0.1, 1.0, 10.0]))
def test_non_negative_then_max_norm_projects_onto_both(seed: int, radius: float) -> None:
    w = np.random.default_rng(seed).standard_normal((5, 3)).astype(np.float32)
    nearest = nearest_in_both(w, radius)
    positive, ball = clipjax.non_negative(), clipjax.max_norm(radius)
    np.testing.assert_allclose(ball(positive(w)), nearest, rtol=1e-5, atol=1e-7)
    linked = step_with(optax.chain(positive, ball), jnp.asarray(w), jnp.zeros_like(w))
    np.testing.assert_allclose(linked, nearest, rtol=1e-5, atol=1e-6)
    # The other order is in both as well, and no nearer.
    other = np.asarray(positive(ball(w)), np.float64)
    assert (other >= 0).all()
    assert (exact_norm(other, 0) <= radius).all()
    way, other_way = (np.linalg.norm(x - w, axis=0) for x in (nearest, other))
    assert (way <= other_way * (1 + 1e-6)).all()


def test_the_other_order_ends_elsewhere() -> None:
    w = jnp.asarray([[3.0], [-4.0]])
    positive, ball = clipjax.non_negative(), clipjax.max_norm(1.0)
    np.testing.assert_allclose(ball(positive(w)), [[1.0], [0.0]], rtol=1e-6)
    np.testing.assert_allclose(positive(ball(w)), [[0.6], [0.0]], rtol=1e-6)


@every_kind
def test_links_on_the_same_weights_keep_both_bounds(kind: str) -> None:
    """Two links, one after the other: the second must not undo the first by a rounding."""
    rng = np.random.default_rng(3)
    tx = optax.chain(optax.sgd(1.0), clipjax.non_negative(), clipjax.unit_norm())
    w = clipjax.unit_norm()(
        clipjax.non_negative()(jnp.asarray(rng.standard_normal((9, 4)).astype(DTYPES[kind])))
    )
    step = jax.jit(lambda w, g: step_with(tx, w, g))
    for _ in range(5):
        w = step(w, jnp.asarray(0.3 * rng.standard_normal((9, 4)), DTYPES[kind]))
        assert (np.asarray(w, np.float64) >= 0).all()
        norms = exact_norm(w, 0)
        assert (norms <= 1).all()
        assert (norms >= 1 - 4 * ulp(2.0, DTYPES[kind])).all()


def test_projections_of_different_parts() -> None:
    rng = np.random.default_rng(4)
    params = {k: jnp.asarray(2 * rng.standard_normal((4, 3)), np.float32) for k in ("a", "b", "c", "d")}
    parts = [
        clipjax.unit_norm(axes={"a": 0}),
        clipjax.min_max_norm(0.5, 1.0, axes={"b": 1}),
        clipjax.non_negative(where="c"),
        clipjax.box(-0.5, 0.5, where="d"),
    ]
    expected = functools.reduce(lambda p, project: project(p), parts, params)
    backwards = functools.reduce(lambda p, project: project(p), parts[::-1], params)
    assert same_bits(expected, backwards)
    zero = jax.tree.map(jnp.zeros_like, params)
    linked = jax.jit(lambda p: step_with(optax.chain(*parts), p, zero))(params)
    np.testing.assert_allclose(flat(linked), flat(expected), rtol=0, atol=2e-6)
    assert (exact_norm(linked["a"], 0) <= 1).all()
    assert (exact_norm(linked["b"], 1) <= 1).all()
    assert (flat(linked["c"]) >= 0).all()
    assert (np.abs(flat(linked["d"])) <= 0.5).all()
    for key, project in zip(params, parts, strict=True):
        alone = project(params)
        assert all(same_bits(alone[k], params[k]) == (k != key) for k in params)


def like(tree: Any, value: float) -> Any:
    return jax.tree.map(lambda x: jnp.full_like(x, value), tree)


P = optax.projections
FUNCTIONS = {
    "non_negative": P.projection_non_negative,
    "box": lambda w: P.projection_box(w, like(w, -0.5), like(w, 0.5)),
    "hypercube": lambda w: jax.tree.map(lambda x: P.projection_hypercube(x, scale=0.5), w),
    "simplex": P.projection_simplex,
    "l1_ball": lambda w: P.projection_l1_ball(w, 2.0),
    "l1_sphere": lambda w: P.projection_l1_sphere(w, 2.0),
    "l2_ball": lambda w: P.projection_l2_ball(w, 2.0),
    "l2_sphere": lambda w: P.projection_l2_sphere(w, 2.0),
    "linf_ball": lambda w: P.projection_linf_ball(w, 0.5),
    "halfspace": lambda w: P.projection_halfspace(w, like(w, 1.0), -1.0),
    "hyperplane": lambda w: P.projection_hyperplane(w, like(w, 1.0), 1.0),
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_projections_of_optax(name: str) -> None:
    rng = np.random.default_rng(6)
    params, grads = ({"a": jnp.asarray(rng.standard_normal((4, 3)), np.float32)} for _ in range(2))
    project = clipjax.project(FUNCTIONS[name])
    assert same_bits(project(params), FUNCTIONS[name](params))
    tx = optax.chain(optax.sgd(0.5), project)
    after = jax.jit(lambda p, g: step_with(tx, p, g))(params, grads)
    expected = FUNCTIONS[name](jax.tree.map(lambda p, g: p - 0.5 * g, params, grads))
    np.testing.assert_allclose(flat(after), flat(expected), rtol=0, atol=1e-6)
    assert not np.allclose(flat(after), flat(params), atol=1e-3)


# --------------------------------------------------------------------------------------------------
# Metrics, and what the link rounds.


def test_metrics_of_units() -> None:
    w = jnp.asarray([[3.0, 0.3, 0.9], [4.0, 0.4, 1.2]])  # norms 5, 0.5, 1.5
    project = clipjax.min_max_norm(1.0, 2.0)
    _, state = project.update(jnp.zeros_like(w), project.init(w), w)
    seen = clipjax.metrics(state)
    assert seen["min_max_norm/norm"] == 5
    np.testing.assert_allclose(seen["min_max_norm/scale"], 0.4, rtol=1e-6)
    np.testing.assert_allclose(seen["min_max_norm/violation"], 3, rtol=1e-6)
    assert seen["min_max_norm/clipped_fraction"] == 1
    done = project(w)
    seen = clipjax.metrics(project.update(jnp.zeros_like(w), project.init(w), done)[1])
    assert seen["min_max_norm/clipped_fraction"] == seen["min_max_norm/violation"] == 0
    (measured,) = project.measure({"kernel": w}, None)
    assert measured.path == "kernel"
    np.testing.assert_allclose(np.ravel(measured.value), [5, 0.5, 1.5], rtol=1e-7)
    np.testing.assert_allclose(np.ravel(measured.low), 1, rtol=1e-6)
    np.testing.assert_array_equal(np.ravel(measured.high), 2)


def test_metrics_of_entries() -> None:
    w = {"a": jnp.asarray([-4.0, 0.5]), "b": jnp.asarray([9.0])}
    for project, name in (
        (clipjax.box(0.0, 1.0, where="a"), "box"),
        (clipjax.non_negative(where="a"), "non_negative"),
    ):
        seen = clipjax.metrics(project.update(jax.tree.map(jnp.zeros_like, w), project.init(w), w)[1])
        assert seen[f"{name}/norm"] == seen[f"{name}/violation"] == 4
        np.testing.assert_allclose(seen[f"{name}/scale"], 0.125)
        assert seen[f"{name}/clipped_fraction"] == 1
        (measured,) = project.measure(w, None)
        np.testing.assert_array_equal(measured.value, w["a"])
        np.testing.assert_array_equal(measured.low, 0)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_step_that_is_flushed_to_zero_is_no_nan(sign: int) -> None:
    """Between numbers this small the difference is subnormal: the link takes a normal step inwards."""
    w = jnp.asarray([[sign * 2e-38], [1.0]])
    u = jnp.asarray([[0.0], [0.1]])
    for project in (clipjax.max_norm(1.0), clipjax.unit_norm()):
        after = np.asarray(step_with(project, w, u), np.float64)
        assert abs(after[0, 0]) <= 2e-38
        assert 1 - 1e-6 <= exact_norm(after) <= 1


# --------------------------------------------------------------------------------------------------
# Beside Keras.


@pytest.mark.peer
class TestKeras:
    @pytest.fixture
    def constraints(self) -> Any:
        return pytest.importorskip("keras").constraints

    def check(self, ours: Any, theirs: Any, weights: np.ndarray, axis: Any) -> None:
        keras = pytest.importorskip("keras")
        got = np.asarray(ours(jnp.asarray(weights)))
        want = keras.ops.convert_to_numpy(theirs(keras.ops.convert_to_tensor(weights)))
        # Keras multiplies by desired / (1e-7 + norm), inside the bounds, too.
        norm = np.linalg.norm(weights.astype(np.float64), axis=axis, keepdims=True)
        np.testing.assert_allclose(got, want * (1 + 1e-7 / np.where(norm > 0, norm, 1)), rtol=1e-6)

    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
    @pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
    def test_norms(self, constraints: Any, scale: float, rate: float, axis: int) -> None:
        w = (scale * np.random.default_rng(7).standard_normal((6, 5))).astype(np.float32)
        w[:, 0] = 0
        for low, high in ((0.0, 1.0), (0.5, 2.0), (3.0, 3.0)):
            theirs = constraints.MinMaxNorm(low, high, rate=rate, axis=axis)
            self.check(clipjax.min_max_norm(low, high, rate=rate, axes=axis), theirs, w, axis)
        self.check(clipjax.unit_norm(axes=axis), constraints.UnitNorm(axis=axis), w, axis)
        self.check(clipjax.max_norm(2.0, axes=axis), constraints.MaxNorm(2.0, axis=axis), w, axis)

    def test_convolutions_by_default(self, constraints: Any) -> None:
        w = np.random.default_rng(8).standard_normal((3, 3, 4, 6)).astype(np.float32)
        units_of_w = w.reshape(-1, 6)
        ours = clipjax.unit_norm()(jnp.asarray(w)).reshape(-1, 6)
        self.check(lambda _: ours, constraints.UnitNorm(axis=0), units_of_w, 0)
        theirs = np.asarray(constraints.UnitNorm(axis=[0, 1, 2])(w))
        np.testing.assert_allclose(ours, theirs.reshape(-1, 6), rtol=1e-6)

    def test_entries(self, constraints: Any) -> None:
        w = np.random.default_rng(9).standard_normal((6, 5)).astype(np.float32)
        np.testing.assert_array_equal(clipjax.non_negative()(w), np.asarray(constraints.NonNeg()(w)))
