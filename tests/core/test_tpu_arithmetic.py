"""The guarantees in the arithmetic of TPUs and GPUs, carried out on a CPU.

What a program does for a platform is chosen when it is lowered. Here the choice is taken from outside, so
that a CPU runs what a TPU or a GPU would: pairs of float32, and what is done for norms out of their range.
A TPU's float64, which is a pair of float32, is imitated by errors put into the steps that use it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax import lax

import clipjax
from clipjax import functional
from clipjax._core import maxima, mesh, norms, pairs, platforms, rescale, side_by_side, trees
from clipjax.weights import constraints
from tests.support.oracles import exact_norm, exact_slack, exact_tree_norm, ulp
from tests.support.properties import as_bytes, judge, tiny
from tests.support.trees import DTYPES, same_bits

PLATFORMS = ("tpu", "gpu")
# A TPU whose program is for several.
UNITS = (np.float32(1), np.float32(1))
ONE_OF_SEVERAL = "one of several tpus"
each_platform = pytest.mark.parametrize("platform", PLATFORMS)
each_kind = pytest.mark.parametrize("kind", DTYPES)
# What takes a program that others do not need.
FULL = pytest.mark.full

ROWS, COLUMNS = 48, 6
# Leaves from this size on count as large, so that a GPU adds them in pairs.
LARGE = 64
# Where a TPU's pairs are in range, and how exact norms are there and elsewhere.
LOW, HIGH = 1e-9, 1e18
EXACT, PLAIN = 2.0**-34, 2.0**-11
# The error of each step in a TPU's float64.
TPU_ERROR = 2.0**-47


class _Lax:
    """`jax.lax`, but that programs do what they would do on one platform."""

    def __init__(self, platform: str) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(lax, name)

    def platform_dependent(self, *args: Any, default: Any = None, **branches: Any) -> Any:
        return branches.get(self._platform, default)(*args)


def as_on(platform: str, function: Callable[..., Any], patches: Any = ()) -> Callable[..., Any]:
    """Jit a function to do what it does on a platform; float64 arguments stay float64.

    Args:
      platform: "tpu", "gpu" or `ONE_OF_SEVERAL`.
      function: of arrays.
      patches: (module, name, value), in place while the function is traced.
    """
    compiled: dict[Any, Any] = {}

    def traced(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for module in (platforms, maxima, side_by_side, norms, mesh):
                patch.setattr(module, "lax", _Lax("tpu" if platform == ONE_OF_SEVERAL else platform))
            if platform == ONE_OF_SEVERAL:
                for module in (platforms, maxima, side_by_side, trees):
                    patch.setattr(module, "on_single_device", lambda: jnp.zeros((), bool))
            for module in (platforms, maxima):
                patch.setattr(module, "is_large", lambda x: x.size >= LARGE)
            for module, name, value in patches:
                patch.setattr(module, name, value)
            jax.clear_caches()  # JAX remembers what it has traced, for other platforms,
            try:
                return jax.jit(function).lower(*args)
            finally:
                jax.clear_caches()  # and for this one.

    def call(*args: Any) -> Any:
        types = str(jax.tree.map(lambda x: (x.shape, x.dtype), args))
        with jax.enable_x64(True):
            if types not in compiled:
                compiled[types] = traced(*args).compile()
            return jax.tree.map(np.asarray, compiled[types](*args))

    return call


def columns(seed: int, decade: float, spread: float, kind: str, rows: int = ROWS) -> np.ndarray:
    """Units of about one norm, `10**decade`, with entries over so many decades, and no subnormal ones."""
    rng = np.random.default_rng(seed)
    size = 10.0 ** (-spread * rng.random((rows, COLUMNS))) * rng.uniform(0.5, 1, (rows, COLUMNS))
    x = size * rng.choice([-1.0, 1.0], size.shape)
    x = x / np.linalg.norm(x, axis=0) * 10.0**decade
    x = np.where(np.abs(x) < 2 * tiny(DTYPES[kind]), 0, x)
    largest = float(jnp.finfo(DTYPES[kind]).max)
    half = (np.clip(x, -largest, largest) / 2).astype(DTYPES[kind])
    return half + half  # so that a link can start from half of it


# --------------------------------------------------------------------------------------------------
# Norms.


@functools.cache
def measured_on(platform: str) -> Callable[..., Any]:
    """The norms of columns, and that of a matrix and of two more leaves together."""

    def measured(x: Any) -> Any:
        (units,) = platforms.euclidean_norms([(x,)], ((0,),))
        (whole,) = platforms.euclidean_norms([(x,)], ((0, 1),))
        return units, whole, platforms.euclidean_norm([x, x[:4], x[4:8]])

    return as_on(platform, measured)


def norms_of(platform: str, x: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each measured norm, and the exact one."""
    units, whole, together = measured_on(platform)(x)
    yield units[0], exact_norm(x, 0)
    yield whole.reshape(()), exact_norm(x)
    yield together, exact_tree_norm([x, x[:4], x[4:8]])


