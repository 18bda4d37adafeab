"""Which state of an old chain becomes which state of a new one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

from clipjax._core.messages import a_few
from clipjax.adoption.states import FoundState, Words

_States: TypeAlias = list[FoundState]
_Pairs: TypeAlias = list[tuple[FoundState, FoundState]]


def grouped(
    states: _States, key_of: Callable[[FoundState], tuple[Any, ...]]
) -> dict[tuple[Any, ...], _States]:
    """Return the states of each key, in the order of the chain."""
    groups: dict[tuple[Any, ...], _States] = {}
    for each in states:
        groups.setdefault(key_of(each), []).append(each)
    return groups


def pairs_of(olds: _States, news: _States) -> tuple[_Pairs, _States]:
    """Match states of one kind, by the parts that they belong to, and in their order.

    States of equal parts are matched. Names that only one of two parts has are looked
    through, as of a chain that gets a name, or leaves a partition.

    Returns:
      The pairs, and the old states that become none of the new ones.
    """
    of_old, of_new = (grouped(each, lambda x: x.parts) for each in (olds, news))
    pairs: _Pairs = []
    left: _States = []
    for part in of_old.keys() & of_new.keys():
        found, without = _in_order(of_old[part], of_new[part])
        pairs += found
        left += without
    others = [part for part in of_new if part not in of_old]
    # Old parts, each with the new ones that it may have become.
    related = {
        part: {x for x in others if _is_related(part, x, of_old, of_new)}
        for part in of_old
        if part not in of_new
    }
    while related:
        part, reached = related.popitem()
        group = [part]
        for other, its in list(related.items()):
            if its & reached:
                group.append(other)
                reached |= related.pop(other)
        before = [each for each in olds if each.parts in group]
        after = [each for each in news if each.parts in reached]
        if len(group) > 1 and len(reached) > 1:
            raise _unclear(before, after)
        found, without = _in_order(before, after)
        pairs += found
        left += without
    gone = {each.path for each in left}
    return pairs, [each for each in olds if each.path in gone]


def _is_related(
    was: Words, now: Words, olds: Iterable[Words], news: Iterable[Words]
) -> bool:
    """Return whether one of two parts is the other one without some of its names.

    The shorter one has states outside of the names, if it has others of its own side
    within names: these are not looked through.
    """
    ways = (was, now, olds), (now, was, news)
    return any(
        _is_within(short, long)
        and not any(_is_within(short, other) for other in own if other != short)
        for short, long, own in ways
    )


def _is_within(short: Words, long: Words) -> bool:
    """Return whether the names of a part are among those of another, in their order."""
    rest = iter(long)
    return all(name in rest for name in short)


def _in_order(olds: _States, news: _States) -> tuple[_Pairs, _States]:
    """Match states of one kind and one part, in the order of the chain.

    If there are not equally many, or if labels on one side have no order, match states
    with the same paths and shapes.

    Returns:
      The pairs, and the old states without any that has the same paths and shapes.
    """
    has_order = not (_have_labels(olds) or _have_labels(news))
    if len(olds) == len(news) and (has_order or len(olds) == 1):
        return list(zip(olds, news, strict=True)), []
    if news and () in olds[0].leaves:  # single arrays have no paths of their own
        raise _unclear(olds, news)
    pairs: _Pairs = []
    left: _States = []
    for was in olds:
        same, like = (
            [each for each in states if _shapes(each) == _shapes(was)]
            for states in (olds, news)
        )
        if not like:
            left.append(was)
        elif len(same) != len(like) or not (has_order or len(same) == 1):
            raise _unclear(olds, news)
        else:
            pairs.append((was, like[[x is was for x in same].index(True)]))
    return pairs, left


def _have_labels(states: _States) -> bool:
    """Return whether states have several labels, whose order is the alphabet's."""
    labels = {tuple(x for x in each.parts if x.endswith("/")) for each in states}
    return len(labels) > 1


def _unclear(olds: _States, news: _States) -> ValueError:
    return ValueError(
        "old: it is not known which of the old states become which of the new ones: "
        f"old has {a_few(olds)}, new has {a_few(news)}. There must be equally many of "
        "one kind and one shape, and of one part"
    )


def _shapes(state: FoundState) -> dict[Words, tuple[int, ...]]:
    return {key: np.shape(x) for key, x in state.leaves.items()}
