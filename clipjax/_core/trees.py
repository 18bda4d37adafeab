"""Bounding whole trees: what the functions on trees, the transformations and the projections share.

Each function returns the bounded tree and a :class:`Report` of what it did.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.axes import Axes, Reduced, Skip, is_measured, leaves_with_paths, path_name, resolve_axes
from clipjax._core.bounds import check_fits
from clipjax._core.mesh import (
    AxisName,
    Names,
    names_of_leaf,
    names_of_units,
    pmax,
    pmin,
    spec_leaves,
    varying,
)
from clipjax._core.norms import as_arrays, in_float64, norm_of, tree_norm, wide
from clipjax._core.reductions import max_of, min_of
from clipjax._core.rescale import (
    Shrink,
    factors_of,
    multiply,
    rescale,
    scale_of,
    shrink_leaf_to,
    shrink_to,
    stored,
)
from clipjax._core.turns import Turn, first_entry, is_large, on_one_device, turn_after

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Report(NamedTuple):
    """What one call measured and did, over all leaves and units, as scalars."""

    norm: jax.Array  # the largest norm before
    scale: jax.Array  # the smallest factor applied
    clipped: jax.Array  # bool: whether anything was out of bounds


class Unit(NamedTuple):
    """Where the units of a leaf lie: its place in the tree, the reduced axes, the mesh axes."""

    position: int
    path: str
    leaf: Any
    reduced: Reduced
    names: Names


class Queue(NamedTuple):
    """How leaves that take long to compute come in one after the other."""

    turn: Turn  # of the first
    # (position in the tree, turn) -> (the leaf there, the arrays whose sum it is, if any)
    enter: Callable[[int, Turn], tuple[jax.Array, Sequence[jax.Array]]]
    # (position, the leaf rescaled, turn) -> the turn of the next
    leave: Callable[[int, jax.Array, Turn], Turn]


BoundOfUnits: TypeAlias = Callable[[Unit], jax.Array]
HowOfUnits: TypeAlias = Callable[[Unit, jax.Array], Shrink]


def on_arrays(function: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Run `function(tree, …)` under :func:`in_float64`, on a tree whose leaves have their dtypes already."""
    inside = in_float64(function)

    @functools.wraps(function)
    def wrapped(tree: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return inside(as_arrays(tree), *args, **kwargs)

    return wrapped


@on_arrays
def measure_tree(tree: Any, ord: Any, axis_name: AxisName = None) -> jax.Array:  # noqa: A002
    """The norm of all leaves together, on all devices, in float64: what :func:`clip_tree` compares."""
    return tree_norm(tree, ord, lambda leaf: names_of_leaf(leaf, axis_name))


@on_arrays
def clip_tree(
    tree: Any,
    bound: jax.Array,
    ord: Any,  # noqa: A002
    axis_name: AxisName = None,
    norm: jax.Array | None = None,
) -> tuple[Any, Report]:
    """Bound the norm of all leaves together; every leaf gets the same factor."""
    check_fits(bound, (), "one norm")
    given = norm
    if given is None:
        norm = measure_tree(tree, ord, axis_name)
    else:
        norm = wide(check_fits(given, (), "the norm of the whole tree"))
    how = shrink_to(norm, bound)
    if given is not None and given.dtype != np.float64:  # what was rounded may be too small
        how = how._replace(factor=jnp.where(how.factor < 0, how.factor, how.factor * (1 - 2.0**-24)))
    factors = functools.cache(functools.partial(factors_of, how, many=True))
    clipped = jax.tree.map(
        lambda leaf: multiply(leaf, factors(leaf.dtype)) if is_measured(leaf) else leaf, tree
    )
    return clipped, Report(norm, scale_of(how), ~(how.factor < 0))


@on_arrays
def clip_units(
    tree: Any,
    bound_of: BoundOfUnits,
    axes: Axes,
    ord: Any,  # noqa: A002
    specs: Any = None,
    axis_name: AxisName = None,
    queue: Queue | None = None,
) -> tuple[Any, Report]:
    """Bound the norm of each unit along `axes` (of each leaf where they are None) on its own."""
    bounds: list[jax.Array] = []  # of the units, in their order

    def how_of(unit: Unit, norm: jax.Array) -> Shrink:
        bounds.append(check_fits(bound_of(unit), norm.shape, "the norms"))
        return shrink_leaf_to(unit.leaf, norm, bounds[-1])

    def reports_of(norms: list[jax.Array], hows: list[Shrink]) -> list[Report]:
        apart, together = [], []
        for norm, how, bound in zip(norms, hows, bounds, strict=True):
            if not varying(norm) and (norm.ndim == 0 or on_one_device()):
                together.append((norm, bound))
            else:
                apart.append(_report(norm, how))
        # Side by side: hundreds of small computations take long to compile.
        return [*apart, _report_together(together)] if together else apart

    return _rescale_units(tree, how_of, reports_of, axes, ord, specs, axis_name, queue)


@on_arrays
def scale_units(
    tree: Any,
    how_of: HowOfUnits,
    axes: Axes,
    specs: Any = None,
    axis_name: AxisName = None,
    queue: Queue | None = None,
) -> tuple[Any, Report]:
    """Rescale each unit along `axes` as `how_of(unit, norms)` says."""

    def reports_of(norms: list[jax.Array], hows: list[Shrink]) -> list[Report]:
        return [_report(norm, how) for norm, how in zip(norms, hows, strict=True)]

    return _rescale_units(tree, how_of, reports_of, axes, 2.0, specs, axis_name, queue)


def _rescale_units(
    tree: Any,
    how_of: HowOfUnits,
    reports_of: Callable[[list[jax.Array], list[Shrink]], list[Report]],
    axes: Axes,
    ord: Any,  # noqa: A002
    specs: Any,
    axis_name: AxisName,
    queue: Queue | None,
) -> tuple[Any, Report]:
    """Measure and rescale one leaf after the other."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    norms, hows = [], []
    turn = queue.turn if queue else None
    for unit in units_of(tree, axes, specs, axis_name):
        leaf, terms = queue.enter(unit.position, turn) if queue else (unit.leaf, ())
        norm = norm_of(leaf, unit.reduced, ord, unit.names, turn, terms)
        how = how_of(unit, norm)
        rescaled = rescale(leaf, how)
        if queue:
            turn = queue.leave(unit.position, rescaled, turn)
        elif is_large(leaf):
            turn = turn_after(turn, leaf, -jnp.abs(first_entry(how.factor)))
        leaves[unit.position] = rescaled
        norms.append(norm)
        hows.append(how)
    report = summary(reports_of(norms, hows))
    if queue and turn is not None:  # XLA multiplies by the reciprocal of a divisor that has no other use
        report = report._replace(scale=jnp.minimum(report.scale, turn))
    return treedef.unflatten(leaves), report


def _report_together(measured: Sequence[tuple[jax.Array, jax.Array]]) -> Report:
    """One report of units in many leaves, from their norms and bounds."""
    norms, bounds = zip(*measured, strict=True)
    joined = stored(lax.stop_gradient(_joined(norms)))
    if bounds[0].ndim == 0 and all(bound is bounds[0] for bound in bounds):
        joined, bound = max_of(joined), bounds[0]  # the largest norm tells all
    else:
        bound = _joined([jnp.broadcast_to(b, norm.shape) for norm, b in measured])
    return _report(joined, shrink_to(joined, bound))


def _joined(values: Sequence[jax.Array]) -> jax.Array:
    return jnp.concatenate([value.ravel() for value in values])


def _report(norm: jax.Array, how: Shrink) -> Report:
    norm, how = lax.stop_gradient((norm, how))
    return Report(max_of(norm), min_of(scale_of(how), 1), ~jnp.all(how.factor < 0))


def units_of(tree: Any, axes: Axes, specs: Any = None, axis_name: AxisName = None) -> list[Unit]:
    """Find the units of every leaf that has any."""
    paths = leaves_with_paths(tree)
    resolved = resolve_axes(axes, tree)
    return [
        Unit(i, path_name(path), leaf, reduced, names_of_units(path, leaf, reduced, spec, axis_name))
        for i, ((path, leaf), reduced, spec) in enumerate(
            zip(paths, resolved, spec_leaves(specs, tree), strict=True)
        )
        if not isinstance(reduced, Skip)
    ]


@in_float64
def size_of(unit: Unit) -> int:
    """How many entries share a norm, on all devices."""
    shape = jnp.shape(unit.leaf)
    local = math.prod(shape if unit.reduced is None else (shape[a] for a in unit.reduced))
    return local * math.prod(lax.axis_size(name) for name in unit.names)


def summary(reports: list[Report]) -> Report:
    """One report for all leaves and, inside shard_map, for all devices."""
    if not reports:
        return Report(jnp.zeros(()), jnp.ones(()), jnp.zeros((), bool))

    def over_all(values: tuple[jax.Array, ...], over: Any, over_devices: Any) -> jax.Array:
        return over(jnp.stack([over_devices(x, varying(x)) if varying(x) else x for x in values]))

    norms, scales, clipped = zip(*reports, strict=True)
    return Report(
        over_all(norms, max_of, pmax), over_all(scales, min_of, pmin), over_all(clipped, jnp.any, lax.pmax)
    )
