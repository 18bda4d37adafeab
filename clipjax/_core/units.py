"""Units: which entries of a leaf share a norm, as the reduced `axes` say."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, SupportsIndex, TypeAlias

import jax
from jax import lax

from clipjax._core import norms, trees
from clipjax._core.aliases import Tree
from clipjax._core.messages import a_few, traced_error


class Skip:
    """The type of :data:`SKIP`."""

    def __repr__(self) -> str:
        return "clipjax.SKIP"

    def __reduce__(self) -> str:
        return "SKIP"  # copies and pickles are the same object


SKIP: Final = Skip()
"""The axes of a leaf that is not changed."""

_UNMATCHED = Skip()  # of a leaf that no pattern matches

Rule: TypeAlias = Callable[[Any, Any], Any]
Axes: TypeAlias = (
    SupportsIndex | Sequence[SupportsIndex] | Rule | Skip | Mapping[str, Any] | None
)
AutoAxes: TypeAlias = Axes | Literal["auto"]


def fan_in(path: Any, leaf: Any) -> tuple[int, ...] | Skip:
    """Reduce over the incoming weights of each unit: all axes but the last.

    A rule for `axes`, right for kernels of Dense `(in, out)` and Conv `(*window, in,
    out)`. Biases and scales (rank 0 and 1) are not changed. Attention kernels,
    embeddings and stacked layers need other axes, by path. The biases of stacked layers
    have rank 2, so that this rule and an int reach them, unless they are named:
    `{"*bias": SKIP, …}`.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel, bias = jnp.ones((3, 3, 16, 32)), jnp.ones(32)
      >>> clipjax.fan_in((), kernel), clipjax.fan_in((), bias)
      ((0, 1, 2), clipjax.SKIP)
    """
    return tuple(range(len(leaf.shape) - 1)) or SKIP


def fan_in_of_matrices(path: Any, leaf: Any) -> tuple[int, ...] | Skip:
    """Return `fan_in`, or raise for higher ranks: "auto" where weights are bounded."""
    if len(leaf.shape) > 2:
        raise unclear_error(path, leaf)
    return fan_in(path, leaf)


def unclear_error(path: Any, leaf: Any) -> ValueError:
    """Return the error for a leaf whose rank does not tell what it is."""
    return ValueError(
        f"axes: {trees.Leaf(path, leaf)} may be the kernel of a convolution, of "
        "attention heads, or a stack of layers. Pass axes=unit_axes(model) of "
        "clipjax.flax or clipjax.equinox, which asks the layers (in Linen "
        "unit_axes(model, key, x)), clipjax.fan_in for convolutions (*window, in, "
        f"out), or the axes to reduce, as in axes={{{trees.path_name(path)!r}: ...}}"
    )


def whole_matrices(path: Any, leaf: Any) -> Skip | None:
    """Reduce a whole matrix, or raise for higher ranks: "auto" where norms are kept."""
    if len(leaf.shape) > 2:
        pattern = trees.path_name(path)
        raise ValueError(
            f"axes: {trees.Leaf(path, leaf)} may be a stack of matrices, of layers or "
            "of experts, each of which has a norm of its own. Pass the axes of one "
            f"matrix, as in axes={{{pattern!r}: (1, 2), '*': 'auto'}}, None if all of "
            "it is one, or clipjax.SKIP"
        )
    return None if len(leaf.shape) == 2 else SKIP


_AUTO = (fan_in_of_matrices, whole_matrices)


class LeafUnits(NamedTuple):
    """A leaf that has units: entries that share a norm."""

    place: int  # among the leaves of the tree
    leaf: trees.Leaf
    axes: norms.Reduced  # None: the whole leaf is one unit


def of_tree(
    tree: Tree, axes: Any, chosen: Sequence[bool] | None = None
) -> list[LeafUnits]:
    """Return the leaves of a tree that have units, of all leaves or those chosen.

    Args:
      tree: a pytree of arrays.
      axes: what :func:`check_axes` returned.
      chosen: for each leaf whether it may have units; None: all may.

    Raises:
      ValueError: an axis is out of range or repeated; a pattern matches no leaf; no
        leaf is found, and nobody asked for that; inside `shard_map`, a leaf may be
        split along the reduced axes.
    """
    leaves, _ = trees.leaves_of(tree)
    rules = trees.per_leaf("axes", axes, tree, _UNMATCHED)
    found = []
    skipped = []
    for i, (leaf, rule) in enumerate(zip(leaves, rules, strict=True)):
        if trees.is_float(leaf.value) and (chosen is None or chosen[i]):
            reduced = _resolve(rule, leaf)
            if isinstance(reduced, Skip):
                skipped.append((leaf, rule))
                continue
            if reduced is not None:
                check_whole("axes", leaf)
            found.append(LeafUnits(i, leaf, reduced))
    if not found:
        _check_is_meant(axes, skipped)
    return found


def _check_is_meant(axes: Any, skipped: list[tuple[trees.Leaf, Any]]) -> None:
    """Raise an error if leaves are skipped that no SKIP and no user's rule skips."""
    rules = [rule for _, rule in skipped]
    asked = any(rule is SKIP or _is_rule(rule) for rule in rules)
    full = [leaf for leaf, _ in skipped if leaf.value.size]
    if full and (not asked or _UNMATCHED in rules):
        raise ValueError(
            f"axes: nothing is changed, since {_written(axes)} applies to none of: "
            f"{a_few(full, 5)}. 'auto', ints and fan_in are for rank 2 and more; "
            "axes=None gives each leaf one norm, axes={'*bias': None} each bias. A "
            "mapping is only for the leaves that its patterns match"
        )


