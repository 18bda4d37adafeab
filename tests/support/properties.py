"""What holds for every input, as functions that list what is wrong: for hypothesis and for the soak.

A trial is a tree of leaves with entries of a drawn scale. Every judgement is made in NumPy, in float64
or wider.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import optax

import clipjax
from clipjax import functional
from tests.support.oracles import INF, exact_norm, exact_slack, exact_tree_norm, ulp
from tests.support.trees import DTYPES, flat

SHAPES = {"bias": (5,), "conv": (3, 2, 4), "kernel": (7, 3), "scale": ()}
MIXTURES = {
    "f32": ("f32", "f32", "f32", "f32"),
    "bf16": ("bf16", "bf16", "bf16", "bf16"),
    "f16": ("f16", "f16", "f16", "f16"),
    "mixed": ("f32", "bf16", "f16", "f32"),
}
ORDS = (1, 2, 3, INF)

# float32 and bfloat16: from the smallest normal number, below which XLA on CPU flushes to 0, to
# where single entries are still finite. float16: subnormals count, being computed in float32.
RANGE = {"f32": (-37.9, 38.4), "bf16": (-37.9, 38.4), "f16": (-7.2, 4.7)}
FLOAT32_MAX = float(np.finfo(np.float32).max)


class Trial(NamedTuple):
    """What one trial draws."""

    mixture: str
    seed: int
    place: float  # where in the range of each dtype the scale lies, from 0 to 1
    spread: float  # over how many decades the entries of a leaf spread
    bound: float  # the bound, relative to the norm
    sparse: bool = False  # many zeros


def draw(trial: Trial, stream: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng([trial.seed, stream])
    tree = {}
    for (name, shape), kind in zip(SHAPES.items(), MIXTURES[trial.mixture], strict=True):
        low, high = RANGE[kind]
        center = low + trial.place * (high - low)
        size = 10.0 ** np.clip(center - trial.spread * rng.random(shape), low, high)
        values = size * rng.choice([-1.0, 1.0], shape)
        if trial.sparse:
            values = values * (rng.random(shape) < 0.5)
        info = ml_dtypes.finfo(DTYPES[kind])
        values = np.clip(values, -float(info.max), float(info.max))
        tree[name] = values.astype(DTYPES[kind])
    return tree


def kinds_of(mixture: str) -> dict[str, str]:
    return dict(zip(SHAPES, MIXTURES[mixture], strict=True))


def bound_for(norm: float, trial: Trial) -> float:
    """A bound relative to the norm, within what a Python float and a leaf can say."""
    return float(min(norm * trial.bound, 1e300))


# --------------------------------------------------------------------------------------------------
# Compiled once for each mixture of dtypes: bounds are arguments, in float64 as a Python float would be.


def with_wide_bounds(function: Callable[..., Any]) -> Callable[..., Any]:
    """Jit a function whose first argument, a tree of bounds, arrives in float64, as Python floats would."""
    compiled = jax.jit(function)

    def call(bounds: Any, *args: Any) -> Any:
        with jax.enable_x64(True):
            bounds = jax.tree.map(lambda bound: np.asarray(bound, np.float64), bounds)
            return jax.tree.map(np.asarray, compiled(bounds, *args))

    return call


@jax.jit
def measured(tree: Any) -> Any:
    """For each p: the norm of the tree, of the leaves, and of the units."""
    return {
        p: (
            functional.global_norm(tree, p),
            functional.leaf_norms(tree, p),
            functional.unitwise_norms(tree, clipjax.fan_in, p),
        )
        for p in ORDS
    }


def updated(tx: Any, grads: Any) -> Any:
    return tx.update(grads, tx.init(grads))[0]


GLOBAL_ORDS = (1, 2, INF)
NORMS_OF_A_KERNEL = ((None, 2), (0, 1), (1, 3), (clipjax.fan_in, 2), (None, INF))
RMS_OF_A_KERNEL = (None, clipjax.fan_in)


@with_wide_bounds
def clip_tree(bounds: Any, tree: Any) -> Any:
    """By the global norms, and by value with the bound that comes last."""
    clips = [
        clipjax.clip_by_global_norm(bound, ord=p) for p, bound in zip(GLOBAL_ORDS, bounds[:-1], strict=True)
    ]
    return [updated(tx, tree) for tx in (*clips, clipjax.clip_by_value(bounds[-1]))]


@with_wide_bounds
def clip_kernel(bounds: Any, kernel: Any) -> Any:
    """By norms along different axes, and by root mean squares."""
    of_norms, of_rms = bounds
    return (
        [
            updated(clipjax.clip_by_norm(bound, axes=axes, ord=p), kernel)
            for bound, (axes, p) in zip(of_norms, NORMS_OF_A_KERNEL, strict=True)
        ],
        [
            updated(clipjax.clip_by_rms(bound, axes=axes), kernel)
            for bound, axes in zip(of_rms, RMS_OF_A_KERNEL, strict=True)
        ],
    )


@with_wide_bounds
def bound_units(bounds: Any, kernel: Any) -> Any:
    """Clip and project the columns of a matrix, each to a bound of its own."""
    return {
        "clip_by_norm": updated(clipjax.clip_by_norm(bounds, axes=0), kernel),
        "max_norm": clipjax.max_norm(bounds, axes=0)(kernel),
    }


@with_wide_bounds
def project_in_three_ways(radius: Any, moved: Any, params: Any, update: Any) -> Any:
    """By the call, as a link, and as a link inside a branch."""
    ball = clipjax.max_norm(radius, axes=clipjax.fan_in)
    found = {"call": ball(moved)}
    for how, tx in (
        ("link", optax.chain(optax.identity(), ball)),
        ("branch", optax.apply_if_finite(ball, 5)),
    ):
        found[how] = optax.apply_updates(params, tx.update(update, tx.init(params), params)[0])
    return found


apply_updates = jax.jit(optax.apply_updates)


def units_of(leaf: Any, axes: Any) -> Any:
    """The axis argument of NumPy for `axes`, or "skip"."""
    if callable(axes):
        axes = axes((), leaf)
    return "skip" if axes is clipjax.SKIP else axes


# --------------------------------------------------------------------------------------------------
# The checks. Each yields a sentence for everything that is wrong.


def check_norms(trial: Trial) -> Iterator[str]:
    """Measured norms agree with the oracle to 1e-6, and are neither 0 nor inf while it is in range."""
    tree = draw(trial)
    for p, (whole, leaves, units) in jax.tree.map(np.asarray, measured(tree)).items():
        pairs = [("tree", whole, exact_tree_norm(tree, p))]
        for name, leaf in tree.items():
            pairs.append((name, leaves[name], exact_norm(leaf, None, p)))
            axis = units_of(leaf, clipjax.fan_in)
            if axis != "skip":
                pairs.append((f"units of {name}", units[name], exact_norm(leaf, axis, p)))
        for what, got, exact in pairs:
            if got.dtype != np.float32:
                yield f"ord {p}, {what}: dtype {got.dtype}"
            expected = np.asarray(exact, np.float64)
            got = np.asarray(got, np.float64)
            representable = expected <= FLOAT32_MAX
            wrong = np.abs(got - expected) > 1e-6 * expected
            if (wrong & representable).any():
                yield f"ord {p}, {what}: {got} instead of {expected}"
            if (got[~representable] < FLOAT32_MAX).any():
                yield f"ord {p}, {what}: {got} instead of {expected}, beyond float32"


def as_bytes(x: Any) -> np.ndarray:
    """The bytes of each entry along a new last axis."""
    x = np.asarray(x)
    return np.frombuffer(x.tobytes(), np.uint8).reshape(*x.shape, x.dtype.itemsize)


def tiny(dtype: Any) -> float:
    """How much an entry may lose by underflow: float16's subnormals are computed, others flushed."""
    info = ml_dtypes.finfo(dtype)
    return float(info.smallest_subnormal if dtype == np.float16 else info.smallest_normal)


