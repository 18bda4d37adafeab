"""Clip entries to limits, and report on the largest and the smallest entry."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from clipjax._core.axes import is_measured
from clipjax._core.bounds import check_fits_leaves
from clipjax._core.dtypes import strong, weakly_typed_as
from clipjax._core.maxima import max_of
from clipjax._core.mesh import AxisName, Names, largest_of_devices, names_of_leaves
from clipjax._core.norms import largest_of, norm_of, tree_norm
from clipjax._core.paths import leaves_with_paths, the_leaf
from clipjax._core.rescale import rescaled, to_bound
from clipjax._core.rounding import exactly, limits_in, widened
from clipjax._core.trees import Report, on_arrays, summary


@on_arrays
def clip_entries(
    tree: Any, low: jax.Array | None, high: jax.Array, axis_name: AxisName = None
) -> tuple[Any, Report]:
    """Bound each entry separately. `low=None` stands for -high, which saves a pass."""
    check_entries(tree, low, high)
    floor = -high if low is None else low
    limits_of = functools.cache(lambda dtype: limits_in(floor, high, dtype))

    def clip(leaf: Any) -> Any:
        if not is_measured(leaf):
            return leaf
        if jnp.iscomplexobj(leaf):
            return rescaled(leaf, to_bound(norm_of(leaf, (), 2.0), high))  # each entry is a unit
        inside = jnp.clip(widened(strong(leaf)), *map(widened, limits_of(leaf.dtype)))
        return weakly_typed_as(leaf, exactly(inside, leaf.dtype))

    clipped = jax.tree.map(clip, tree)
    if floor.ndim or high.ndim:  # then the extremes do not determine which entries reach a limit
        return clipped, summary([_changes(tree, clipped, axis_name)])
    return clipped, summary(_by_extremes(tree, floor, high, axis_name, symmetric=low is None))


def _by_extremes(
    tree: Any, low: jax.Array, high: jax.Array, axis_name: AxisName, *, symmetric: bool
) -> list[Report]:
    """Report on the largest and the smallest entry; if symmetric, on the largest absolute entry."""
    groups: dict[Names, list[jax.Array]] = {}  # one all-reduce for all leaves spread over the same mesh axes
    for leaf, names in zip(jax.tree.leaves(tree), names_of_leaves(tree, axis_name), strict=True):
        if is_measured(leaf) and leaf.size:
            groups.setdefault(names, []).append(lax.stop_gradient(strong(leaf)))
    if not groups:
        return []
    extremes = [_extremes(leaves, names, symmetric=symmetric) for names, leaves in groups.items()]
    top, minus_bottom = (max_of(jnp.stack(x), at_least=-jnp.inf) for x in zip(*extremes, strict=True))
    bottom = -minus_bottom
    before = jnp.maximum(jnp.abs(top), jnp.abs(bottom))
    after = jnp.maximum(*(jnp.max(jnp.abs(jnp.clip(x, low, high)), initial=0) for x in (top, bottom)))
    return [Report(before, _ratio(after, before), jnp.any((top > high) | (bottom < low)), after)]


def _extremes(leaves: Sequence[jax.Array], names: Names, *, symmetric: bool) -> jax.Array:
    """Return the largest x and the largest -x over all entries; if symmetric, the largest |x| twice."""
    if symmetric:
        both = jnp.broadcast_to(largest_of(leaves), (2,))
    else:
        both = jnp.stack(
            [largest_of(leaves, of=of, at_least=-jnp.inf) for of in (jnp.positive, jnp.negative)]
        )
    return largest_of_devices(both, names) if names else both


def check_entries(tree: Any, low: jax.Array | None, high: jax.Array) -> None:
    """Raise an error if the entries of a leaf cannot be between these limits."""
    check_fits_leaves("bound" if low is None else "high", high, tree)
    if low is not None:
        check_fits_leaves("low", low, tree)
        for path, leaf in leaves_with_paths(tree):
            if jnp.iscomplexobj(leaf):
                raise TypeError(
                    f"low, high: {the_leaf(path)} is complex, of dtype {leaf.dtype}, and has no order; "
                    "one bound, as in clip_by_value(1.0), limits |z|"
                )


def _changes(tree: Any, clipped: Any, axis_name: AxisName) -> Report:
    """Report on the largest absolute entry, and whether any entry has changed."""
    before, after = (lax.stop_gradient(tree_norm(t, math.inf, axis_name)) for t in (tree, clipped))
    moved = jnp.zeros((), bool)
    leaves = (jax.tree.leaves(tree), jax.tree.leaves(clipped), names_of_leaves(tree, axis_name))
    for old, new, names in zip(*leaves, strict=True):
        if is_measured(old):
            some = jnp.any(old != new)
            moved |= lax.pmax(some, names) if names else some
    return Report(before, _ratio(after, before), moved, after)


def _ratio(after: jax.Array, before: jax.Array) -> jax.Array:
    """Return after / before, or 1 where before is 0."""
    return jnp.where(before > 0, after / jnp.where(before > 0, before, 1.0), 1.0)