def _written(axes: Any) -> str:
    """Return checked axes as a user wrote them."""
    if isinstance(axes, Mapping):
        return f"{{{', '.join(f'{k!r}: {_written(x)}' for k, x in axes.items())}}}"
    return "'auto'" if axes in _AUTO else getattr(axes, "__name__", repr(axes))


def _is_rule(axes: Any) -> bool:
    """Return whether axes are a rule of the user's."""
    return callable(axes) and axes not in (fan_in, *_AUTO)


def check_whole(name: str, leaf: trees.Leaf) -> None:
    """Raise inside `shard_map` if this device may hold a part of each unit."""
    if axes := norms.mesh_axes(leaf.value):
        raise ValueError(
            f"{name}: inside shard_map, {leaf} differs over {axes}, and its type does "
            "not say which of its axes are split. Clip, project and measure parts of "
            "leaves outside shard_map, under jit"
        )


def entries_of(each: LeafUnits) -> int:
    """Return how many entries share a norm, 1 for none; a device may hold a part."""
    shape = each.leaf.value.shape
    local = shape if each.axes is None else [shape[axis] for axis in each.axes]
    devices = map(lax.axis_size, norms.mesh_axes(each.leaf.value))
    return max(math.prod([*local, *devices]), 1)


def norms_of(found: Sequence[LeafUnits], ord: float = 2) -> list[jax.Array]:
    """Return the norms of units, for each leaf."""
    return [norms.norm(each.leaf.value, each.axes, ord) for each in found]


def check_axes(axes: Any, name: str = "axes", *, auto: Rule | None = None) -> Any:
    """Return `axes`, with ints as Python's and the rule `auto` for "auto".

    The default is that word and no function, since `optax.inject_hyperparams` takes
    functions for schedules. What is invalid for any tree is an error.
    """
    if auto and isinstance(axes, str) and axes == "auto":
        return auto
    if isinstance(axes, Mapping):
        nested = any(isinstance(each, Mapping) for each in axes.values())
        if not axes or nested or not all(isinstance(pattern, str) for pattern in axes):
            raise TypeError(
                f"{name}: a mapping must be from path patterns, such as "
                f"'encoder/kernel', to axes, got {axes!r}"
            )
        return {
            pattern: check_axes(each, f"{name}[{pattern!r}]", auto=auto)
            for pattern, each in axes.items()
        }
    if axes is None or callable(axes) or isinstance(axes, Skip):
        return axes
    if isinstance(axes, jax.core.Tracer):
        raise traced_error(name, axes)
    several = isinstance(axes, Sequence)
    try:
        each = tuple(map(operator.index, axes if several else [axes]))
    except TypeError:
        each = None
    if each is None or isinstance(axes, bool | str | bytes):
        raise TypeError(
            f"{name} must be ints, a rule (path, leaf) -> axes, a mapping or None, got "
            f"{axes!r}"
        )
    return each if several else each[0]


def _resolve(axes: Any, leaf: trees.Leaf) -> norms.Reduced | Skip:
    """Return the axes to reduce in a leaf, sorted and not negative."""
    rank = len(leaf.value.shape)
    if callable(axes):
        name = f"axes of {leaf.name!r}, by the rule,"
        axes = check_axes(axes(leaf.path, leaf.value), name)
        if callable(axes) or isinstance(axes, Mapping):
            raise TypeError(f"{name} must be ints, None or SKIP, got {axes!r}")
    elif axes is not None and not isinstance(axes, Skip) and rank < 2:
        return SKIP
    if axes is None or isinstance(axes, Skip):
        return axes
    each = (axes,) if isinstance(axes, int) else tuple(axes)
    return tuple(sorted(positive_axes("axes", axes, each, leaf)))


def positive_axes(
    name: str, given: Any, axes: Sequence[int], leaf: trees.Leaf
) -> list[int]:
    """Return axes of a leaf as those from 0 on, or raise for what a user has given."""
    rank = len(leaf.value.shape)
    if any(not -rank <= axis < rank for axis in axes):
        raise ValueError(f"{name}: {given} is out of range for {leaf}")
    found = [axis % rank for axis in axes]
    if len(set(found)) < len(found):
        raise ValueError(f"{name}: {given} names an axis twice for {leaf}")
    return found
