"""Norms of whole trees and of units, compared with bounds: what every clip and projection of norms calls.

A unit is the entries of a leaf that share a norm, those along the axes that are reduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from clipjax._core.axes import Skip, axes_of_leaves
from clipjax._core.bounds import broadcastable
from clipjax._core.norms import is_float, largest, mesh_axes, nan_unless, norm, tree_norm, warn_if_local
from clipjax._core.paths import Leaf, leaves_of
from clipjax._core.rescale import factor_to, rescale

Metrics = dict[str, jax.Array]


class Units(NamedTuple):
    """A leaf whose entries are rescaled in units."""

    place: int  # among the leaves of the tree
    leaf: Leaf
    axes: tuple[int, ...] | None  # those that are reduced; None: the whole leaf


def floats_of(tree: Any) -> list[jax.Array]:
    """Return the leaves that have a norm."""
    return [leaf.value for leaf in leaves_of(tree)[0] if is_float(leaf.value)]


def norm_dtype(tree: Any) -> Any:
    """Return the dtype of the norm of all leaves together."""
    return jax.eval_shape(lambda tree: tree_norm(floats_of(tree)), tree).dtype


def entries_per_unit(units: Units) -> int:
    """Return how many entries share a norm, on all devices."""
    shape = units.leaf.value.shape
    local = math.prod(shape if units.axes is None else [shape[axis] for axis in units.axes])
    return local * math.prod(lax.axis_size(name) for name in mesh_axes(units.leaf.value))


def units_of(tree: Any, axes: Any) -> list[Units]:
    """Return the leaves of a tree that have units, as checked `axes` say.

    Raises:
      ValueError: as `axes_of_leaves`; inside `shard_map`, a leaf may be split along the axes that are reduced.
    """
    warn_if_local()
    found = []
    for i, (leaf, reduced) in enumerate(zip(leaves_of(tree)[0], axes_of_leaves(axes, tree), strict=True)):
        if isinstance(reduced, Skip):
            continue
        if reduced is not None and mesh_axes(leaf.value):
            raise ValueError(
                f"axes: inside shard_map, {leaf} differs over {mesh_axes(leaf.value)}, and its type does not say "
                "which of its axes are split. Clip and project norms of units outside shard_map, under jit"
            )
        found.append(Units(i, leaf, reduced))
    return found


def rescale_units(
    tree: Any,
    axes: Any,
    factor_of: Callable[[Units, jax.Array], jax.Array],
    ord: float = 2,
) -> tuple[Any, list[jax.Array]]:
    """Multiply each unit by `factor_of(units, norms)`; return the tree and the factors."""
    leaves, rebuild = leaves_of(tree)
    values, factors = [leaf.value for leaf in leaves], []
    for units in units_of(tree, axes):
        factors.append(factor_of(units, norm(units.leaf.value, units.axes, ord)))
        values[units.place] = rescale(units.leaf.value, factors[-1])
    return rebuild(values), factors


def clip_units(
    tree: Any,
    axes: Any,
    bound: Any,
    ord: float = 2,
    *,
    name: str = "max_norm",
    size_of: Callable[[Units], Any] = lambda units: 1,
) -> tuple[Any, Metrics]:
    """Clip the norm of each unit, divided by `size_of` the unit, to a bound.

    Where the bound is one number, the largest norm decides the metrics, so that they cost one reduction a leaf.
    """
    relative = []

    def factor_of(units: Units, norms: jax.Array) -> jax.Array:
        relative.append(norms / size_of(units))
        return factor_to(broadcastable(name, bound, norms, units.leaf), relative[-1], units.leaf.value.dtype)

    clipped, factors = rescale_units(tree, axes, factor_of, ord)
    norm = largest(relative)
    if jnp.ndim(bound) == 0:
        return clipped, metrics_of(norm, factor_to(bound, norm))
    after = largest(n * factor for n, factor in zip(relative, factors, strict=True))
    return clipped, metrics_of(norm, smallest(factors), after)


def clip_tree(
    tree: Any,
    bound: Any,
    ord: float = 2,
    norm: jax.Array | None = None,
) -> tuple[Any, Metrics]:
    """Clip the norm of all leaves together: every leaf is multiplied by the same factor."""
    leaves, rebuild = leaves_of(tree)
    values = [leaf.value for leaf in leaves]
    floats = [x for x in values if is_float(x)]
    norm = tree_norm(floats, ord) if norm is None else norm

    factors = {dtype: factor_to(bound, norm, dtype) for dtype in dict.fromkeys(x.dtype for x in floats)}
    clipped = [rescale(x, factors[x.dtype]) if is_float(x) else x for x in values]
    return rebuild(clipped), metrics_of(norm, factor_to(bound, norm))


def metrics_of(norm: jax.Array, scale: jax.Array, after: jax.Array | None = None) -> Metrics:
    """Return the metrics of a clip from the norm before and the factor; after it, if that is not their product."""
    after = norm * scale if after is None else nan_unless(norm < jnp.inf, after)
    return {"norm": norm, "norm_after": after, "scale": scale, "clipped": scale < 1}


def smallest(factors: list[jax.Array]) -> jax.Array:
    """Return the smallest of factors from 0 to 1; NaN if one is NaN."""
    least = -largest([-factor for factor in factors], least=-1)
    return nan_unless(least > -jnp.inf, least)
