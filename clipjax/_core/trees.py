"""Bounds on whole trees, for the functions on trees, the transformations and the projections.

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
from clipjax._core.devices import on_single_device
from clipjax._core.dtypes import as_arrays, in_float64, wide
from clipjax._core.maxima import largest_of_rows, max_of, min_of
from clipjax._core.mesh import (
    AxisName,
    Names,
    is_spread,
    names_of_units,
    of_each_leaf,
    placed_as,
    spec_leaves,
    varying,
)
from clipjax._core.norms import norms_of, tree_norm
from clipjax._core.rescale import Scale, factor_of, is_changed, precision_of, rescale, rounded_down, to_bound
from clipjax._core.side_by_side import side_by_side

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Report(NamedTuple):
    """What one call measured and did, over all leaves and units, as scalars."""

    norm: jax.Array  # the largest norm before
    scale: jax.Array  # the smallest factor applied, at most 1
    clipped: jax.Array  # bool: whether anything was out of bounds
    after: jax.Array  # the largest norm after


class Unit(NamedTuple):
    """Where the units of a leaf lie."""

    position: int  # the place of the leaf in the tree
    path: str
    leaf: Any
    reduced: Reduced
    names: Names  # the mesh axes that split a unit
    over: Names  # the mesh axes over which devices have different units


# How to bring units to their bounds: an elementwise function of their norms and of further columns, and these
# columns, which have an array for each leaf.
Decision: TypeAlias = tuple[Callable[..., Scale], list[list[jax.Array]]]
Rule: TypeAlias = Callable[[Sequence[Unit], Sequence[jax.Array]], Decision]


def on_arrays(function: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Run `function(tree, …)` under :func:`in_float64`, on arrays with the dtypes of the user's mode."""
    inside = in_float64(function)

    @functools.wraps(function)
    def wrapped(tree: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return inside(as_arrays(tree), *args, **kwargs)

    return wrapped


@on_arrays
def measure_tree(tree: Any, ord: Any, axis_name: AxisName = None) -> jax.Array:  # noqa: A002
    """Return the norm of all leaves together, on all devices, in float64, as :func:`clip_tree` uses it."""
    return tree_norm(tree, ord, axis_name)


@on_arrays
def clip_tree(
    tree: Any,
    bound: jax.Array,
    ord: Any,  # noqa: A002
    axis_name: AxisName = None,
    norm: jax.Array | None = None,
) -> tuple[Any, Report]:
    """Bound the norm of all leaves together; every leaf gets the same factor."""
    check_fits("max_norm", bound, (), "the norm of all leaves")
    given = norm
    if given is None:
        norm = measure_tree(tree, ord, axis_name)
    else:
        norm = wide(check_fits("norm", given, (), "the whole tree"))
    scale = to_bound(norm, bound)
    if given is not None and given.dtype != np.float64:  # what was rounded may be too small
        lower = scale.factor * (1 - 2.0**-24)
        scale = scale._replace(factor=jnp.where(is_changed(scale), lower, scale.factor))
    down = functools.cache(functools.partial(rounded_down, scale))  # once for all leaves of a precision
    clipped = jax.tree.map(
        lambda leaf: rescale(leaf, down(precision_of(leaf.dtype).slack)) if is_measured(leaf) else leaf, tree
    )
    return clipped, of_norms(norm, scale)


def of_norms(norm: jax.Array, scale: Scale) -> Report:
    """Report what a scale does to a norm, or to each of several norms."""
    factor = factor_of(scale)
    return Report(norm, factor, is_changed(scale), norm * factor)


@on_arrays
def clip_units(
    tree: Any,
    bound_of: Callable[[Unit], jax.Array],
    axes: Axes,
    ord: Any,  # noqa: A002
    specs: Any = None,
    axis_name: AxisName = None,
    name: str = "max_norm",
) -> tuple[Any, Report]:
    """Bound the norm of each unit along `axes` separately (of each leaf if `axes` is None)."""
    return rescale_units(tree, within(name, bound_of), axes, ord, specs, axis_name)


def within(name: str, bound_of: Callable[[Unit], jax.Array]) -> Rule:
    """Make the rule that keeps norms at or below a bound; `name` is the bound's argument name in errors."""

    def rule(units: Sequence[Unit], norms: Sequence[jax.Array]) -> Decision:
        return to_bound, [
            [for_units(name, bound_of(u), u, norm) for u, norm in zip(units, norms, strict=True)]
        ]

    return rule


def for_units(name: str, bound: jax.Array, unit: Unit, norm: jax.Array) -> jax.Array:
    """Return a bound for each unit of a leaf."""
    of = f"the norms of {unit.path!r}" if unit.path else "the norms of the array"
    return for_each(norm, check_fits(name, bound, norm.shape, of))


def for_each(norm: jax.Array, value: Any) -> jax.Array:
    """Broadcast a value to the norms of a leaf, split over devices like these."""
    return placed_as(norm, jnp.broadcast_to(value, norm.shape))


@on_arrays
def rescale_units(
    tree: Any,
    rule: Rule,
    axes: Axes,
    ord: Any = 2.0,  # noqa: A002
    specs: Any = None,
    axis_name: AxisName = None,
) -> tuple[Any, Report]:
    """Measure each unit along `axes`, and rescale it as `rule(units, norms)` says."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    units = units_of(tree, axes, specs, axis_name)
    norms = measure_units(units, ord)
    exact, scales = decide(rule, units, norms)
    for unit, scale in zip(units, scales, strict=True):
        leaves[unit.position] = rescale(unit.leaf, scale)
    return treedef.unflatten(leaves), report_of(norms, exact, units)


@in_float64
def decide(rule: Rule, units: Sequence[Unit], norms: Sequence[jax.Array]) -> tuple[list[Scale], list[Scale]]:
    """Return the scales of units, and the same scales rounded down for their dtypes."""
    if not units:
        return [], []
    scale_of, columns = rule(units, norms)
    slack = [for_each(n, precision_of(u.leaf.dtype).slack) for u, n in zip(units, norms, strict=True)]
    found = _scales(scale_of, list(norms), slack, *map(list, columns))
    return [exact for exact, _ in found], [down for _, down in found]


@functools.partial(jax.jit, static_argnums=0)
def _scales(
    scale_of: Callable[..., Scale], norms: list[jax.Array], slack: list[jax.Array], *columns: list[jax.Array]
) -> list[tuple[Scale, Scale]]:
    def scales(norm: jax.Array, slack: jax.Array, *columns: jax.Array) -> tuple[Scale, Scale]:
        scale = scale_of(norm, *columns)
        return scale, rounded_down(scale, slack)

    return side_by_side(scales, norms, slack, *columns)


def measure_units(units: Sequence[Unit], ord: Any = 2.0) -> list[jax.Array]:  # noqa: A002
    """Return the norms of all units, in float64."""
    leaves, axes, names = [(u.leaf,) for u in units], [u.reduced for u in units], [u.names for u in units]
    return norms_of(leaves, axes, ord, names)


def units_of(
    tree: Any, axes: Axes, specs: Any = None, axis_name: AxisName = None, *, may_bound_nothing: bool = False
) -> list[Unit]:
    """Find the units of every leaf that has any."""
    paths = leaves_with_paths(tree)
    resolved = resolve_axes(axes, tree, may_bound_nothing=may_bound_nothing)
    each = zip(paths, resolved, spec_leaves(specs, tree), of_each_leaf(axis_name, tree), strict=True)
    return [
        Unit(i, path_name(path), leaf, reduced, *names_of_units(path, leaf, reduced, spec, names))
        for i, ((path, leaf), reduced, spec, names) in enumerate(each)
        if not isinstance(reduced, Skip)
    ]


@in_float64
def size_of(unit: Unit) -> Any:
    """Return how many entries share a norm, on all devices: an int, unless `jax.export` makes it symbolic."""
    shape = jnp.shape(unit.leaf)
    local = math.prod(shape if unit.reduced is None else (shape[a] for a in unit.reduced))
    return local * math.prod(lax.axis_size(name) for name in unit.names)


def report_of(norms: Sequence[jax.Array], scales: Sequence[Scale], units: Sequence[Unit]) -> Report:
    """Make one report for all units on all devices."""
    return _report(list(norms), list(scales), tuple(unit.over for unit in units))


@in_float64
@functools.partial(jax.jit, static_argnums=2)
def _report(norms: list[jax.Array], scales: list[Scale], over: tuple[Names, ...]) -> Report:
    norms, scales = lax.stop_gradient((norms, scales))

    def together(norms: list[jax.Array], scales: list[Scale]) -> Report:
        each = of_norms(joined(norms), Scale(*(joined(column) for column in zip(*scales, strict=True))))
        return Report(max_of(each.norm), min_of(each.scale, 1), jnp.any(each.clipped), max_of(each.after))

    def apart(norms: list[jax.Array], scales: list[Scale]) -> Report:
        return summary([of_norms(*each) for each in zip(norms, scales, strict=True)], over)

    if not norms or any(over) or any(is_spread(norm) for norm in norms):
        return apart(norms, scales)
    return lax.cond(on_single_device(), together, apart, norms, scales)


def joined(values: Sequence[jax.Array]) -> jax.Array:
    """Concatenate all numbers, as hundreds of small reductions are slow to compile.

    The barrier keeps XLA from splitting the one reduction into many again.
    """
    return lax.optimization_barrier(jnp.concatenate([value.ravel() for value in values]))


@in_float64
@functools.partial(jax.jit, static_argnums=1)
def least_of(values: Sequence[jax.Array], over: tuple[Names, ...]) -> jax.Array:
    """Return the smallest number in arrays of many leaves, on all devices; infinity if there are none."""
    if not values:
        return jnp.full((), jnp.inf)

    def together(values: list[jax.Array]) -> jax.Array:
        return min_of(joined(values))

    def apart(values: list[jax.Array]) -> jax.Array:
        return -most_of([-value for value in values], over=over)[0]

    if any(over) or any(is_spread(value) for value in values):
        return apart(list(values))
    return lax.cond(on_single_device(), together, apart, list(values))


@in_float64
def summary(reports: list[Report], over: Sequence[Names] | None = None) -> Report:
    """Make one report for all leaves on all devices.

    Args:
      reports: one for each leaf, of scalars, or of arrays with a number for each unit.
      over: the mesh axes over which each report differs, if types do not show them.
    """
    if not reports:
        return Report(jnp.zeros(()), jnp.ones(()), jnp.zeros((), bool), jnp.zeros(()))
    norms, scales, clipped, afters = zip(*reports, strict=True)
    most, least, changed, after = most_of(norms, [-scale for scale in scales], clipped, afters, over=over)
    return Report(jnp.maximum(most, 0), jnp.minimum(-least, 1), changed > 0, jnp.maximum(after, 0))


def most_of(*columns: Sequence[jax.Array], over: Sequence[Names] | None = None) -> list[jax.Array]:
    """Return the largest number of each column, on all devices; NaN if one is NaN, -inf if there are none.

    A maximum over devices may lose NaN, so another maximum finds whether there is one. Each leaf sends both
    in one array, so XLA makes one all-reduce for all leaves. Numbers keep their dtype, as there may be one
    for each entry of a leaf.
    """

    def asked(*numbers: jax.Array) -> jax.Array:
        dtype = np.result_type(*(x.dtype for x in numbers))
        values = jnp.stack([lax.convert_element_type(x, dtype) for x in numbers])
        unknown = jnp.isnan(values)
        return jnp.concatenate(
            [jnp.where(unknown, -jnp.inf, values), lax.convert_element_type(unknown, dtype)]
        )

    rows = [asked(*numbers) for numbers in zip(*columns, strict=True)]
    names = [tuple({*varying(x), *more}) for x, more in zip(rows, over or [()] * len(rows), strict=True)]
    found = largest_of_rows(rows, names)
    most, unknown = found[: len(columns)], found[len(columns) :]
    return list(jnp.where(unknown > 0, jnp.nan, most))