def judge(
    what: str,
    before: Any,
    after: Any,
    axis: Any,
    p: float,
    bound: Any,
    *,
    times: float = 1.0,
) -> Iterator[str]:
    """Units outside are inside the bound and at most 4 ulp below it; units inside kept their bits.

    The bound is one for all, or an array with one for each unit.
    """
    old = np.asarray(exact_norm(before, axis, p), np.longdouble)
    new = np.asarray(exact_norm(after, axis, p), np.longdouble)
    limit = np.longdouble(bound) * np.longdouble(times)
    slack, dtype = exact_slack(), np.asarray(before).dtype
    if not np.isfinite(np.asarray(after).astype(np.float64)).all():
        yield f"{what}: not finite"
        return
    # Norms this close to the bound may be on either side of it in float64.
    close = np.abs(old - limit) <= 1e-14 * limit
    over = new > limit * (1 + np.longdouble(slack))
    if (over & ~close).any() or (new > limit * (1 + np.longdouble(1e-14))).any():
        yield f"{what}: a norm is {float(np.max(new - limit))} above its bound, of {bound}"
    inside = (old <= limit) & ~close
    # XLA flushes the subnormals of float32, and so of bfloat16, in whatever it computes.
    sizes, left = (np.abs(np.asarray(x).astype(np.complex128)) for x in (before, after))
    flushed = (sizes < np.finfo(np.float32).tiny) & (left == 0) & (dtype != np.float16)
    kept = ((as_bytes(before) == as_bytes(after)).all(axis=-1) | flushed).all(axis=axis)
    if (inside & ~kept).any():
        yield f"{what}: what is inside the bound {bound} has changed"
    count = np.size(before) // max(1, np.size(old))
    short = np.asarray(limit - new, np.float64)
    # Below the normal numbers of the dtype every entry loses up to one of its subnormals, which
    # are the ulp of the bound only if the bound is as small.
    allowed = 4 * ulp(np.asarray(limit, np.float64), dtype) + tiny(dtype) * count ** (1 / p)
    lost = short > allowed
    if (~inside & ~close & lost).any():
        yield f"{what}: {np.max((short / allowed)[~inside & ~close])} times too far below the bound {bound}"


