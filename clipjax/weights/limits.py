"""Limits of weights that are the same for all leaves, or differ by path."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from clipjax import _checks
from clipjax._core import bounds, trees
from clipjax._core.aliases import Tree
from clipjax._core.messages import short_repr

Limit: TypeAlias = bounds.Bound | Mapping[str, bounds.Bound]


class Limits(NamedTuple):
    """The limits of all leaves."""

    name: str
    given: Mapping[str, Any]  # by path pattern; "*" if they are the same for all
    at_step: Mapping[str, Callable[[Any], Any]]  # the same, checked
    by_path: bool
    other: Any  # the limit of leaves that no pattern matches

    @property
    def scheduled(self) -> bool:
        """Whether one of them is a schedule."""
        return any(map(callable, self.given.values()))

    def patterns(self, tree: Tree) -> list[str | None]:
        """Return the pattern of each leaf's limit, None if it has none."""
        if not self.by_path:
            return ["*"] * len(jax.tree.leaves(tree))
        return trees.first_matches(self.name, tuple(self.given), tree)

    def at(self, tree: Tree, step: Any) -> list[Any]:
        """Return the limit of each leaf at a step."""
        now: dict[Any, Any] = {
            pattern: at(step) for pattern, at in self.at_step.items()
        }
        return [now.get(pattern, self.other) for pattern in self.patterns(tree)]


def by_leaf(name: str, limit: Any, least: float = 0, other: Any = None) -> Limits:
    """Check a limit: a number, an array, a schedule, or a mapping to these by path."""
    by_path = isinstance(limit, Mapping)
    given = {"*": limit}
    names = {"*": name}
    if by_path:
        given = {each: limit[each] for each in _checks.check_patterns(name, (*limit,))}
        names = {pattern: f"{name}[{pattern!r}]" for pattern in given}
    at_step = {
        pattern: bounds.as_schedule(names[pattern], each, least)
        for pattern, each in given.items()
    }
    return Limits(name, given, at_step, by_path, other)


def are_given(each: Sequence[Limits], tree: Tree) -> list[bool]:
    """Return for each leaf whether one of several limits is given."""
    of_leaves = zip(*(limits.patterns(tree) for limits in each), strict=True)
    return [any(pattern is not None for pattern in patterns) for patterns in of_leaves]


def check_order_by_path(
    low: Limits, high: Limits, tree: Tree, places: Collection[int]
) -> None:
    """Raise an error if limits by path that are no schedules do not go together."""
    if not (low.by_path or high.by_path):
        return
    leaves, _ = trees.leaves_of(tree)
    each = zip(leaves, low.patterns(tree), high.patterns(tree), strict=True)
    for i, (leaf, of_low, of_high) in enumerate(each):
        if i in places and of_low is not None and of_high is not None:
            _checks.check_order(low.given[of_low], high.given[of_high], leaf)


def of_rate(rate: bounds.Bound) -> Limits:
    """Check a share of the way to a limit, which is the same for all leaves."""
    at_step = {"*": bounds.as_schedule("rate", rate)}
    check_at_most("rate", rate, 1, "at most 1")
    return Limits("rate", {"*": rate}, at_step, by_path=False, other=None)


def check_at_most(name: str, value: Any, most: float, wanted: str) -> None:
    """Raise an error if a limit that is known is above `most`."""
    is_known = not (callable(value) or isinstance(value, jax.core.Tracer))
    if is_known and np.any(np.asarray(value) > most):
        raise ValueError(f"{name} must be {wanted}, got {short_repr(value)}")
