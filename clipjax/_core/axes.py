"""Which entries of a leaf share a norm: the forms of `axes`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import jax

from clipjax._core.bounds import not_static
from clipjax._core.norms import is_float
from clipjax._core.paths import Leaf, a_few, first_matches, leaves_of, path_name


class Skip:
    """The type of :data:`SKIP`."""

    def __repr__(self) -> str:
        return "clipjax.SKIP"


SKIP: Final = Skip()
"""The axes of a leaf that is not changed."""

Rule: TypeAlias = Callable[[Any, Any], Any]


def fan_in(path: Any, leaf: Any) -> tuple[int, ...] | Skip:
    """Reduce over the incoming weights of each unit: all axes but the last.

    This is right for kernels of Dense `(in, out)` and Conv `(*window, in, out)`. Biases and scales (rank 0 and
    1) are not changed. Attention kernels, embeddings and stacked layers need other axes, by path.

    Args:
      path: the key path of the leaf, which this rule does not use.
      leaf: anything with a `shape`.

    Returns:
      The axes to reduce, or :data:`SKIP`.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> clipjax.fan_in((), jnp.ones((3, 3, 16, 32)))
      (0, 1, 2)
      >>> clipjax.fan_in((), jnp.ones(32))
      clipjax.SKIP
    """
    rank = len(leaf.shape)
    return tuple(range(rank - 1)) if rank >= 2 else SKIP


def fan_in_or_all(path: Any, leaf: Any) -> tuple[int, ...] | None:
    """Reduce over the incoming weights of each unit, and over all of a bias or a scale.

    Like :func:`fan_in`, except that a leaf of rank 0 or 1 is one unit.

    Args:
      path: the key path of the leaf, which this rule does not use.
      leaf: anything with a `shape`.

    Returns:
      The axes to reduce; None is the whole leaf.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> clipjax.fan_in_or_all((), jnp.ones((3, 3, 16, 32)))
      (0, 1, 2)
      >>> clipjax.fan_in_or_all((), jnp.ones(32))  # None: the whole leaf
    """
    axes = fan_in(path, leaf)
    return None if isinstance(axes, Skip) else axes


def _fan_in_of_matrices(path: Any, leaf: Any) -> tuple[int, ...] | Skip:
    """Return `fan_in`, or raise an error for higher ranks, which do not tell what a leaf is."""
    rank = len(leaf.shape)
    if rank > 2:
        raise ValueError(
            f"axes: {Leaf(path, leaf)} may be the kernel of a convolution, of attention heads, or a stack of layers. "
            "Pass axes=unit_axes(model) of clipjax.flax or clipjax.equinox, which asks the layers (in Linen "
            "unit_axes(model, key, x)), clipjax.fan_in for convolutions (*window, in, out), or the axes to reduce, "
            f"as in axes={{{path_name(path)!r}: ...}}"
        )
    return fan_in(path, leaf)


class Default:
    """A rule as a default: not callable, since `optax.inject_hyperparams` takes callable ones for schedules."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def __repr__(self) -> str:
        return "<fan_in of matrices>" if self.rule is _fan_in_of_matrices else "fan_in_or_all"


Axes: TypeAlias = int | Sequence[int] | Rule | Skip | Default | Mapping[str, Any] | None

FAN_IN_OF_MATRICES: Final = Default(_fan_in_of_matrices)
FAN_IN_OR_ALL: Final = Default(fan_in_or_all)


def _resolve(axes: Any, leaf: Leaf) -> tuple[int, ...] | Skip | None:
    """Return the axes to reduce in a leaf, as sorted non-negative ints; None for the whole leaf."""
    shape = leaf.value.shape
    rank = len(shape)
    if callable(axes):
        axes = check_axes(axes(leaf.path, leaf.value), f"axes of {leaf.name!r}, by the rule,")
    elif axes is not None and not isinstance(axes, Skip) and rank < 2:
        return SKIP
    if axes is None or isinstance(axes, Skip):
        return axes
    if callable(axes) or isinstance(axes, Mapping):
        raise TypeError(f"axes of {leaf.name!r}, by the rule, must be ints, None or SKIP, got {axes!r}")
    each = (axes,) if isinstance(axes, int) else tuple(axes)
    if any(not -rank <= axis < rank for axis in each):
        raise ValueError(f"axes: {axes} is out of range for {leaf}")
    found = {axis % rank for axis in each}
    if len(found) < len(each):
        raise ValueError(f"axes: {axes} names an axis twice for {leaf}")
    return tuple(sorted(found))


def check_axes(axes: Any, name: str = "axes") -> Any:
    """Return `axes`, with ints as Python's, or raise an error if they are invalid for any tree."""
    if isinstance(axes, Default):
        return axes.rule
    if isinstance(axes, Mapping):
        if not axes or not all(isinstance(pattern, str) for pattern in axes):
            raise TypeError(f"{name}: a mapping must be from path patterns, got {axes!r}")
        return {pattern: check_axes(each, f"{name}[{pattern!r}]") for pattern, each in axes.items()}
    if axes is None or callable(axes) or isinstance(axes, Skip):
        return axes
    if isinstance(axes, jax.core.Tracer):
        raise not_static(name, axes)
    several = isinstance(axes, Sequence)
    try:
        each = tuple(operator.index(axis) for axis in (axes if several else [axes]))
    except TypeError:
        each = None
    if each is None or isinstance(axes, bool | str | bytes):
        raise TypeError(f"{name} must be ints, a rule (path, leaf) -> axes, a mapping or None, got {axes!r}")
    return each if several else each[0]


def literal_axes(axes: Any) -> Any:
    """Return checked `axes` that apply to leaves of every rank, as NumPy's do, instead of to matrices only."""
    axes = check_axes(axes)
    if isinstance(axes, Mapping):
        return {pattern: literal_axes(each) for pattern, each in axes.items()}
    return (lambda path, leaf: axes) if isinstance(axes, int | tuple) else axes


def axes_of_leaves(axes: Any, tree: Any) -> list[tuple[int, ...] | Skip | None]:
    """Return the axes to reduce in each leaf of a tree, or SKIP.

    Raises:
      ValueError: an axis is out of range or repeated; a pattern matches no leaf; every leaf is skipped, and
        neither a rule nor SKIP in a mapping asked for that.
    """
    leaves, _ = leaves_of(tree)
    rules = [axes] * len(leaves)
    if isinstance(axes, Mapping):
        rules = [axes[p] if p is not None else SKIP for p in first_matches("axes", tuple(axes), tree)]
    found = [_resolve(rule, leaf) if is_float(leaf.value) else SKIP for rule, leaf in zip(rules, leaves, strict=True)]
    floats = [leaf for leaf in leaves if is_float(leaf.value) and leaf.value.size]
    skips = [isinstance(each, Skip) for each in (axes.values() if isinstance(axes, Mapping) else [axes])]
    asked = any(skips) and not (isinstance(axes, Mapping) and all(skips))
    by_rule = callable(axes) and axes not in (fan_in, _fan_in_of_matrices)
    if floats and all(isinstance(each, Skip) for each in found) and not (asked or by_rule):
        shown = "the default" if axes is _fan_in_of_matrices else getattr(axes, "__name__", repr(axes))
        raise ValueError(
            f"axes: nothing is changed, since {shown} applies to none of: {a_few(floats, 5)}. The default, ints and "
            "fan_in are for rank 2 and more; axes=None gives each leaf one norm, axes={'*bias': None} each bias. A "
            "mapping is only for the leaves that its patterns match"
        )
    return found
