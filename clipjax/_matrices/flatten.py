"""The leaves that are matrices or stacks of matrices, and how kernels of higher rank are flattened."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from clipjax._core.arguments import check_by_pattern
from clipjax._core.axes import SKIP, Skip, check_some, is_measured, unclear
from clipjax._core.mesh import names_of_units, spec_leaves
from clipjax._core.paths import Path, described, for_each_leaf, leaves_with_paths, path_name

Sides: TypeAlias = tuple[int | Sequence[int], int | Sequence[int]]
FlattenRule: TypeAlias = Callable[[Path, Any], Sides | Skip | None]
Flatten: TypeAlias = Sides | FlattenRule | Mapping[str, Sides | FlattenRule | Skip | None] | Skip | None
Resolved: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]] | Skip


class Matrices(NamedTuple):
    """A leaf that is a stack of matrices: its place in the tree, and the roles of its axes."""

    position: int
    path: str
    leaf: Any
    order: tuple[int, ...]  # the axes of the stack, then those of rows, then those of columns
    batch: tuple[int, ...]  # the shape of the stack: () for one matrix
    shape: tuple[int, int]  # of each matrix

    def stacked(self, leaf: jax.Array) -> jax.Array:
        """Return the leaf, or an array of the same shape, as an array `(*batch, rows, columns)`."""
        return jnp.transpose(leaf, self.order).reshape(*self.batch, *self.shape)

    def restored(self, matrices: jax.Array) -> jax.Array:
        """Undo :meth:`stacked`."""
        permuted = matrices.reshape([self.leaf.shape[axis] for axis in self.order])
        return jnp.transpose(permuted, [self.order.index(axis) for axis in range(len(self.order))])


def check_flatten(flatten: Flatten) -> Flatten:
    """Return `flatten`, or raise an error if it is invalid for any tree."""

    def check(_: str, way: Any) -> None:
        if not (way is None or way is SKIP or callable(way)):
            _sides(way)

    check_by_pattern("flatten", flatten, "axes", check)
    return flatten


def matrices_of(name: str, tree: Any, sides: Sequence[Resolved], specs: Any) -> list[Matrices]:
    """Find the matrices of every leaf that has any, from the sides that :func:`sides_of` returns.

    Raises:
      ValueError: a matrix is split over devices, or has an unknown size; `name` is the transformation's name.
    """
    found = []
    each = zip(leaves_with_paths(tree), sides, spec_leaves(specs, tree), strict=True)
    for i, ((path, leaf), both, spec) in enumerate(each):
        if isinstance(both, Skip) or not leaf.size:
            continue
        rows, columns = both
        if names := names_of_units(path, leaf, rows + columns, spec, None)[0]:
            raise ValueError(
                f"{name}: the matrices of leaf {path_name(path)!r} are split over the mesh axes {names}: "
                f"bound them outside shard_map, or gather them first"
            )
        if not all(isinstance(leaf.shape[axis], int) for axis in rows + columns):
            raise ValueError(
                f"{name}: leaf {path_name(path)!r} of shape {tuple(leaf.shape)} has matrices of "
                f"unknown size: jax.export may leave open how many matrices there are, but not their sides"
            )
        stack = tuple(axis for axis in range(len(leaf.shape)) if axis not in rows + columns)
        batch = tuple(leaf.shape[axis] for axis in stack)
        shape = tuple(math.prod(leaf.shape[axis] for axis in side) for side in (rows, columns))
        found.append(Matrices(i, path_name(path), leaf, stack + rows + columns, batch, shape))
    return found


def sides_of(tree: Any, flatten: Flatten) -> list[Resolved]:
    """Return the axes of rows and of columns of every leaf, in leaf order.

    Raises:
      ValueError: it is not known how to flatten a leaf of rank > 2; an axis is out of range or named twice;
        a path pattern matches no leaf; no leaf is bounded.
    """
    leaves = leaves_with_paths(tree)
    if isinstance(flatten, Mapping):
        how = for_each_leaf("flatten", flatten, tree, None)
    else:
        # One pair for all leaves applies only to ranks above 2: a Dense kernel is already a matrix.
        for_all = callable(flatten) or flatten is SKIP
        how = [flatten if for_all or len(leaf.shape) > 2 else None for _, leaf in leaves]
    sides = [_resolve(way, *leaf) for way, leaf in zip(how, leaves, strict=True)]
    check_some("flatten", leaves, sides, "Name what is to be bounded, as in flatten={path: (rows, columns)}.")
    return sides


def _resolve(way: Any, path: Path, leaf: Any) -> Resolved:
    """Return the axes of rows and of columns, or a :class:`Skip`."""
    if not is_measured(leaf):
        return SKIP
    rank = len(leaf.shape)
    way = way(path, leaf) if callable(way) else way
    if way is None and rank <= 2:
        return ((0,), (1,)) if rank == 2 else Skip("it is not a matrix")
    if isinstance(way, Skip):
        return way
    if way is None:
        raise unclear(
            "flatten",
            path,
            leaf,
            f"Pass flatten={{{path_name(path)!r}: (rows, columns)}} with the axes of its rows and "
            "columns, such as ((0, 1, 2), 3) for a convolution (*window, in, out); other axes stack "
            "matrices, as for stacked layers. clipjax.SKIP instead of the pair leaves the leaf alone",
        )
    where = f"leaf {described(path, leaf)}"
    rows, columns = _sides(way)
    for axis in rows + columns:
        if not -rank <= axis < rank:
            raise ValueError(f"flatten: {axis} is out of range for {where}")
    rows, columns = (tuple(axis % rank for axis in side) for side in (rows, columns))
    if len({*rows, *columns}) != len(rows + columns):
        raise ValueError(f"flatten: {way!r} names an axis twice for {where}")
    return rows, columns


def _sides(flatten: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if isinstance(flatten, Sequence) and not isinstance(flatten, str) and len(flatten) == 2:
        rows, columns = (tuple(side) if isinstance(side, Sequence) else (side,) for side in flatten)
        if all(isinstance(axis, int) and not isinstance(axis, bool) for axis in rows + columns):
            return rows, columns
    raise TypeError(
        f"flatten must be a pair (axes of rows, axes of columns), a rule, a mapping or None, got {flatten!r}"
    )