@pytest.mark.parametrize(
    ("platform", "kind"),
    [*(("tpu", kind) for kind in DTYPES), (ONE_OF_SEVERAL, "f32")],
)
@given(
    seed=st.integers(0, 2**30),
    place=st.floats(0, 1, width=16),
    spread=st.sampled_from([0.0, 1.0, 6.0]),
)
@example(0, 0.0, 0.0)
@example(0, 1.0, 0.0)
def test_norms_on_a_tpu(platform: str, kind: str, seed: int, place: float, spread: float) -> None:
    """Over all that float32 holds; outside the range of pairs no norm is too small, or 0, or infinite."""
    low, high = (-7.0, 5.0) if kind == "f16" else (-36.0, 38.0)
    x = columns(seed, low + place * (high - low), spread, kind)
    for found, right in norms_of(platform, x):
        off = np.abs(found - right)
        inside = (right >= LOW) & (right <= HIGH)
        assert (off <= np.where(inside, EXACT, PLAIN) * right).all()
        assert (found >= right * (1 - np.where(inside, EXACT, 0))).all()


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@given(
    seed=st.integers(0, 2**30),
    place=st.floats(0, 1, width=16),
    spread=st.sampled_from([0.0, 1.0, 6.0]),
)
@example(0, 0.75, 0.0)
def test_norms_on_a_gpu(kind: str, seed: int, place: float, spread: float) -> None:
    """From where the squares of scaled entries are no subnormal numbers, which a CPU flushes to 0."""
    for found, right in norms_of("gpu", columns(seed, -36.0 + place * 74.0, spread, kind)):
        assert (np.abs(found - right) <= EXACT * right).all()


BESIDE = [[1e-12, 1.0], [1e-8, 1e9], [1e4, 1e-3], [1e20, 1.0], [1e-30, 1e-20], [1e5, 8e3], [1e6, 1e-9]]


@pytest.mark.parametrize(
    ("platform", "scales"),
    [pytest.param(on, scales) for on in (*PLATFORMS, ONE_OF_SEVERAL) for scales in BESIDE],
)
def test_small_and_large_entries_beside_each_other(platform: str, scales: list[float]) -> None:
    x = np.concatenate([columns(i, math.log10(scale), 0.0, "f32", 24) for i, scale in enumerate(scales)])
    for found, right in norms_of(platform, x):
        exact = (platform == "gpu") | ((right >= LOW) & (right <= HIGH))
        assert (np.abs(found - right) <= np.where(exact, EXACT, PLAIN) * right).all()


@pytest.mark.parametrize("platform", [*PLATFORMS, ONE_OF_SEVERAL])
def test_what_is_not_finite_shows_in_a_norm(platform: str) -> None:
    for bad in (np.inf, -np.inf, np.nan):
        for scale in (1.0, 1e-20, 1e20):
            x = np.full((ROWS, COLUMNS), scale, np.float32)
            x[3, 2] = bad
            units, whole, together = measured_on(platform)(x)
            for found in (units[0, 2], whole.item(), together):
                assert np.isnan(found) if np.isnan(bad) else found == np.inf
            assert np.isfinite(np.delete(units[0], 2)).all()


