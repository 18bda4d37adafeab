"""Which state of an old chain becomes which state of a new one."""

from __future__ import annotations

import itertools
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
    parts = list(of_old), list(of_new)
    taken_away = {now: was for was, now in _around(*parts[::-1]).items()}
    renamed = _around(*parts) or taken_away
    pairs: _Pairs = []
    for was in parts[0]:
        now = renamed.get(was, was)
        found, of_old[was], of_new[now] = _in_order(of_old[was], of_new.get(now, []))
        pairs += found
    # What is left of old parts, and the new ones that each may have become.
    related = {
        was: {
            now
            for now, states in of_new.items()
            if states and was != now and _is_related(was, now, *parts)
        }
        for was, states in of_old.items()
        if states
    }
    left: _States = []
    for reached in dict.fromkeys(map(frozenset, related.values())):
        group = [x for x, its in related.items() if its == reached or its & reached]
        before = _in_chain(olds, [x for part in group for x in of_old[part]])
        after = _in_chain(news, [x for part in reached for x in of_new[part]])
        if len(group) > 1 and len(reached) > 1:
            raise _unclear(before, after)
        found, without, _ = _in_order(before, after)
        pairs += found
        left += without
    return pairs, _in_chain(olds, left)


def _in_chain(states: _States, some: _States) -> _States:
    """Return some of the states, in the order of the chain."""
    paths = {each.path for each in some}
    return [each for each in states if each.path in paths]


def _around(olds: Iterable[Words], news: Iterable[Words]) -> dict[Words, Words]:
    """Return old parts with the names that are around all of them in the new ones."""
    least, first = (min(each, key=len, default=()) for each in (olds, news))
    names = first[: max(0, len(first) - len(least))]
    pairs = {part: (*names, *part) for part in olds}
    is_whole = {*pairs.values()} == {*news} and not {*olds} & {*news}
    return pairs if is_whole else {}


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


def _in_order(olds: _States, news: _States) -> tuple[_Pairs, _States, _States]:
    """Match states of one kind and one part, in the order of the chain.

    If each has other paths and shapes than the others, these tell which is which, and
    also if there are not equally many, or if labels on one side have no order.

    Returns:
      The pairs, and the states on each side that have no such state on the other one.
    """
    has_order = not (_have_labels(olds) or _have_labels(news))
    of_old, of_new = (grouped(each, _shapes) for each in (olds, news))
    each_is_one = len(of_old) == len(olds) and of_old.keys() == of_new.keys()
    # Single arrays have no paths of their own.
    are_arrays = bool(olds) and () in olds[0].leaves
    if len(olds) == len(news) and (has_order or len(olds) == 1):
        if are_arrays or not each_is_one:
            return list(zip(olds, news, strict=True)), [], []
    elif are_arrays and news:
        raise _unclear(olds, news)
    pairs: _Pairs = []
    left: _States = []
    for shapes, same in of_old.items():
        like = of_new.pop(shapes, [])
        if not like:
            left += same
        elif len(same) != len(like) or not (has_order or len(same) == 1):
            raise _unclear(olds, news)
        else:
            pairs += zip(same, like, strict=True)
    return pairs, left, list(itertools.chain(*of_new.values()))


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


def _shapes(state: FoundState) -> tuple[Any, ...]:
    return tuple((key, np.shape(x)) for key, x in sorted(state.leaves.items()))
