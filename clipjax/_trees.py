"""Bounding whole trees: what the functions on trees, the transformations and the projections share.

Each function returns the bounded tree and a :class:`Report` of what it did.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from clipjax._axes import Axes, Reduced, Skip, is_measured, resolve_axes
from clipjax._mesh import AxisName, Names, names_of_leaf, names_of_units, pmax, pmin, spec_leaves, varying
from clipjax._norms import as_arrays, in_float64, norm_of, strong, tree_norm, wide
from clipjax._rescale import Shrink, limits_in, rescale, scale_of, shrink_to, weakly_typed_as


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


def clip_tree(
    tree: Any,
    bound: jax.Array,
    ord: Any,  # noqa: A002
    axis_name: AxisName = None,
    norm: jax.Array | None = None,
) -> tuple[Any, Report]:
    """Bound the norm of all leaves together; every leaf gets the same factor."""
    return _clip_tree(as_arrays(tree), bound, ord, axis_name, norm)


@in_float64
def _clip_tree(
    tree: Any,
    bound: jax.Array,
    ord: Any,  # noqa: A002
    axis_name: AxisName,
    norm: jax.Array | None,
) -> tuple[Any, Report]:
    if norm is None:
        norm = tree_norm(tree, ord, lambda leaf: names_of_leaf(leaf, axis_name))
    how = shrink_to(norm, bound)
    clipped = jax.tree.map(lambda leaf: rescale(leaf, how) if is_measured(leaf) else leaf, tree)
    return clipped, Report(norm, scale_of(how), ~(how.factor < 0))


def clip_units(
    tree: Any,
    bound_of: BoundOfUnits,
    axes: Axes,
    ord: Any,  # noqa: A002
    specs: Any = None,
    axis_name: AxisName = None,
) -> tuple[Any, Report]:
    """Bound the norm of each unit along `axes` (of each leaf where they are None) on its own."""
    return _clip_units(as_arrays(tree), bound_of, axes, ord, specs, axis_name)


@in_float64
def _clip_units(
    tree: Any,
    bound_of: BoundOfUnits,
    axes: Axes,
    ord: Any,  # noqa: A002
    specs: Any,
    axis_name: AxisName,
) -> tuple[Any, Report]:
    units = units_of(tree, axes, specs, axis_name)
    norms = [norm_of(unit.leaf, unit.reduced, ord, unit.names) for unit in units]
    bounds = [jnp.broadcast_to(bound_of(unit), n.shape) for unit, n in zip(units, norms, strict=True)]
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    reports = []
    for members in _alike(norms):
        # What hundreds of scalars cost is to compile and to launch each alone.
        norm, bound = (_side_by_side([of[i] for i in members]) for of in (norms, bounds))
        how = shrink_to(norm, bound, alone=len(members) > 1)
        for place, i in enumerate(members):
            own = Shrink(how.power[place], how.factor[place]) if len(members) > 1 else how
            leaves[units[i].position] = rescale(units[i].leaf, own)
        norm, how = lax.stop_gradient((norm, how))
        reports.append(
            (jnp.max(norm, initial=0), jnp.min(scale_of(how), initial=1), ~jnp.all(how.factor < 0))
        )
    return treedef.unflatten(leaves), _summary(reports)


def _alike(values: list[jax.Array]) -> list[list[int]]:
    """Which values can be treated side by side: scalars that vary over the same mesh axes."""
    groups: dict[Any, list[int]] = {}
    for i, value in enumerate(values):
        groups.setdefault(varying(value) if value.ndim == 0 else i, []).append(i)
    return list(groups.values())


def _side_by_side(values: list[jax.Array]) -> jax.Array:
    return jnp.stack(values) if len(values) > 1 else values[0]


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


def clip_entries(
    tree: Any, low: jax.Array | None, high: jax.Array, axis_name: AxisName = None
) -> tuple[Any, Report]:
    """Bound each entry by itself. `low=None` stands for -high, which saves a pass."""
    return _clip_entries(as_arrays(tree), low, high, axis_name)


@in_float64
def _clip_entries(
    tree: Any, low: jax.Array | None, high: jax.Array, axis_name: AxisName
) -> tuple[Any, Report]:
    floor = -high if low is None else low
    for leaf in jax.tree.leaves(tree):
        if low is not None and is_measured(leaf) and jnp.iscomplexobj(leaf):
            raise TypeError(
                f"a complex leaf, of dtype {leaf.dtype}, has no order to clip between low and high"
            )

    def clip(leaf: Any) -> Any:
        if not is_measured(leaf):
            return leaf
        if low is None and jnp.iscomplexobj(leaf):  # an entry is a unit of its own
            return rescale(leaf, shrink_to(norm_of(leaf, (), 2.0), high))
        return weakly_typed_as(leaf, jnp.clip(strong(leaf), *limits_in(floor, high, leaf.dtype)))

    tops, bottoms = [], []
    for leaf in filter(is_measured, jax.tree.leaves(tree)):
        names = names_of_leaf(leaf, axis_name)
        top = norm_of(leaf, None, math.inf, names) if low is None else _extreme(leaf, jnp.max, pmax, names)
        tops.append(top)
        bottoms.append(-top if low is None else _extreme(leaf, jnp.min, pmin, names))
    reports = []
    for members in _alike(tops):
        top, bottom = (
            f(lax.stop_gradient(_side_by_side([of[i] for i in members])))
            for f, of in ((jnp.max, tops), (jnp.min, bottoms))
        )
        before = jnp.maximum(top, -bottom)
        after = jnp.maximum(*(jnp.max(jnp.abs(jnp.clip(x, floor, high)), initial=0) for x in (top, bottom)))
        scale = jnp.where(before > 0, after / jnp.where(before > 0, before, 1.0), 1.0)
        reports.append((before, scale, jnp.any((top > high) | (bottom < floor))))
    return jax.tree.map(clip, tree), _summary(reports)


def _extreme(leaf: jax.Array, find: Any, over_devices: Any, names: Names) -> jax.Array:
    """The largest or the smallest entry, or 0 if that is beyond it."""
    extreme = wide(find(strong(leaf), initial=0))
    return over_devices(extreme, names) if names else extreme


def _summary(reports: list[tuple[jax.Array, jax.Array, jax.Array]]) -> Report:
    """One report for all leaves and, inside shard_map, for all devices."""
    if not reports:
        return Report(jnp.zeros(()), jnp.ones(()), jnp.zeros((), bool))

    def over_all(values: tuple[jax.Array, ...], over: Any, over_devices: Any) -> jax.Array:
        everywhere = [over_devices(x, varying(x)) if varying(x) else x for x in values]
        return over(_side_by_side(everywhere))

    norms, scales, clipped = zip(*reports, strict=True)
    return Report(
        over_all(norms, jnp.max, pmax),
        over_all(scales, jnp.min, pmin),
        over_all(clipped, jnp.any, lax.pmax),
    )