@pytest.mark.parametrize("platform", [*PLATFORMS, ONE_OF_SEVERAL])
def test_norms_of_zeros_are_zero(platform: str) -> None:
    assert all((found == 0).all() for found, _ in norms_of(platform, np.zeros((ROWS, COLUMNS), np.float32)))
    mixed = np.zeros((ROWS, COLUMNS), np.float32)
    mixed[:, 1] = 3.0
    for found, right in norms_of(platform, mixed):
        assert (np.abs(found - right) <= EXACT * right).all()


@pytest.mark.parametrize("platform", [*PLATFORMS, ONE_OF_SEVERAL])
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1)])
def test_norms_of_empty_and_single_entries(platform: str, shape: tuple[int, int]) -> None:
    x = np.full(shape, -2.0, np.float32)
    run = as_on(
        platform, lambda x: (platforms.euclidean_norms([(x,)], ((0,),))[0], platforms.euclidean_norm([x]))
    )
    units, whole = run(x)
    assert units.shape == (1, shape[1])
    assert (units == (2.0 if x.size else 0.0)).all()
    assert whole == (2.0 if x.size else 0.0)


def test_two_programs_differ_by_what_is_done_for_their_platforms() -> None:
    """So that the other tests judge what they mean to."""
    x = columns(0, 0.0, 0.0, "f32")
    on_tpu, on_gpu, on_cpu = (measured_on(platform)(x) for platform in ("tpu", "gpu", "cpu"))
    assert same_bits(on_gpu[0], on_cpu[0])  # units
    assert not same_bits(on_tpu[0], on_cpu[0])
    assert not same_bits(on_gpu[1], on_cpu[1])


# --------------------------------------------------------------------------------------------------
# Clips and projections.

SHARES = st.sampled_from([0.0, 1e-30, 1e-3, 0.5, 0.999, 1.001, 3.0])
LIMITS = st.sampled_from([(0.5, 0.9), (0.5, 2.0), (1.5, 2.0), (1.5, 1.5), (0.0, 0.9)])


def bounded(bounds: Any, x: Any) -> Any:
    """What the library makes of a matrix: clipped, and projected by the call and as a link."""
    whole, leaf, units, low, high = bounds
    projections = {
        "max_norm": clipjax.max_norm(units, axes=0),
        "min_max_norm": clipjax.min_max_norm(low, high, axes=0),
        "unit_norm": clipjax.unit_norm(axes=0),
    }
    half = x * np.asarray(0.5, x.dtype)
    found = {
        "global": functional.clip_by_global_norm([x, x[:4]], whole)[0],
        "leaf": functional.clip_by_norm(x, leaf),
        "units": functional.clip_by_norm(x, units, 0),
    }
    for name, projection in projections.items():
        updates, _ = projection.update(half, projection.init(half), half)
        found |= {name: projection(x), f"{name} as a link": optax.apply_updates(half, updates)}
    return found


Program = Callable[..., Any]


def arguments(x: np.ndarray, share: float, limits: tuple[float, float]) -> tuple[Any, ...]:
    """Bounds relative to the norms, in float64."""
    whole, leaf, units = exact_tree_norm([x, x[:4]]), exact_norm(x), exact_norm(x, 0)
    shares = (share * whole, share * leaf, share * units, limits[0] * units, limits[1] * units)
    return tuple(np.asarray(value, np.float64) for value in shares)


def wrong_units(
    what: str, x: np.ndarray, after: np.ndarray, low: Any, high: Any, room: float = 0.0
) -> Iterator[str]:
    """What is wrong with columns between limits; `room` is a share that a norm may be too small by."""
    old, new = (np.asarray(exact_norm(y, 0), np.float64) for y in (x, after))
    came_from = old / 2 if "link" in what else old * 0
    wanted = np.clip(old, low, high)
    if not (new <= high * (1 + exact_slack())).all():
        yield f"{what}: norms {new} above {high}"
    allowed = (
        4 * ulp(np.maximum(came_from, wanted), x.dtype) + tiny(x.dtype) * math.sqrt(ROWS) + room * wanted
    )
    if not (new >= wanted - allowed).all():
        yield f"{what}: norms {new} far below {wanted}"
    inside = (old <= high * (1 - 1e-14 - room)) & (old >= low * (1 + 1e-14))
    flushed = (np.abs(x.astype(np.float64)) < tiny(np.float32)) & (after == 0) & (x.dtype != np.float16)
    if not (((as_bytes(x) == as_bytes(after)).all(axis=-1) | flushed).all(axis=0) | ~inside).all():
        yield f"{what}: what is inside has changed"