def check_clips(trial: Trial) -> Iterator[str]:
    """No clipped norm is above its bound, none needlessly below, and inside nothing moves."""
    tree = draw(trial)
    norms = [float(exact_tree_norm(tree, p)) for p in GLOBAL_ORDS]
    largest = float(np.max(np.abs(flat(tree))))
    bounds = [bound_for(size, trial) for size in (*norms, largest)]
    *by_norms, by_value = clip_tree(bounds, tree)
    for p, norm, bound, after in zip(GLOBAL_ORDS, norms, bounds[:-1], by_norms, strict=True):
        if not np.isfinite(flat(after)).all():
            yield f"clip_by_global_norm(ord={p}): not finite for the norm {norm}"
        new = exact_tree_norm(after, p)
        slack = 1e-14 if abs(norm - bound) <= 1e-14 * bound else exact_slack()
        if new > np.longdouble(bound) * (1 + np.longdouble(slack)):
            yield f"clip_by_global_norm(ord={p}): the norm {new} is above {bound}"
        lost = tiny(np.float32) * flat(tree).size ** (1 / p)
        if norm <= bound * (1 - 1e-14) and any((after[k] != tree[k]).any() for k in tree):
            yield f"clip_by_global_norm(ord={p}): what is inside has changed"
        # One factor for all: in float32 it costs two roundings of 2**-24 and their slack.
        elif norm > bound > 1e-36 and trial.mixture == "f32" and bound - new > bound * 2.0**-21 + lost:
            yield f"clip_by_global_norm(ord={p}): the norm {new} is far below {bound}"
    for name, leaf in tree.items():
        # The limit rounded inwards is one ulp away; below the subnormals it is 0.
        yield from judge(f"clip_by_value {leaf.dtype}", leaf, by_value[name], (), INF, bounds[-1])

    one = tree["kernel"]
    ways = [(units_of(one, axes), p) for axes, p in NORMS_OF_A_KERNEL]
    of_norms = [bound_for(float(np.max(exact_norm(one, axis, p))), trial) for axis, p in ways]
    rows = [units_of(one, axes) for axes in RMS_OF_A_KERNEL]
    roots = [math.sqrt(one.size if axis is None else one.size // one.shape[-1]) for axis in rows]
    of_rms = [
        bound_for(float(np.max(exact_norm(one, axis)) / root), trial)
        for axis, root in zip(rows, roots, strict=True)
    ]
    by_norms, by_rms = clip_kernel((of_norms, of_rms), one)
    for (axis, p), bound, after in zip(ways, of_norms, by_norms, strict=True):
        yield from judge(f"clip_by_norm(axes={axis}, ord={p}) {one.dtype}", one, after, axis, p, bound)
    for axis, root, bound, after in zip(rows, roots, of_rms, by_rms, strict=True):
        yield from judge(f"clip_by_rms(axes={axis}) {one.dtype}", one, after, axis, 2, bound, times=root)


# Large leaves are summed and scheduled differently.
MATRICES = {"small": (7, 3), "large": (4096, 40)}


def without_memory(trial: Trial) -> Iterator[str]:
    """Units with norms and bounds of their own, anywhere in the range of the dtype."""
    size = "small" if trial.seed % 8 else "large"
    kind = MIXTURES[trial.mixture][0]
    rng = np.random.default_rng(trial.seed)
    low, high = RANGE[kind]
    shape = MATRICES[size]
    scales = 10.0 ** rng.uniform(low, high - 1, shape[1])
    bounds = 10.0 ** rng.uniform(low + 1, high, shape[1])
    matrix = (scales * rng.uniform(-1, 1, shape)).astype(DTYPES[kind])
    if trial.sparse:
        matrix[:, rng.random(shape[1]) < 0.5] = 0
    for name, after in bound_units(bounds, matrix).items():
        yield from judge(f"{name} of a {size} {kind} matrix", matrix, after, 0, 2, bounds)


def weights_and_update(trial: Trial) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights, and an update of their size or much smaller."""
    params = draw(trial)
    factor = np.random.default_rng(trial.seed).choice([0.0, 1e-3, 0.25, 1.0])
    update = {}
    for name, leaf in draw(trial, 1).items():
        update[name] = (np.asarray(leaf, np.float64) * 0.25 * factor).astype(leaf.dtype)
        params[name] = (np.asarray(params[name], np.float64) * 0.25).astype(leaf.dtype)
        if leaf.dtype != np.float16:
            # An update smaller than the smallest normal number is flushed to 0, so that a link can
            # place a weight exactly only where the ulp of a float32 is a normal number.
            for tree in (update, params):
                small = np.abs(tree[name].astype(np.float64)) < tiny(leaf.dtype) * 2.0**24
                tree[name] = np.where(small, 0, tree[name]).astype(leaf.dtype)
    return params, update


def check_projection(trial: Trial) -> Iterator[str]:
    """By the call, as a link, and inside a branch: inside the ball, close to it, idempotent."""
    params, update = weights_and_update(trial)
    moved = jax.tree.map(np.asarray, apply_updates(params, update))
    largest = max(
        float(np.max(exact_norm(moved[k], units_of(moved[k], clipjax.fan_in)))) for k in ("conv", "kernel")
    )
    radius = bound_for(largest, trial)

    found = project_in_three_ways(radius, moved, params, update)
    direct = found["call"]
    again = project_in_three_ways(radius, direct, params, update)["call"]
    for name in ("conv", "kernel"):
        axis = units_of(moved[name], clipjax.fan_in)
        yield from judge(f"max_norm {moved[name].dtype}", moved[name], direct[name], axis, 2, radius)
    for name in SHAPES:
        if direct[name].tobytes() != again[name].tobytes():
            yield f"max_norm {direct[name].dtype}: not idempotent, radius {radius}"
    for how in ("link", "branch"):
        after = found[how]
        for name in SHAPES:
            leaf, dtype = after[name], after[name].dtype
            axis = units_of(leaf, clipjax.fan_in)
            what = f"max_norm as a {how} {dtype}"
            if axis == "skip":
                if (leaf != moved[name]).any():
                    yield f"{what}: a leaf that it leaves alone has changed"
                continue
            if not np.isfinite(leaf.astype(np.float64)).all():
                yield f"{what}: not finite"
                continue
            before, stepped, new = (exact_norm(x, axis) for x in (params[name], moved[name], leaf))
            close = np.abs(stepped - radius) <= 1e-14 * radius
            if (new > radius * (1 + np.where(close, 1e-14, exact_slack()))).any():
                yield f"{what}: a norm is {float(np.max(new) / radius) - 1} of the radius {radius} above it"
            inside = stepped <= radius * (1 - 1e-14)
            same = (leaf == moved[name]).all(axis=axis)
            if (inside & ~same).any():
                yield f"{what}: what is inside the radius {radius} has changed"
            outside = stepped > radius * (1 + 1e-14)
            short = np.asarray(radius - new, np.float64)
            allowed = 4 * ulp(np.maximum(np.asarray(before, np.float64), radius), dtype)
            allowed = allowed + tiny(dtype) * math.sqrt(leaf.size / new.size)
            if (outside & (short > allowed)).any():
                worst = np.max((short / (allowed / 4))[outside])
                yield f"{what}: {worst} ulp below the radius {radius}, from norms {before}"


CHECKS = {"norms": check_norms, "clips": check_clips, "units": without_memory, "projection": check_projection}
