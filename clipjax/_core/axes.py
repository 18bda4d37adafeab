"""Which entries of a leaf share one norm: the forms of `axes`."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp

from clipjax._core.arguments import check_by_pattern
from clipjax._core.paths import Path as Path
from clipjax._core.paths import a_few, check_rule, described, for_each_leaf, the_leaf
from clipjax._core.paths import leaves_with_paths as leaves_with_paths
from clipjax._core.paths import path_name as path_name


class Skip:
    """The axes of a leaf that is left alone; `why` is the reason, if the user did not ask for it."""

    def __init__(self, why: str = "") -> None:
        self.why = why

    def __repr__(self) -> str:
        return "clipjax.SKIP"


class Default:
    """A rule as a default, not callable: `optax.inject_hyperparams` takes callable defaults for schedules."""

    def __init__(self, rule: Rule, name: str) -> None:
        self.rule: Rule = rule
        self.name: str = name

    def __repr__(self) -> str:
        return self.name


SKIP: Final = Skip()
"""What an axes rule returns for a leaf that is to be left alone."""

Reduced: TypeAlias = tuple[int, ...] | None
Rule: TypeAlias = Callable[[Path, Any], "int | Sequence[int] | Skip | None"]
_Simple: TypeAlias = int | Sequence[int] | Rule | Skip | None
Axes: TypeAlias = _Simple | Default | Mapping[str, _Simple]


def fan_in(path: Path, leaf: Any) -> tuple[int, ...] | Skip:
    """Reduce over the incoming weights of each unit: every axis but the last.

    This is correct for kernels of Dense `(in, out)` and Conv `(*window, in, out)` layers. Leaves of rank 0
    and 1 (biases, scales) are left alone. Attention kernels, embeddings and stacked layers need other axes,
    by path.

    Args:
      path: the leaf's key path, which this rule ignores.
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


def fan_in_of_matrices(path: Path, leaf: Any) -> tuple[int, ...] | Skip:
    """The default rule of projections: `fan_in`, but an error for ranks above 2, which are ambiguous."""
    if len(leaf.shape) > 2:
        by_hand = tuple(range(len(leaf.shape) - 1))
        raise unclear(
            "axes",
            path,
            leaf,
            "Pass axes=clipjax.fan_in if all such leaves are kernels of convolutions (*window, in, out), or "
            "axes=clipjax.flax.unit_axes(model), which asks the layers, or the axes to reduce, as in "
            f"axes={ {path_name(path): by_hand} if path else by_hand }",
        )
    return fan_in(path, leaf)


FAN_IN_OF_MATRICES: Final = Default(fan_in_of_matrices, "fan_in")


def unclear(argument: str, path: Path, leaf: Any, advice: str) -> ValueError:
    """Make the error for a leaf whose rank does not determine the meaning of its axes."""
    return ValueError(
        f"{argument}: the rank of leaf {described(path, leaf)} does not determine what it is: the kernel of "
        f"a convolution, that of attention heads, or a stack of layers.\n{advice}"
    )


