"""The forms of `where`, which chooses leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import numpy as np

from clipjax._core.arguments import shown
from clipjax._core.axes import Skip, check_some, is_measured
from clipjax._core.paths import Path, check_rule, first_matches, leaves_of_prefix, leaves_with_paths, the_leaf

# Path patterns, a rule, or a tree of bools or a prefix of one.
Where: TypeAlias = str | Sequence[str] | Callable[[Path, Any], bool] | bool | Mapping[Any, Any] | None


def check_where(where: Where) -> Where:
    """Return `where`, with patterns as a tuple, or raise an error if it is invalid for any tree."""
    if where is None or _is_of_bools(where):
        return where
    if callable(where):
        check_rule("where", where)
        return where
    patterns = (where,) if isinstance(where, str) else where
    if not isinstance(patterns, Sequence) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            f"where must be path patterns, a rule (path, leaf) -> bool, a tree of bools or None, got "
            f"{shown(where)}"
        )
    if not patterns:
        raise ValueError(f"where must name at least one path pattern, got {where!r}")
    return tuple(patterns)


def _is_of_bools(where: Any) -> bool:
    leaves = jax.tree.leaves(where)
    return bool(leaves) and all(isinstance(leaf, bool | np.bool_) for leaf in leaves)


def resolve_where(where: Where, tree: Any) -> list[bool]:
    """Return whether each leaf of `tree` is chosen, in leaf order; only float and complex leaves can be.

    Raises:
      TypeError: a rule does not return a bool.
      ValueError: a path pattern matches no leaf, or no leaf that can be bounded is chosen.
    """
    leaves = leaves_with_paths(tree)
    if where is None:
        chosen = [True] * len(leaves)
    elif _is_of_bools(where):
        chosen = leaves_of_prefix("where", "bool", where, tree)
    elif callable(where):
        chosen = [where(path, leaf) for path, leaf in leaves]
        for yes, (path, _) in zip(chosen, leaves, strict=True):
            if not isinstance(yes, bool | np.bool_):
                raise TypeError(f"where: a rule must return a bool, got {yes!r} for {the_leaf(path)}")
    else:
        patterns = cast(tuple[str, ...], where)  # as `check_where` has verified
        chosen = [pattern is not None for pattern in first_matches("where", patterns, tree)]
    found = [bool(yes) and is_measured(leaf) for yes, (_, leaf) in zip(chosen, leaves, strict=True)]
    why = "the rule does not choose it" if callable(where) else "no pattern of where matches it"
    left_alone = Skip("where is False for it" if _is_of_bools(where) else why)
    advice = "where=None bounds all float and complex leaves."
    check_some("where", leaves, [yes or left_alone for yes in found], advice)
    return found


def inside(where: Where, tree: Any) -> Any:
    """Return `tree`, with None in place of the leaves that `where` does not choose."""
    return tree if where is None else only(resolve_where(where, tree), tree)


def only(chosen: Sequence[bool], tree: Any) -> Any:
    """Return `tree`, with None in place of the leaves that are not chosen, in leaf order."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([leaf if yes else None for leaf, yes in zip(leaves, chosen, strict=True)])


def merged(tree: Any, part: Any) -> Any:
    """Return `tree`, with its leaves replaced by those of `part` that are not None."""
    return jax.tree.map(lambda new, old: old if new is None else new, part, tree, is_leaf=lambda x: x is None)
