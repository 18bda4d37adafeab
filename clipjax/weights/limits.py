"""Limits of weights that are the same for all leaves, or differ by path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from clipjax import _checks
from clipjax._core import bounds, trees

Limit = bounds.Bound | Mapping[str, bounds.Bound]


class Limits(NamedTuple):
    """Which limit each leaf of a tree has, and what the limits are at a step."""

    patterns: Callable[
        [Any], list[str | None]
    ]  # from a tree; None: the leaf has no limit
    at: Callable[[Any], dict[str | None, Any]]  # from a step; by pattern, without None
    scheduled: set[str | None]  # the patterns whose limits are schedules


def by_leaf(name: str, limit: Any, least: float = 0) -> Limits:
    """Return the limits that a number, an array, a schedule, or a mapping from path patterns to these stands for."""
    by_path = isinstance(limit, Mapping)
    given = (
        {p: limit[p] for p in _checks.check_patterns(name, tuple(limit))}
        if by_path
        else {"*": limit}
    )
    schedules = {
        p: bounds.as_schedule(f"{name}[{p!r}]" if by_path else name, x, least)
        for p, x in given.items()
    }
    return Limits(
        lambda tree: trees.per_leaf(
            name, {p: p for p in given} if by_path else "*", tree, None
        ),
        lambda step: {
            pattern: schedule(step) for pattern, schedule in schedules.items()
        },
        {pattern for pattern, x in given.items() if callable(x)},
    )