def is_measured(leaf: Any) -> bool:
    """Whether a leaf counts toward norms: float and complex leaves do; others pass through unchanged."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def check_axes(axes: Axes, name: str = "axes") -> Axes:
    """Return `axes`, or raise an error if they are invalid for any tree."""
    if isinstance(axes, Default):
        return axes.rule
    check_by_pattern(name, axes, "axes", _check_simple)
    return axes


def _check_simple(name: str, axes: Any) -> None:
    if callable(axes):
        check_rule(name, axes)
    elif not (axes is None or isinstance(axes, Skip)):
        _as_tuple(axes, name)


def resolve_axes(axes: Axes, tree: Any, *, may_bound_nothing: bool = False) -> list[Reduced | Skip]:
    """Resolve `axes` for every leaf of `tree`, in the order of its leaves.

    Returns, for each leaf, the reduced axes as a sorted tuple of non-negative ints, `None` for
    the whole leaf, or a :class:`Skip`. Leaves that are neither float nor complex are skipped.

    Raises:
      ValueError: an axis is out of range or repeated; a path pattern matches no leaf; no leaf is bounded,
        and :data:`SKIP` did not ask for that; the default does not know the axes.
    """
    leaves = leaves_with_paths(tree)
    each = for_each_leaf("axes", axes, tree, Skip("no pattern of axes matches it"))
    if axes is fan_in_of_matrices:
        _check_no_equinox(tree)
    resolved = [_resolve(of_leaf, *leaf) for of_leaf, leaf in zip(each, leaves, strict=True)]
    if not may_bound_nothing:
        check_some(
            "axes",
            leaves,
            resolved,
            "Give the axes to reduce: 0 for the columns of (in, out), None for one norm per leaf, or by "
            "path, as in axes={'*bias': None}. clipjax.SKIP for a leaf leaves it alone without this error.",
        )
    return resolved


def check_some(argument: str, leaves: Sequence[tuple[Path, Any]], chosen: Sequence[Any], advice: str) -> None:
    """Raise an error if all leaves that could be bounded are left alone, unless the user asked for that."""
    if all(isinstance(each, Skip) for each in chosen):
        left = [
            (described(*leaf), each.why)
            for each, leaf in zip(chosen, leaves, strict=True)
            if is_measured(leaf[1]) and 0 not in leaf[1].shape
        ]
        if any(why for _, why in left):
            listed = a_few([f"{leaf}: {why or 'clipjax.SKIP asks for it'}" for leaf, why in left])
            raise ValueError(
                f"{argument}: nothing is bounded, as each leaf is left alone:\n  {listed}\n{advice}"
            )


def _check_no_equinox(tree: Any) -> None:
    """Raise an error if the default would treat the weights of Equinox layers like those of Flax."""
    module = getattr(sys.modules.get("equinox"), "Module", None)
    if module is None:
        return
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, module)):
        if isinstance(node, module) and any(
            is_measured(leaf) and len(leaf.shape) > 1 for leaf in jax.tree.leaves(node)
        ):
            raise ValueError(
                f"axes: {type(node).__name__} is an Equinox module. The weights of Equinox layers are "
                "(out, in), while the default axes are for (in, out). Pass "
                "axes=clipjax.equinox.unit_axes(model), which asks the layers, or the axes to reduce by path"
            )


def _resolve(axes: Any, path: Path, leaf: Any) -> Reduced | Skip:
    if not is_measured(leaf):
        return SKIP
    rule = axes
    if callable(rule):
        axes = rule(path, leaf)
    if isinstance(axes, Skip) and (rule is fan_in or rule is fan_in_of_matrices):
        return Skip(f"clipjax.fan_in leaves rank {len(leaf.shape)} alone")
    if axes is None or isinstance(axes, Skip):
        return axes
    shape = jnp.shape(leaf)
    where = f"for {the_leaf(path)} of shape {shape}"
    reduced = []
    for axis in _as_tuple(axes, f"axes of {the_leaf(path)}, by the rule," if callable(rule) else "axes"):
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"axes: {axis} is out of range {where}")
        reduced.append(axis % len(shape))
    if len(set(reduced)) != len(reduced):
        raise ValueError(f"axes: {axes} names an axis twice {where}")
    return tuple(sorted(reduced))


def _as_tuple(axes: Any, name: str) -> tuple[int, ...]:
    each = axes if isinstance(axes, Sequence) else (axes,)
    if any(isinstance(axis, bool | str) for axis in each):
        raise TypeError(
            f"{name} must be ints, a rule such as clipjax.fan_in, a mapping or None, got {axes!r}"
        )
    try:
        return tuple(operator.index(axis) for axis in each)
    except TypeError as error:
        raise TypeError(
            f"{name} must be ints that are known when tracing, a rule, a mapping or None, got {axes!r}"
        ) from error
