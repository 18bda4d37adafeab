"""Bounding whole trees: what the functions on trees, the transformations and the projections share.

Each function returns the bounded tree and a :class:`Report` of what it did.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._axes import Axes, Reduced, Skip, is_measured, resolve_axes
from clipjax._bounds import check_fits
from clipjax._mesh import AxisName, Names, names_of_leaf, names_of_units, pmax, pmin, spec_leaves, varying
from clipjax._norms import as_arrays, in_float64, norm_of, strong, tree_norm, wide
from clipjax._rescale import Shrink, limits_in, rescale, scale_of, shrink_to, weakly_typed_as

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Report(NamedTuple):
    """What one call measured and did, over all leaves and units, as scalars."""

    norm: jax.Array  # the largest norm before
    scale: jax.Array  # the smallest factor applied
    clipped: jax.Array  # bool: whether anything was out of bounds


class Unit(NamedTuple):
    """Where the units of a leaf lie: its position in the tree, the reduced axes, the mesh axes."""

    position: int
    leaf: Any
    reduced: Reduced
    names: Names


BoundOfUnits: TypeAlias = Callable[[Unit], jax.Array]


def _on_arrays(function: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Run `function(tree, …)` under :func:`in_float64`, on a tree whose leaves have their dtypes already."""
    inside = in_float64(function)

    @functools.wraps(function)
    def wrapped(tree: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return inside(as_arrays(tree), *args, **kwargs)

    return wrapped


@_on_arrays
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
        norm = tree_norm(tree, ord, lambda leaf: names_of_leaf(leaf, axis_name))
    else:
        norm = wide(check_fits(given, (), "the norm of the whole tree"))
    how = shrink_to(norm, bound)
    if given is not None and given.dtype != np.float64:  # what was rounded may be too small
        how = how._replace(factor=jnp.where(how.factor < 0, how.factor, how.factor * (1 - 2.0**-24)))
    clipped = jax.tree.map(lambda leaf: rescale(leaf, how) if is_measured(leaf) else leaf, tree)
    return clipped, Report(norm, scale_of(how), ~(how.factor < 0))


@_on_arrays
def clip_units(
    tree: Any,
    bound_of: BoundOfUnits,
    axes: Axes,
    ord: Any,  # noqa: A002
    specs: Any = None,
    axis_name: AxisName = None,
) -> tuple[Any, Report]:
    """Bound the norm of each unit along `axes` (of each leaf where they are None) on its own."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    wholes: list[tuple[jax.Array, jax.Array]] = []  # norms and bounds of whole leaves
    reports = []
    for unit in units_of(tree, axes, specs, axis_name):
        norm = norm_of(unit.leaf, unit.reduced, ord, unit.names)
        bound = jnp.broadcast_to(check_fits(bound_of(unit), norm.shape, "the norms"), norm.shape)
        how = shrink_to(norm, bound)
        leaves[unit.position] = rescale(unit.leaf, how)
        if norm.ndim == 0 and not varying(norm):
            wholes.append((norm, bound))
        else:
            reports.append(_report(norm, how))
    if wholes:  # side by side: hundreds of scalars take long to compile one by one
        norms, bounds = (jnp.stack(column) for column in zip(*wholes, strict=True))
        reports.append(_report(norms, shrink_to(norms, bounds, alone=True)))
    return treedef.unflatten(leaves), _summary(reports)


def _report(norm: jax.Array, how: Shrink) -> Report:
    norm, how = lax.stop_gradient((norm, how))
    return Report(jnp.max(norm, initial=0), jnp.min(scale_of(how), initial=1), ~jnp.all(how.factor < 0))


def units_of(tree: Any, axes: Axes, specs: Any = None, axis_name: AxisName = None) -> list[Unit]:
    """Find the units of every leaf that has any."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    resolved = resolve_axes(axes, tree)
    return [
        Unit(i, leaf, reduced, names_of_units(path, leaf, reduced, spec, axis_name))
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


@_on_arrays
def clip_entries(
    tree: Any, low: jax.Array | None, high: jax.Array, axis_name: AxisName = None
) -> tuple[Any, Report]:
    """Bound each entry by itself. `low=None` stands for -high, which saves a pass."""
    floor = -high if low is None else low
    for leaf in jax.tree.leaves(tree):
        if low is not None and is_measured(leaf) and jnp.iscomplexobj(leaf):
            raise TypeError(
                f"a complex leaf, of dtype {leaf.dtype}, has no order to clip between low and high"
            )

    limits = functools.cache(lambda dtype: limits_in(floor, high, dtype))

    def clip(leaf: Any) -> Any:
        if not is_measured(leaf):
            return leaf
        if low is None and jnp.iscomplexobj(leaf):  # an entry is a unit of its own
            return rescale(leaf, shrink_to(norm_of(leaf, (), 2.0), high))
        for limit in (floor, high):
            check_fits(limit, leaf.shape, "a leaf")
        return weakly_typed_as(leaf, jnp.clip(strong(leaf), *limits(leaf.dtype)))

    clipped = jax.tree.map(clip, tree)
    if not any(is_measured(leaf) and leaf.size for leaf in jax.tree.leaves(tree)):
        return clipped, _summary([])
    top, bottom = lax.stop_gradient(_extremes(tree, axis_name, symmetric=low is None))
    before = jnp.maximum(jnp.abs(top), jnp.abs(bottom))
    after = jnp.maximum(*(jnp.max(jnp.abs(jnp.clip(x, floor, high)), initial=0) for x in (top, bottom)))
    scale = jnp.where(before > 0, after / jnp.where(before > 0, before, 1.0), 1.0)
    return clipped, _summary([Report(before, scale, jnp.any((top > high) | (bottom < floor)))])


def _extremes(tree: Any, axis_name: AxisName, *, symmetric: bool) -> tuple[jax.Array, jax.Array]:
    """The largest and the smallest entry; if symmetric those of |x| and -|x|, in one pass."""
    if symmetric:
        top = tree_norm(tree, math.inf, lambda leaf: names_of_leaf(leaf, axis_name))
        return top, -top
    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_measured(leaf) and leaf.size]

    def over_all(find: Any, over_devices: Any) -> jax.Array:
        found = [_extreme(leaf, find, over_devices, names_of_leaf(leaf, axis_name)) for leaf in leaves]
        return find(jnp.stack(found))

    return over_all(jnp.max, pmax), over_all(jnp.min, pmin)


def _extreme(leaf: jax.Array, find: Any, over_devices: Any, names: Names) -> jax.Array:
    """The largest or the smallest entry, on all devices."""
    extreme = wide(find(strong(leaf)))
    return over_devices(extreme, names) if names else extreme


def _summary(reports: list[Report]) -> Report:
    """One report for all leaves and, inside shard_map, for all devices."""
    if not reports:
        return Report(jnp.zeros(()), jnp.ones(()), jnp.zeros((), bool))

    def over_all(values: tuple[jax.Array, ...], over: Any, over_devices: Any) -> jax.Array:
        return over(jnp.stack([over_devices(x, varying(x)) if varying(x) else x for x in values]))

    norms, scales, clipped = zip(*reports, strict=True)
    return Report(
        over_all(norms, jnp.max, pmax), over_all(scales, jnp.min, pmin), over_all(clipped, jnp.any, lax.pmax)
    )
