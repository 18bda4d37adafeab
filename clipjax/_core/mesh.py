"""Over which mesh axes the entries of one norm are spread, inside `shard_map` and `pmap`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from clipjax._core.axes import Path, Reduced, path_name

Names: TypeAlias = tuple[str, ...]
AxisName: TypeAlias = str | Sequence[str] | None


def varying(leaf: Any) -> Names:
    """The mesh axes that `leaf` varies on, read off its type; none outside `shard_map`."""
    if not isinstance(leaf, jax.core.Tracer):
        return ()
    type_ = jax.typeof(leaf)
    vma = getattr(type_, "vma", None)  # where JAX keeps it has moved between versions
    if vma is None:
        vma = getattr(getattr(type_, "mat", None), "varying", None)
    return tuple(sorted(vma or ()))


def as_names(axis_name: AxisName) -> Names:
    """Write an `axis_name` argument as a tuple."""
    if axis_name is None:
        return ()
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def names_of_leaf(leaf: Any, axis_name: AxisName) -> Names:
    """The mesh axes that a whole leaf is spread over: the named ones, else those of its type."""
    return as_names(axis_name) or varying(leaf)


def names_of_units(
    path: Path, leaf: Any, axes: Reduced, spec: PartitionSpec | None, axis_name: AxisName
) -> Names:
    """The mesh axes that one unit of `leaf` is spread over.

    Raises:
      ValueError: the leaf varies over mesh axes, and neither `specs` nor `axis_name` says which
        of its dimensions they split.
    """
    if axes is None or axis_name is not None:
        return names_of_leaf(leaf, axis_name)
    if spec is not None:
        split = [spec[axis] for axis in axes if axis < len(spec) and spec[axis] is not None]
        names = {name for entry in split for name in as_names(entry)}
        return tuple(sorted(names))
    if varying(leaf):
        raise ValueError(
            f"specs: leaf {path_name(path)!r} of shape {leaf.shape} varies over the mesh axes "
            f"{varying(leaf)}, and its type does not say which dimension they split. Pass specs=, the "
            f"PartitionSpec tree that shard_map got."
        )
    return ()


def spec_leaves(specs: Any, tree: Any) -> list[PartitionSpec | None]:
    """One spec for each leaf of `tree`, from a tree of specs or a prefix of one."""
    leaves = jax.tree.leaves(tree)
    if specs is None:
        return [None] * len(leaves)

    def is_spec(x: Any) -> bool:
        return x is None or isinstance(x, PartitionSpec)

    spread = jax.tree.map(
        lambda spec, part: jax.tree.map(lambda _: PartitionSpec() if spec is None else spec, part),
        specs,
        tree,
        is_leaf=is_spec,
    )
    return jax.tree.leaves(spread, is_leaf=is_spec)


def pmax(x: jax.Array, names: Names) -> jax.Array:
    """The largest value on all devices; infinite if one is NaN, which `lax.pmax` may lose."""
    return lax.pmax(jnp.where(jnp.isnan(x), jnp.inf, x), names)


def pmin(x: jax.Array, names: Names) -> jax.Array:
    """The smallest value on all devices; NaN if one is."""
    least = lax.pmin(jnp.where(jnp.isnan(x), -jnp.inf, x), names)
    return jnp.where(least == -jnp.inf, jnp.nan, least)
