"""Which entries of a leaf share one norm: forms of `axes` and `where`, and paths and their patterns."""

from __future__ import annotations

import fnmatch
import functools
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax


class Skip:
    """The type of :data:`SKIP`, which is its one value."""

    def __repr__(self) -> str:
        return "clipjax.SKIP"


class FanIn:
    """The type of :data:`FAN_IN`, which is its one value."""

    def __repr__(self) -> str:
        return "fan_in"


SKIP: Final = Skip()
"""What an axes rule returns for a leaf that is to be left alone."""

FAN_IN: Final = FanIn()
"""`fan_in` as a default: Optax' `inject_hyperparams` takes a default that can be called for a schedule."""

Path: TypeAlias = tuple[Any, ...]
Reduced: TypeAlias = tuple[int, ...] | None
Rule: TypeAlias = Callable[[Path, Any], "int | Sequence[int] | Skip | None"]
_Simple: TypeAlias = int | Sequence[int] | Rule | Skip | None
Axes: TypeAlias = _Simple | FanIn | Mapping[str, _Simple]
Where: TypeAlias = str | Sequence[str] | Callable[[Path, Any], bool] | None


def fan_in(path: Path, leaf: Any) -> tuple[int, ...] | Skip:
    """Reduce over the incoming weights of each unit: every axis but the last.

    Right for the kernels of Dense `(in, out)` and Conv `(*window, in, out)` layers. Leaves of rank 0 and
    1 (biases, scales) are left alone. Attention kernels, embeddings and stacked layers need axes of their
    own, by path.

    Args:
      path: the leaf's key path, which this rule does not look at.
      leaf: anything with a `shape`.

    Returns:
      The reduced axes, or :data:`SKIP`.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> clipjax.fan_in((), jnp.ones((3, 3, 16, 32)))
      (0, 1, 2)
      >>> clipjax.fan_in((), jnp.ones(32))
      clipjax.SKIP
    """
    del path
    rank = len(leaf.shape)
    return tuple(range(rank - 1)) if rank >= 2 else SKIP


