"""Units: the elements of a leaf that share a norm, as the reduced `axes` say."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from clipjax._core.aliases import SKIP, Path, Reduced, Rule, Skip
from clipjax._core.leaves import Leaf, Leaves, is_inexact, of_each_leaf, path_name
from clipjax._core.messages import a_few, traced_error
from clipjax._core.norms import mesh_axes, norm_of

_UNMATCHED = Skip()  # for a leaf that no pattern matches


def fan_in(path: Path, leaf: Any) -> tuple[int, ...] | Skip:
    """Reduce over the incoming weights of each output unit: all axes but the last.

    Use it as `axes` for kernels of Dense `(in, out)` and Conv `(*window, in, out)`.
    Attention kernels, embeddings and stacked layers need other axes: pass a mapping
    from path patterns to axes. The biases of stacked layers have rank 2, so this rule
    or an int as `axes` would apply to them. Leave them out, as in `{"*bias":
    clipjax.SKIP, "*": clipjax.fan_in}`.

    Args:
      path: the key path of a leaf, which is not used.
      leaf: an array, or anything with a shape.

    Returns:
      A tuple of axes, or :data:`SKIP` for leaves of rank 0 and 1, such as biases and
      scales.

    See Also:
      :func:`flax.unit_axes` and :func:`equinox.unit_axes` read the axes from the layers
      of a model.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel, bias = jnp.ones((3, 3, 16, 32)), jnp.ones(32)
      >>> clipjax.fan_in((), kernel), clipjax.fan_in((), bias)
      ((0, 1, 2), clipjax.SKIP)
    """
    return tuple(range(len(leaf.shape) - 1)) or SKIP


def fan_in_of_matrices(path: Path, leaf: Any) -> tuple[int, ...] | Skip:
    """Return `fan_in`, or raise for higher ranks: "auto" where weights are bounded."""
    if len(leaf.shape) > 2:
        raise unclear_error(path, leaf)
    return fan_in(path, leaf)


def unclear_error(path: Path, leaf: Any) -> ValueError:
    """Return the error for a leaf whose rank does not tell what it is."""
    return ValueError(
        f"axes: {Leaf(path, leaf)} may be the kernel of a convolution, of attention "
        "heads, or a stack of layers. Pass axes=unit_axes(model) of clipjax.flax or "
        "clipjax.equinox, which asks the layers (in Linen unit_axes(model, key, x)), "
        "clipjax.fan_in for convolutions (*window, in, out), or the axes to reduce, as "
        f"in axes={{{_pattern(path)!r}: ...}}, with '*': 'auto' for other leaves"
    )


def _pattern(path: Path) -> str:
    """Return the pattern of a leaf; a leaf that is the whole tree has no path."""
    return path_name(path) or "*"


def whole_matrices(path: Path, leaf: Any) -> Skip | None:
    """Reduce a whole matrix, or raise for higher ranks: "auto" where norms are kept."""
    if len(leaf.shape) > 2:
        raise ValueError(
            f"axes: {Leaf(path, leaf)} may be a stack of matrices, of layers or of "
            "experts, each of which has a norm of its own. Pass the axes of one "
            f"matrix, as in axes={{{_pattern(path)!r}: (1, 2)}}, None if all of it is "
            "one, or clipjax.SKIP, with '*': 'auto' for other leaves"
        )
    return None if len(leaf.shape) == 2 else SKIP


def fan_in_or_all(path: Path, leaf: Any) -> Reduced:
    """Reduce as `fan_in`, and a bias as a whole: "auto" for gradients beside weights.

    Ranks that may be stacks raise an error.
    """
    if len(leaf.shape) not in (0, 1, 2, 4):
        raise unclear_error(path, leaf)
    return tuple(range(len(leaf.shape) - 1)) or None


def axes_of(
    leaves: Leaves,
    axes: Any,
    chosen: Sequence[bool] | None = None,
    *,
    least_rank: int = 2,
) -> list[Reduced | Skip]:
    """Return for each leaf the axes that are reduced in it, or SKIP if it has no norm.

    Args:
      leaves: the leaves.
      axes: what :func:`check_axes` returned.
      chosen: for each leaf whether it may have units; None: all may.
      least_rank: the rank below which ints leave a leaf out, such as a bias.

    Returns:
      A list with one entry for each leaf.

    Raises:
      ValueError: an axis is out of range or repeated; a pattern matches no leaf; no
        leaf is reduced, although `axes` do not say so; inside `shard_map`, a leaf may
        be split along the reduced axes.
    """
    rules = of_each_leaf("axes", axes, leaves, _UNMATCHED)
    may = [True] * len(rules) if chosen is None else chosen
    where: list[Reduced | Skip] = []
    for leaf, rule, is_chosen in zip(leaves.each, rules, may, strict=True):
        reduced: Reduced | Skip = SKIP
        if is_inexact(leaf.value) and is_chosen:
            reduced = _resolve(rule, leaf, least_rank)
            if isinstance(reduced, tuple):
                check_whole("axes", leaf)
        where.append(reduced)
    if all(isinstance(reduced, Skip) for reduced in where) and SKIP not in rules:
        left = [leaf for leaf in leaves.each if is_inexact(leaf.value)]
        if any(leaf.value.size for leaf in left):
            raise ValueError(
                f"axes: they apply to none of: {a_few(left, 5)}. Ints and 'auto' are "
                "for leaves of rank 2 and more; axes=None gives each leaf one norm"
            )
    return where


def check_whole(name: str, leaf: Leaf) -> None:
    """Raise inside `shard_map` if this device may hold a part of each unit."""
    if axes := mesh_axes(leaf.value):
        raise ValueError(
            f"{name}: inside shard_map, {leaf} differs over {axes}, and its type does "
            "not say which of its axes are split. Clip, project and measure parts of "
            "leaves outside shard_map, under jit"
        )


def size_of_units(x: jax.Array, axes: Reduced) -> int:
    """Return how many elements share a norm, over all devices, and at least 1."""
    local = x.shape if axes is None else [x.shape[axis] for axis in axes]
    devices = map(lax.axis_size, mesh_axes(x))
    return max(math.prod([*local, *devices]), 1)


def norms_of(
    values: Sequence[jax.Array], where: Sequence[Reduced | Skip], ord: float = 2
) -> list[jax.Array | None]:
    """Return the norms of the units of each leaf, or None for a leaf that has none."""
    return [
        None if isinstance(axes, Skip) else norm_of(x, axes, ord)
        for x, axes in zip(values, where, strict=True)
    ]


def map_units(
    function: Callable[..., Any], of: Sequence[Any], *rest: Sequence[Any]
) -> list[Any]:
    """Return `function` of the norms of each leaf and of its entry in other lists.

    A leaf without norms, None, stays None.
    """
    rows = zip(of, *rest, strict=True)
    return [None if norm is None else function(norm, *others) for norm, *others in rows]


def present(entries: Sequence[Any]) -> list[Any]:
    """Return the entries that are not None."""
    return [entry for entry in entries if entry is not None]


def check_axes(axes: Any, name: str = "axes", *, auto: Rule | None = None) -> Any:
    """Return `axes`, with Python's ints and with the rule `auto` in place of "auto".

    The default is a word and not a function, since `optax.inject_hyperparams` takes
    functions for schedules. Axes that are invalid for any tree raise an error.
    """
    if auto and isinstance(axes, str) and axes == "auto":
        return auto
    if isinstance(axes, Mapping):
        nested = any(isinstance(inner, Mapping) for inner in axes.values())
        if not axes or nested or not all(isinstance(pattern, str) for pattern in axes):
            raise TypeError(
                f"{name}: a mapping must be from path patterns, such as "
                f"'encoder/kernel', to axes, got {axes!r}"
            )
        return {
            pattern: check_axes(inner, f"{name}[{pattern!r}]", auto=auto)
            for pattern, inner in axes.items()
        }
    if axes is None or callable(axes) or isinstance(axes, Skip):
        return axes
    if isinstance(axes, jax.core.Tracer):
        raise traced_error(name, axes)
    several = isinstance(axes, Sequence)
    try:
        ints = tuple(map(operator.index, axes if several else [axes]))
    except TypeError:
        ints = None
    if ints is None or isinstance(axes, bool | str | bytes):
        raise TypeError(
            f"{name} must be ints, a rule (path, leaf) -> axes, a mapping or None, got "
            f"{axes!r}"
        )
    return ints if several else ints[0]


def _resolve(axes: Any, leaf: Leaf, least_rank: int) -> Reduced | Skip:
    """Return the axes to reduce in a leaf, sorted and not negative."""
    if callable(axes):
        name = f"axes of {leaf.name!r}, by the rule,"
        axes = check_axes(axes(leaf.path, leaf.value), name)
        if callable(axes) or isinstance(axes, Mapping):
            raise TypeError(f"{name} must be ints, None or SKIP, got {axes!r}")
    elif isinstance(axes, int | tuple) and len(leaf.value.shape) < least_rank:
        return SKIP
    if axes is None or isinstance(axes, Skip):
        return axes
    ints = (axes,) if isinstance(axes, int) else tuple(axes)
    return tuple(sorted(positive_axes("axes", axes, ints, leaf)))


def positive_axes(name: str, given: Any, axes: Sequence[int], leaf: Leaf) -> list[int]:
    """Return axes of a leaf, counted from 0, or raise an error that shows `given`."""
    rank = len(leaf.value.shape)
    if any(not -rank <= axis < rank for axis in axes):
        raise ValueError(f"{name}: {given} is out of range for {leaf}")
    found = [axis % rank for axis in axes]
    if len(set(found)) < len(found):
        raise ValueError(f"{name}: {given} names an axis twice for {leaf}")
    return found
