"""Which state of an old chain becomes which state of a new one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
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


def pairs_of(
    olds: _States, news: _States, outer: tuple[int, int]
) -> tuple[_Pairs, _States]:
    """Match states of one kind, by the parts that they belong to, and in their order.

    Args:
      olds: the states in `old`.
      news: those in `new`.
      outer: how many of the outermost parts are around everything in each of the two.

    Returns:
      The pairs, and the old states of parts that are not in `news`.
    """
    # A chain that joins or leaves a partition, or `named`, keeps its order.
    has_no_parts = any(
        all(not each.parts[around:] for each in x)
        for x, around in zip((olds, news), outer, strict=True)
    )
    pairs: _Pairs = []
    for around in ((0, 0), outer):
        of_old, of_new = map(_by_part, (olds, news), around)
        for part in [*of_old]:
            if len(of_old[part]) == len(of_new.get(part, [])):
                pairs += zip(of_old.pop(part), of_new.pop(part), strict=True)
        olds, news = (list(itertools.chain(*x.values())) for x in (of_old, of_new))
    if olds and news and has_no_parts:
        of_old, of_new = {(): olds}, {(): news}
    left: _States = []
    for part, was in of_old.items():
        found, without = _in_order(was, of_new.get(part, []))
        pairs += found
        left += without
    return pairs, left


def around_all(states: _States, others: _States) -> int:
    """Return how many of the outermost parts are names around all states.

    A label is none of these, since beside it there may be parts without a state, and
    neither is a name that is among the parts of the others.
    """
    taken = {name for each in others for name in each.parts}
    columns = zip(*(each.parts for each in states), strict=False)
    outer = 0
    for names in columns:
        is_one = len({*names}) == 1
        if not is_one or names[0] in taken or names[0].endswith("/"):
            break
        outer += 1
    return outer


def _by_part(states: _States, outer: int) -> dict[tuple[Any, ...], _States]:
    """Return the states of each part, without a number of outermost parts."""
    return grouped(states, lambda each: each.parts[outer:])


def _in_order(olds: _States, news: _States) -> tuple[_Pairs, _States]:
    """Match states of one kind and one part, in the order of the chain.

    If there are not equally many, match states with the same paths and shapes.

    Returns:
      The pairs, and the old states without any that has the same paths and shapes.
    """
    has_order = not (_have_labels(olds) or _have_labels(news))
    if len(olds) == len(news) and (has_order or len(olds) == 1):
        return list(zip(olds, news, strict=True)), []
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
            raise ValueError(
                "old: it is not known which of the old states become which of the new "
                f"ones: old has {a_few(olds)}, new has {a_few(news)}. There must be "
                "equally many of one kind and one shape, and of one part"
            )
        else:
            pairs.append((was, like[[x is was for x in same].index(True)]))
    return pairs, left


def _have_labels(states: _States) -> bool:
    """Return whether states have several labels, whose order is the alphabet's."""
    labels = {tuple(x for x in each.parts if x.endswith("/")) for each in states}
    return len(labels) > 1


def _shapes(state: FoundState) -> dict[Words, tuple[int, ...]]:
    return {key: np.shape(x) for key, x in state.leaves.items()}