def is_measured(leaf: Any) -> bool:
    """Whether a leaf counts towards norms: float and complex ones do; the others pass through."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def check_axes(axes: Axes) -> Axes:
    """Return `axes`, or raise what is wrong with them whatever the tree."""
    if isinstance(axes, Mapping):
        for pattern, value in axes.items():
            if not isinstance(pattern, str):
                raise TypeError(f"axes: a path pattern must be a string, got {pattern!r}")
            if isinstance(value, Mapping):
                raise TypeError(f"axes: pattern {pattern!r} must map to axes, got the mapping {value!r}")
            check_axes(value)
    elif axes is FAN_IN:
        return fan_in
    elif not (axes is None or axes is SKIP or callable(axes)):
        _as_tuple(axes)
    return axes


def resolve_axes(axes: Axes, tree: Any) -> list[Reduced | Skip]:
    """Resolve `axes` for every leaf of `tree`, in the order of its leaves.

    Returns, for each leaf, the reduced axes as a sorted tuple of non-negative ints, `None` for
    the whole leaf, or :data:`SKIP`. Leaves that are neither float nor complex are skipped.

    Raises:
      ValueError: an axis is out of range or repeated, or a path pattern matches no leaf.
    """
    leaves = leaves_with_paths(tree)
    each: list[Any] = [axes] * len(leaves)
    if isinstance(axes, Mapping):
        each = [SKIP if p is None else axes[p] for p in first_matches("axes", list(axes), tree)]
    return [_resolve(of_leaf, *leaf) for of_leaf, leaf in zip(each, leaves, strict=True)]


def _resolve(axes: Any, path: Path, leaf: Any) -> Reduced | Skip:
    if not is_measured(leaf):
        return SKIP
    if callable(axes):
        axes = axes(path, leaf)
    if axes is None or axes is SKIP:
        return axes
    shape = jnp.shape(leaf)
    where = f"for leaf {path_name(path)!r} of shape {shape}"
    reduced = []
    for axis in _as_tuple(axes):
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"axes: {axis} is out of range {where}")
        reduced.append(axis % len(shape))
    if len(set(reduced)) != len(reduced):
        raise ValueError(f"axes: {tuple(reduced)} names an axis twice {where}")
    return tuple(sorted(reduced))


def _as_tuple(axes: Any) -> tuple[int, ...]:
    each = axes if isinstance(axes, Sequence) else (axes,)
    if any(isinstance(axis, bool | str) for axis in each):
        raise TypeError(f"axes must be ints, a rule, a mapping or None, got {axes!r}")
    try:
        return tuple(operator.index(axis) for axis in each)
    except TypeError as error:
        raise TypeError(
            f"axes must be ints that are known when tracing, a rule, a mapping or None, got {axes!r}"
        ) from error


def check_where(where: Where) -> Where:
    """Return `where` with a lone pattern as a tuple, or raise what is wrong with it whatever the tree."""
    if where is None or callable(where):
        return where
    patterns = (where,) if isinstance(where, str) else where
    if not isinstance(patterns, Sequence) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(f"where must be path patterns, a rule (path, leaf) -> bool or None, got {where!r}")
    if not patterns:
        raise ValueError(f"where must name at least one path pattern, got {where!r}")
    return tuple(patterns)


def resolve_where(where: Where, tree: Any) -> list[bool]:
    """Whether each leaf of `tree` is chosen, in the order of its leaves; only float and complex ones are.

    Raises:
      TypeError: a rule returns no bool.
      ValueError: a path pattern matches no leaf.
    """
    leaves = leaves_with_paths(tree)
    if where is None:
        chosen = [True] * len(leaves)
    elif callable(where):
        chosen = [where(path, leaf) for path, leaf in leaves]
        for yes, (path, _) in zip(chosen, leaves, strict=True):
            if not isinstance(yes, bool | np.bool_):
                raise TypeError(f"where: a rule must return a bool, got {yes!r} for leaf {path_name(path)!r}")
    else:
        chosen = [pattern is not None for pattern in first_matches("where", where, tree)]
    return [bool(yes) and is_measured(leaf) for yes, (_, leaf) in zip(chosen, leaves, strict=True)]


# --------------------------------------------------------------------------------------------------
# Paths.


def path_name(path: Path) -> str:
    """Write a key path as `"encoder/Dense_0/kernel"`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_with_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[Path, Any]]:
    """The leaves of `tree` and their paths, the same with and without Flax' boxes around them.

    To JAX an `nnx.Variable` or an `nn.Partitioned` is a node with its leaf at `value`: that key is left out.
    """
    boxes = _boxes()

    def is_end(node: Any) -> bool:
        return isinstance(node, boxes) or (is_leaf is not None and is_leaf(node))

    found: list[tuple[Path, Any]] = []
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_end):
        if isinstance(node, boxes):
            inside = jax.tree_util.tree_leaves_with_path(node, is_leaf=is_leaf)
            found += [((*path, *keys[1:]), leaf) for keys, leaf in inside]
        else:
            found.append((path, node))
    return found


def _boxes() -> tuple[type, ...]:
    """The types of Flax' boxes; none where Flax is not loaded."""
    names = (("flax.nnx", "Variable"), ("flax.nnx", "VariableState"), ("flax.core.meta", "AxisMetadata"))
    loaded = ((vars(sys.modules[module]), name) for module, name in names if module in sys.modules)
    return tuple(members[name] for members, name in loaded if name in members)


def first_matches(argument: str, patterns: Sequence[str], tree: Any) -> list[str | None]:
    """The first of `patterns` that matches the path of each leaf of `tree`, or None.

    Raises:
      ValueError: a pattern matches no leaf, and nothing that `optax.masked`, `optax.partition` or a None
        keeps out of the tree.
    """
    names = [path_name(path) for path, _ in leaves_with_paths(tree)]
    found = [[p for p in patterns if _matches(p, name)] for name in names]
    unmatched = [p for p in patterns if not any(p in matching for matching in found)]
    absent = leaves_with_paths(tree, _is_absent) if unmatched else []
    left_out = [path_name(path) for path, node in absent if _is_absent(node)]
    for pattern in unmatched:
        if not any(_may_reach(pattern, name) for name in left_out):
            listed = "\n  ".join(names) or "(none)"
            raise ValueError(
                f"{argument}: the pattern {pattern!r} matches no leaf. The paths are:\n  {listed}"
            )
    return [matching[0] if matching else None for matching in found]


def _is_absent(node: Any) -> bool:
    return node is None or isinstance(node, optax.MaskedNode)


def _may_reach(pattern: str, name: str) -> bool:
    """Whether a pattern matches a path, or what may have been below it."""
    parts = pattern.split("/")
    return not name or any(_matches("/".join(parts[: i + 1]), name) for i in range(len(parts)))


def _matches(pattern: str, name: str) -> bool:
    """Whether a glob matches a whole path, or the last components of it."""
    return _compiled(pattern).match(name) is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(f"(?s:.*/)?{fnmatch.translate(pattern)}")
