"""Which entries of a leaf share one norm."""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp


class Skip:
    """The type of :data:`SKIP`, which is its one value."""

    def __repr__(self) -> str:
        return "clipjax.SKIP"


SKIP: Final = Skip()
"""What an axes rule returns for a leaf that is to be left alone."""


class FanIn:
    """The type of :data:`FAN_IN`, which is its one value."""

    def __repr__(self) -> str:
        return "fan_in"


FAN_IN: Final = FanIn()
"""`fan_in` as a default: Optax' `inject_hyperparams` takes a default that can be called for a schedule."""

Path: TypeAlias = tuple[Any, ...]
Reduced: TypeAlias = tuple[int, ...] | None
Rule: TypeAlias = Callable[[Path, Any], "int | Sequence[int] | Skip | None"]
Axes: TypeAlias = (
    int
    | Sequence[int]
    | Rule
    | Mapping[str, "int | Sequence[int] | Rule | Skip | None"]
    | Skip
    | FanIn
    | None
)


def fan_in(path: Path, leaf: Any) -> tuple[int, ...] | Skip:
    """Reduce over the incoming weights of each unit: every axis but the last.

    Right for the kernels of Dense `(in, out)` and Conv `(*window, in, out)` layers. Leaves of
    rank 0 and 1 (biases, scales) are left alone. Nothing more is guessed from the rank: give
    attention kernels, embeddings and stacked layers their own axes, by path.

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


def path_name(path: Path) -> str:
    """Write a key path as `"encoder/Dense_0/kernel"`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def check_axes(axes: Axes) -> Axes:
    """Return `axes`, or raise what is wrong with them that no tree is needed to see."""
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
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    if not isinstance(axes, Mapping):
        return [_resolve(axes, path, leaf) for path, leaf in leaves]
    names = [path_name(path) for path, _ in leaves]
    for pattern in axes:
        if not any(_matches(pattern, name) for name in names):
            listed = "\n  ".join(names) or "(none)"
            raise ValueError(f"axes: the pattern {pattern!r} matches no leaf. The paths are:\n  {listed}")
    chosen = [next((axes[p] for p in axes if _matches(p, name)), SKIP) for name in names]
    return [_resolve(a, path, leaf) for a, (path, leaf) in zip(chosen, leaves, strict=True)]


def _matches(pattern: str, name: str) -> bool:
    """Whether a glob matches a whole path, or the last components of it."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*/{pattern}")


def _resolve(axes: Any, path: Path, leaf: Any) -> Reduced | Skip:
    if not is_measured(leaf):
        return SKIP
    if callable(axes):
        axes = axes(path, leaf)
    if axes is None or axes is SKIP:
        return axes
    rank = len(jnp.shape(leaf))
    where = f"for leaf {path_name(path)!r} of shape {jnp.shape(leaf)}"
    reduced = []
    for axis in _as_tuple(axes):
        if not -rank <= axis < rank:
            raise ValueError(f"axes: {axis} is out of range {where}")
        reduced.append(axis % rank)
    if len(set(reduced)) != len(reduced):
        raise ValueError(f"axes: {tuple(reduced)} names an axis twice {where}")
    return tuple(sorted(reduced))


def _as_tuple(axes: Any) -> tuple[int, ...]:
    each = axes if isinstance(axes, Sequence) else (axes,)
    if any(isinstance(axis, bool | str) for axis in each):
        raise TypeError(f"axes must be ints, a rule, a mapping or None, got {axes!r}")
    try:
        return tuple(operator.index(axis) for axis in each)
    except Exception as error:  # a traced int raises its own kind
        raise TypeError(
            f"axes must be ints that are known when tracing, a rule, a mapping or None, got {axes!r}"
        ) from error
