"""Which leaves: the forms of `where`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from clipjax._core.axes import Skip, check_some, is_measured
from clipjax._core.paths import Path, check_rule, first_matches, leaves_with_paths, the_leaf

Where: TypeAlias = str | Sequence[str] | Callable[[Path, Any], bool] | None


def check_where(where: Where) -> Where:
    """Return `where` with a lone pattern as a tuple, or raise what is wrong with it whatever the tree."""
    if callable(where):
        check_rule("where", where)
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
      ValueError: a path pattern matches no leaf, or no leaf that can be bounded is chosen.
    """
    leaves = leaves_with_paths(tree)
    if where is None:
        chosen = [True] * len(leaves)
    elif callable(where):
        chosen = [where(path, leaf) for path, leaf in leaves]
        for yes, (path, _) in zip(chosen, leaves, strict=True):
            if not isinstance(yes, bool | np.bool_):
                raise TypeError(f"where: a rule must return a bool, got {yes!r} for {the_leaf(path)}")
    else:
        chosen = [pattern is not None for pattern in first_matches("where", where, tree)]
    found = [bool(yes) and is_measured(leaf) for yes, (_, leaf) in zip(chosen, leaves, strict=True)]
    left_alone = Skip("the rule does not choose it" if callable(where) else "no pattern of where matches it")
    advice = "where=None bounds all leaves that are float."
    check_some("where", leaves, [yes or left_alone for yes in found], advice)
    return found