def check(run: Program, x: np.ndarray, share: float, limits: tuple[float, float], platform: str) -> None:
    """Hold the guarantees to what a program makes of a matrix."""
    whole, leaf, units, low, high = bounds = arguments(x, share, limits)
    found = run(bounds, x)
    sizes = np.stack([*np.ravel(exact_norm(x, 0)), exact_norm(x), whole / share if share else 1])
    in_pairs = platform != "tpu" or bool(((sizes >= LOW) & (sizes <= HIGH)).all())
    both, after = (np.concatenate([a, b]) for a, b in ((x, x[:4]), found["global"]))
    wrong = []
    if in_pairs:
        wrong += judge("global", both, after, None, 2, whole)
        wrong += judge("leaf", x, found["leaf"], None, 2, leaf)
        wrong += judge("units", x, found["units"], 0, 2, units)
    else:
        for bound, one in ((whole, after), (leaf, found["leaf"])):
            if exact_norm(one) > bound * (1 + exact_slack()):
                wrong.append(f"a norm of {exact_norm(one)} above {bound}")
        wrong += wrong_units("units", x, found["units"], 0.0, units, PLAIN)
    room = 0.0 if in_pairs else PLAIN
    between = {"max_norm": (0.0, units), "min_max_norm": (low, high), "unit_norm": (1.0, 1.0)}
    for name, ends in between.items():
        for what in (name, f"{name} as a link"):
            wrong += wrong_units(what, x, found[what], *ends, room)
    assert not wrong, "\n".join(wrong)
    ends_in_pairs = all(
        ((n >= LOW) & (n <= HIGH)).all()
        for n in (exact_norm(found[name], 0) for name in ("max_norm", "min_max_norm"))
    )
    for name in ("units", "max_norm", "min_max_norm", "unit_norm"):
        if platform != "tpu" or ends_in_pairs:
            assert same_bits(run(bounds, found[name])[name], found[name]), f"{name} is not idempotent"


DECADES = {"f32": (-30.0, 30.0), "bf16": (-30.0, 30.0), "f16": (-3.0, 3.0)}


@functools.cache
def bounded_on(platform: str) -> Program:
    return as_on(platform, bounded)


@pytest.mark.parametrize(
    ("platform", "kind"),
    [
        *(
            pytest.param(on, kind, marks=[FULL] * ((on == "gpu" and kind != "f32") or kind == "f16"))
            for on in PLATFORMS
            for kind in DTYPES
        ),
        pytest.param(ONE_OF_SEVERAL, "f32", marks=FULL),
    ],
)
@given(
    seed=st.integers(0, 2**30),
    place=st.floats(0, 1, width=16),
    spread=st.sampled_from([0.0, 1.0]),
    share=SHARES,
    limits=LIMITS,
)
@example(0, 0.5, 0.0, 0.5, (1.5, 1.5))
@example(0, 0.0, 0.0, 0.5, (0.5, 0.9))
@example(0, 1.0, 0.0, 0.5, (1.5, 2.0))
def test_the_bound_is_a_bound(
    platform: str,
    kind: str,
    seed: int,
    place: float,
    spread: float,
    share: float,
    limits: tuple[float, float],
) -> None:
    """And no norm ends far below it, inside nothing moves, and twice is once."""
    low, high = DECADES[kind]
    decade = low + place * (high - low)
    if platform == "gpu":  # where its sums overflow, norms are judged above
        decade = min(decade, 0.0) if decade < 3.5 else max(decade, 7.0)
    judged = "gpu" if platform == "gpu" else "tpu"
    check(bounded_on(platform), columns(seed, decade, spread, kind), share, limits, judged)


