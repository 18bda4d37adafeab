"""Bounding entries: clips to limits, and the report of them from the largest and the smallest entry."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from clipjax._core.axes import is_measured
from clipjax._core.bounds import check_fits
from clipjax._core.mesh import AxisName, Names, names_of_leaf, pmax
from clipjax._core.norms import largest, norm_of, strong, tree_norm, weakly_typed_as
from clipjax._core.reductions import max_of
from clipjax._core.rescale import rescale, shrink_to
from clipjax._core.rounding import exactly, limits_in, widened
from clipjax._core.trees import Report, on_arrays, summary
from clipjax._core.turns import Turn, in_turn, is_large, turn_after


@on_arrays
def clip_entries(
    tree: Any,
    low: jax.Array | None,
    high: jax.Array,
    axis_name: AxisName = None,
    *,
    after_measuring: bool = False,
) -> tuple[Any, Report]:
    """Bound each entry by itself. `low=None` stands for -high, which saves a pass.

    A leaf is clipped `after_measuring` it if the report is needed in any case: it is in the cache then.
    """
    floor = -high if low is None else low
    limits_of = functools.cache(lambda dtype: limits_in(floor, high, dtype))
    by_extremes = not (floor.ndim or high.ndim)  # else they do not tell which entry meets which limit
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    extremes: dict[Names, list[Extremes]] = {}
    together: dict[Names, list[jax.Array]] = {}  # leaves to be measured at once
    turn: Turn = None
    for i, leaf in enumerate(leaves):
        if not is_measured(leaf):
            continue
        names, measured = names_of_leaf(leaf, axis_name), lax.stop_gradient(strong(leaf))
        if jnp.iscomplexobj(leaf):
            leaves[i] = _clip_sizes(leaf, low, high)
        if is_large(leaf) and by_extremes:
            found = _extremes([measured], turn, symmetric=low is None)
            extremes.setdefault(names, []).append(found)
            turn = turn_after(turn, leaf, -jnp.abs(found.top)) if after_measuring else None
        elif leaf.size:
            together.setdefault(names, []).append(measured)
        if not jnp.iscomplexobj(leaf):
            limits = [
                check_fits(in_turn(limit, leaf, turn), leaf.shape, "a leaf")
                for limit in limits_of(leaf.dtype)
            ]
            inside = jnp.clip(widened(strong(leaf)), *map(widened, limits))
            leaves[i] = weakly_typed_as(leaf, exactly(inside, leaf.dtype))
    clipped = treedef.unflatten(leaves)
    if not by_extremes:
        return clipped, summary([_changes(tree, clipped, axis_name)])
    for names, group in together.items():
        extremes.setdefault(names, []).append(_extremes(group, None, symmetric=low is None))
    if not extremes:
        return clipped, summary([])
    tops, lows = zip(*(_over_devices(found, names) for names, found in extremes.items()), strict=True)
    top, minus_bottom = (max_of(jnp.stack(x), initial=-jnp.inf) for x in (tops, lows))
    bottom = -minus_bottom
    before = jnp.maximum(jnp.abs(top), jnp.abs(bottom))
    after = jnp.maximum(*(jnp.max(jnp.abs(jnp.clip(x, floor, high)), initial=0) for x in (top, bottom)))
    report = Report(before, _ratio(after, before), jnp.any((top > high) | (bottom < floor)))
    return clipped, summary([report])


def check_ordered(leaf: Any) -> Any:
    """Return a leaf whose entries can be between two limits, else raise an error that says why."""
    if jnp.iscomplexobj(leaf):
        raise TypeError(f"a complex leaf, of dtype {leaf.dtype}, has no order to clip between low and high")
    return leaf


def _clip_sizes(leaf: jax.Array, low: jax.Array | None, high: jax.Array) -> jax.Array:
    """Clip complex entries, each a unit of its own."""
    if low is not None:
        check_ordered(leaf)
    return rescale(leaf, shrink_to(norm_of(leaf, (), 2.0), high))


class Extremes(NamedTuple):
    """The largest entry and the largest negative; of absolute values where limits are symmetric."""

    top: jax.Array
    minus_bottom: jax.Array


def _extremes(leaves: Sequence[jax.Array], turn: Turn, *, symmetric: bool) -> Extremes:
    """The extremes on this device; if symmetric, in one pass."""
    if symmetric:
        top = largest(leaves, None, turn)
        return Extremes(top, top)
    top, minus_bottom = (largest(leaves, of=of, at_least=-jnp.inf) for of in (jnp.positive, jnp.negative))
    return Extremes(top, minus_bottom)


def _over_devices(found: list[Extremes], names: Names) -> Extremes:
    """The extremes of leaves that are spread alike: one all-reduce for all of them."""
    both = jnp.stack([max_of(jnp.stack(column), initial=-jnp.inf) for column in zip(*found, strict=True)])
    return Extremes(*(pmax(both, names) if names else both))


def _changes(tree: Any, clipped: Any, axis_name: AxisName) -> Report:
    """What became of the largest absolute entry, and whether any entry has changed."""
    before, after = (
        lax.stop_gradient(tree_norm(t, math.inf, lambda leaf: names_of_leaf(leaf, axis_name)))
        for t in (tree, clipped)
    )
    moved = jnp.zeros((), bool)
    for old, new in zip(jax.tree.leaves(tree), jax.tree.leaves(clipped), strict=True):
        if is_measured(old):
            some, names = jnp.any(old != new), names_of_leaf(old, axis_name)
            moved |= lax.pmax(some, names) if names else some
    return Report(before, _ratio(after, before), moved)


def _ratio(after: jax.Array, before: jax.Array) -> jax.Array:
    """The scale by which something became smaller: 1 for what was 0."""
    return jnp.where(before > 0, after / jnp.where(before > 0, before, 1.0), 1.0)
