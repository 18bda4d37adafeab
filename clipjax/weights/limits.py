"""Limits on entries, which may differ from leaf to leaf: by path patterns, or by a rule."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from clipjax._core.arguments import check_by_pattern
from clipjax._core.axes import Skip, check_some
from clipjax._core.bounds import Bound, Evaluate, bound_at, check_bound, check_order
from clipjax._core.paths import Path, for_each_leaf, leaves_with_paths, the_leaf

LimitRule: TypeAlias = Callable[[Path, Any], "Bound | Skip"]
_Simple: TypeAlias = Bound | LimitRule | Skip
Limits: TypeAlias = _Simple | Mapping[str, _Simple]

_FORMS = (
    "a number, an array, a schedule, a rule (path, leaf) -> limit, or a mapping from path patterns to these"
)


class Group(NamedTuple):
    """Leaves that have the same limits."""

    low: Evaluate
    high: Evaluate
    chosen: list[bool]  # for each leaf of the tree


def check_limits(low: Limits, high: Limits) -> None:
    """Raise an error if the limits are invalid for any tree."""
    for name, limits in (("low", low), ("high", high)):
        check_by_pattern(name, limits, "a limit", _check_simple)
    patterns = {p: f" for {p!r}" for limits in (low, high) if isinstance(limits, Mapping) for p in limits}
    for pattern, of in (patterns or {"": ""}).items():
        least, most = (x.get(pattern) if isinstance(x, Mapping) else x for x in (low, high))
        _check_order(least, most, of)


def groups_of(low: Limits, high: Limits, where: Sequence[bool], tree: Any) -> list[Group]:
    """Group the leaves of `tree` that `where` chooses and that have limits: one group for equal limits.

    Raises:
      TypeError: a rule does not return a limit.
      ValueError: a path pattern matches no leaf; no leaf has a limit, and :data:`clipjax.SKIP` did not ask
        for that; `low` is above `high`.
    """
    leaves = leaves_with_paths(tree)
    lows, highs = (_of_each(*limits, where, tree) for limits in (("low", low), ("high", high)))
    found: list[Any] = []
    groups: dict[Any, Group] = {}
    for i, ((path, _), least, most) in enumerate(zip(leaves, lows, highs, strict=True)):
        skipped = [x for x in (least, most) if isinstance(x, Skip)]
        found.append(next((x for x in skipped if x.why), skipped[0]) if len(skipped) == 2 else None)
        if found[i] is not None:
            continue
        _check_order(least, most, f" for {the_leaf(path)}")
        least, most = _without(least, -math.inf), _without(most, math.inf)
        key = _identity(least), _identity(most)
        if key not in groups:
            at_step = bound_at("low", least, minimum=None), bound_at("high", most, minimum=None)
            groups[key] = Group(*at_step, [False] * len(leaves))
        groups[key].chosen[i] = True
    advice = "Give a limit for one of them; clipjax.SKIP for a leaf leaves it alone without this error."
    check_some("low, high", leaves, found, advice)
    return list(groups.values())


def _check_simple(name: str, limit: Any) -> None:
    if callable(limit):
        _is_rule(name, limit)
    elif not isinstance(limit, Skip):
        check_bound(name, limit, minimum=None, forms=_FORMS)


def _check_order(low: Any, high: Any, of: str) -> None:
    """Raise if both limits are known and in the wrong order."""
    if not any(x is None or isinstance(x, Skip) for x in (low, high)):
        check_order(low, high, of)


def _is_rule(name: str, function: Callable[..., Any]) -> bool:
    """Whether a function is a rule (path, leaf) -> limit, and not a schedule step -> limit."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions written in C have no signature
        return False
    schedule, rule = (_takes(signature, count) for count in (1, 2))
    if schedule != rule:
        return rule
    what = "which fits both" if rule else "which fits neither"
    raise TypeError(
        f"{name}: a schedule takes (step), a rule takes (path, leaf); the arguments of this function are "
        f"{signature}, {what}: give it one argument, or two"
    )


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def _of_each(name: str, limits: Limits, where: Sequence[bool], tree: Any) -> list[Any]:
    """Return the limit of each leaf, or a `Skip` if it has none."""
    each = for_each_leaf(name, limits, tree, Skip("no pattern of low or high matches it"))
    outside = Skip("where leaves it out")
    return [
        _by_rule(name, limit, path, leaf) if yes else outside
        for limit, (path, leaf), yes in zip(each, leaves_with_paths(tree), where, strict=True)
    ]


def _by_rule(name: str, limit: Any, path: Path, leaf: Any) -> Any:
    if not callable(limit) or not _is_rule(name, limit):
        return limit
    made = limit(path, leaf)
    if not isinstance(made, Skip):
        check_bound(f"{name}: what the rule returns for {the_leaf(path)}", made, minimum=None)
    return made


def _without(limit: Any, none: float) -> Any:
    return none if isinstance(limit, Skip) else limit


def _identity(limit: Any) -> Any:
    """Return a key under which limits are grouped: numbers by value, other limits by identity."""
    return float(limit) if isinstance(limit, int | float | np.number) else id(limit)