def hardest(count: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """The mantissas whose squares, as pairs, are the most too small, and the most too large."""
    x = (np.arange(2**23, dtype=np.uint32) | np.uint32(0x3F800000)).view(np.float32)
    first, rest = (np.asarray(part, np.float64) for part in jax.jit(pairs.square)(x))
    square = x.astype(np.float64) ** 2
    order = np.argsort(((first - square) + rest) / square)
    return x[order[:count]], x[order[-count:]]


def test_a_norm_is_told_from_its_bound_to_what_norms_are_exact_to() -> None:
    """Closer than that, what is inside may move, and what is outside may stay."""
    clip = as_on("tpu", lambda bound, x: functional.clip_by_norm(x, bound, 0))
    for mantissas in hardest():
        x = np.tile(mantissas, (ROWS, 1))
        size = np.asarray(exact_norm(x, 0), np.float64)
        for near in (0.0, 2.0**-37, -(2.0**-37), 2.0**-36, -(2.0**-36)):
            bound = size * (1 + near)
            norm = np.asarray(exact_norm(clip(bound, x), 0), np.float64)
            assert (norm <= bound * (1 + platforms.NORM_ERROR)).all()
            assert (norm >= bound - 4 * ulp(bound, np.float32)).all()
        far = 1 + 2 * platforms.NORM_ERROR
        assert same_bits(clip(size * far, x), x)
        assert (exact_norm(clip(size / far, x), 0) <= size / far).all()


@pytest.mark.parametrize("platform", ["tpu", ONE_OF_SEVERAL])
@given(st.integers(0, 2**30), st.floats(0, 1, width=16), st.booleans())
def test_inner_products_on_a_tpu(platform: str, seed: int, turned: float, cancelling: bool) -> None:
    """Exact to a share of the sum of the sizes of all products, even where these cancel."""
    rng = np.random.default_rng(seed)
    a, b = rng.uniform(-1, 1, (2, ROWS, COLUMNS)).astype(np.float32)
    if cancelling:
        b = b - np.sum(a * b, axis=0) / np.sum(a * a, axis=0) * a * np.float32(turned)
    a, b = (x / 2 ** np.floor(np.log2(np.linalg.norm(x, axis=0))) for x in (a, b))
    found = inner_products(platform)(a, b)[0]
    products = a.astype(np.longdouble) * b.astype(np.longdouble)
    error = np.abs(found - np.sum(products, axis=0))
    assert (error <= (2.0**-33 + ROWS * 2.0**-46) * np.sum(np.abs(products), axis=0)).all()


@functools.cache
def inner_products(platform: str) -> Program:
    return as_on(platform, lambda a, b: platforms.inner_product(a, b, *UNITS, (0,)))


def test_blocks_of_a_long_unit_are_added_without_rounding_on_several_tpus() -> None:
    """Of 64 blocks, in a column and in a whole leaf, with norms from the least to the largest in range."""
    run = as_on(
        ONE_OF_SEVERAL, lambda x: [platforms.euclidean_norms([(x,)], (a,))[0] for a in ((0,), (0, 1))]
    )
    for seed, scale in enumerate((3e-9, 1e-3, 1.0, 7e5, 3e14)):
        rng = np.random.default_rng(seed)
        x = (rng.standard_normal((1024, 512)) * 10 ** rng.uniform(-3, 0, (1024, 512)) * scale).astype(
            np.float32
        )
        for found, axis in zip(run(x), (0, None), strict=True):
            right = exact_norm(x, axis)
            assert (np.abs(np.ravel(found) - right) <= EXACT * right).all()


def test_inner_products_of_blocks_are_added_without_rounding_on_several_tpus() -> None:
    """Of 64 blocks in a column and 64 x 64 in a whole leaf, which nearly cancel."""
    run = as_on(
        ONE_OF_SEVERAL, lambda a, b: [platforms.inner_product(a, b, *UNITS, axes) for axes in ((0,), (0, 1))]
    )
    for seed in range(5):
        rng = np.random.default_rng(seed)
        a, b = rng.standard_normal((2, 1024, 512)).astype(np.float32)
        for i, axis in enumerate((0, None)):
            size = np.exp2(np.floor(np.log2([exact_norm(x, axis) for x in (a, b)])))
            x, y = ((x / n).astype(np.float32) for x, n in zip((a, b), size, strict=True))
            y = y - (np.sum(x * y, axis) / np.sum(x * x, axis) * x).astype(np.float32) * np.float32(seed / 4)
            products = x.astype(np.longdouble) * y.astype(np.longdouble)
            error = np.abs(np.ravel(run(x, y)[i]) - np.sum(products, axis))
            assert (error <= 2.0**-38).all()


@pytest.mark.parametrize("devices", [2, 256, 4096])
def test_sums_over_devices_on_a_tpu(devices: int) -> None:
    """Of shares between 0 and 1, in three parts of float32: as a TPU adds them."""
    summed = as_on("tpu", jax.vmap(lambda x: mesh.sum_of_devices(x, ("d",)), axis_name="d"))
    rng = np.random.default_rng(0)
    for x in (
        rng.random(devices),
        np.ones(devices),
        np.full(devices, 1 - 2.0**-53),
        rng.random(devices) ** 20,
    ):
        found = summed(x)
        assert (found == found[0]).all()
        assert abs(found[0] - np.sum(x.astype(np.longdouble))) <= devices * 2.0**-46


# --------------------------------------------------------------------------------------------------
# A TPU's float64.


def off_by(error: float) -> tuple[Any, ...]:
    """Put an error into every factor but 1."""

    def perturbed(function: Callable[..., rescale.Scale]) -> Callable[..., rescale.Scale]:
        def call(*args: Any) -> rescale.Scale:
            scale = function(*args)
            wrong = jnp.where(rescale.is_changed(scale), 1 + error, 1.0)
            return scale._replace(factor=scale.factor * wrong)

        return call

    return (trees, "to_bound", perturbed(trees.to_bound)), (
        constraints,
        "between",
        perturbed(constraints.between),
    )


def measured_off_by(error: float) -> tuple[Any, ...]:
    """Put an error into every norm."""
    of_leaves, of_tree = norms.euclidean_norms, norms.euclidean_norm
    return (
        (norms, "euclidean_norms", lambda *args: [norm * (1 + error) for norm in of_leaves(*args)]),
        (norms, "euclidean_norm", lambda xs: of_tree(xs) * (1 + error)),
    )


@functools.cache
def perturbed(sign: int) -> Program:
    """Norms as far off as they may be, and a division that is off in the same direction."""
    patches = (*off_by(-sign * TPU_ERROR), *measured_off_by(sign * platforms.NORM_ERROR))
    return as_on("cpu", bounded, patches)


@pytest.mark.parametrize(
    ("sign", "kind"),
    [pytest.param(sign, kind, marks=[FULL] * (kind != "f32")) for sign in (1, -1) for kind in DTYPES],
)
@given(
    seed=st.integers(0, 2**30),
    place=st.floats(0, 1, width=16),
    spread=st.sampled_from([0.0, 1.0]),
    share=SHARES,
    limits=LIMITS,
)
def test_errors_of_float64_and_of_norms_break_no_bound(
    sign: int, kind: str, seed: int, place: float, spread: float, share: float, limits: tuple[float, float]
) -> None:
    low, high = DECADES[kind]
    x = columns(seed, low + place * (high - low), spread, kind)
    check(perturbed(sign), x, share, limits, "cpu")


def test_the_slack_covers_what_a_norm_may_be_off_by() -> None:
    """An entry and a bound for which both roundings to float32 go up by nearly half a unit."""
    bounds, entries = [], []
    for a in range(2049, 2149, 2):
        b = (2**22 - 1) // a
        entry = 2 - b * 2.0**-22
        middle = (1 + (a - 0.5) * 2.0**-23) / 2  # of two factors in float32
        bounds.append(entry * middle * (1 - platforms.NORM_ERROR) / (1 - 2.0**-23) * (1 + 2.0**-50))
        entries.append(entry)
    x = np.asarray(entries, np.float32)[None]
    assert (x[0] == entries).all()
    clip = as_on(
        "cpu", lambda bound, x: functional.clip_by_norm(x, bound, 0), measured_off_by(-platforms.NORM_ERROR)
    )
    after = np.asarray(clip(np.asarray(bounds), x), np.float64)[0]
    assert (after <= bounds).all()
    assert (after >= np.asarray(bounds) - 4 * ulp(bounds, np.float32)).all()
