"""What the metrics of a history are of: clips, skips, groups and probes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from clipjax._core.leaves import check_patterns, matches
from clipjax._core.messages import a_few, short_repr
from clipjax.monitoring import history as runs
from clipjax.plots import _drawing as draw


def norm_in(columns: Mapping[str, Any]) -> str:
    """Return the key of the only clip's norm, else of the only norm."""
    recorded = recorded_in(columns)  # among them a layer may be called "norm"
    ends = [key for key in columns if key == "norm" or key.endswith("/norm")]
    of_groups = list(filter(_OF_CLIPS.fullmatch, ends))
    found = [key for key in ends if key not in (*recorded, *of_groups)]
    of_skips = [f"{skip}/norm" for skip in skips_in(columns)]
    of_clips = [key for key in found if key not in of_skips]
    chosen = of_clips or found or recorded
    if len(chosen) != 1:
        listed = a_few(chosen or list(columns)) or "none"
        raise ValueError(f"name must say which norm to draw, of {listed}")
    return chosen[0]


def skips_in(columns: Mapping[str, Any]) -> list[str]:
    """Return the names of the transformations that skip steps."""
    ends = "/skipped"
    found = [key.removesuffix(ends) for key in columns if key.endswith(ends)]
    # A user's own "data/skipped" has no norm.
    return [skip for skip in found if f"{skip}/norm" in columns]


class Seen(NamedTuple):
    """A norm at each step, and what happened there."""

    norm: np.ndarray
    taken: np.ndarray  # whether what measures the norm saw the step
    skipped: np.ndarray
    shown: np.ndarray  # whether the norm is that of the step


def steps_seen(columns: Mapping[str, Any], key: str) -> Seen:
    """Return a norm at each step, with the norms of skipped steps from their skips."""
    norm = runs.per_step(columns, key)
    taken = runs.steps_taken(columns, key)
    skipped = np.zeros(norm.shape, bool)
    if not norm.size:
        return Seen(norm, taken, skipped, taken)
    label = runs.label_of(columns, key)
    own = key.removesuffix("/norm")
    is_recorded = key in recorded_in(columns)
    of_all = own == label or (is_recorded and key.rpartition("/")[0] == label)
    # The norm of a skip is that of all gradients.
    is_whole = label is None or (of_all and not kind_of(key))
    for skip in skips_in(columns):
        if not _may_be_around(skip, label):
            continue
        count = runs.per_step(columns, f"{skip}/skipped", key)
        is_new = np.diff(count, prepend=count[0]) > 0
        # A history may begin in the middle of a run.
        last = f"{skip}/skipped_last"
        first = runs.per_step(columns, last) if last in columns else count
        is_new[0] = first[0] > 0
        skipped |= is_new
        if label is not None and f"{skip}/steps" in columns:
            counters = (runs.per_step(columns, f"{x}/steps") for x in (label, skip))
            own_count, all_steps = (counter[0] for counter in counters)
            taken[0] &= not is_new[0] or own_count == all_steps
        unseen = is_new if label is None else is_new & ~taken
        of_skip = runs.per_step(columns, f"{skip}/norm", key)
        norm = np.where(unseen & is_whole, of_skip, norm)
    return Seen(norm, taken, skipped, taken | (skipped & is_whole))


def _may_be_around(skip: str, label: str | None) -> bool:
    """Return whether a skip may be around a transformation.

    One with more names is of another optimizer, or of a part of this one.
    """
    names, own = (each.split("/")[:-1] for each in (skip, label or skip))
    return own[: len(names)] == names


def limits_in(columns: Mapping[str, Any], own: str, key: str) -> np.ndarray:
    """Return the threshold at each step, NaN where it is not known."""
    if f"{own}/threshold" in columns:
        return runs.per_step(columns, f"{own}/threshold", key)
    # Groups have thresholds of their own.
    has_groups = _OF_CLIPS.fullmatch(f"{own}/*/norm") is not None
    if not has_groups and {f"{own}/norm_after", f"{own}/scale"} <= {*columns}:
        after = runs.per_step(columns, f"{own}/norm_after", key)
        return np.where(runs.per_step(columns, f"{own}/scale", key) < 1, after, np.nan)
    return np.array(np.nan)


def clipped_steps(
    columns: Mapping[str, Any], own: str, key: str, norm: np.ndarray
) -> np.ndarray:
    if f"{own}/scale" in columns:
        return runs.per_step(columns, f"{own}/scale", key) < 1
    return norm > runs.per_step(columns, f"{own}/threshold", key)


# A group, too, may be called "steps".
_RECORDED = re.compile(rf"({runs.RECORDER}/)(?!steps$).+")
_OF_CLIPS = re.compile(r"((?:.*?/)??clip_by_group_norm(?:_\d+)?/).+/norm")


def recorded_in(columns: Mapping[str, Any]) -> list[str]:
    """Return the keys of norms that `record_norms` has measured."""
    return list(filter(_RECORDED.fullmatch, columns))


def group_names_in(columns: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the groups whose norms are among metrics, by key."""
    recorded = recorded_in(columns)
    kind, end = (_RECORDED, "") if recorded else (_OF_CLIPS, "/norm")
    found = {key: match[1] for key in columns if (match := kind.fullmatch(key))}
    # Of several recorders, those with a number or a name keep it.
    labels = {*found.values()}
    first = labels.pop() if len(labels) == 1 else "record_norms/"
    return {key: key.removeprefix(first).removesuffix(end) for key in found}


def norms_by_group(
    history: runs.History, only: str | Sequence[str] | None
) -> tuple[Mapping[str, Any], dict[str, str], dict[str, np.ndarray]]:
    """Return a history by name, names of groups by key, and their norms by key."""
    columns = runs.columns_of(history)
    recorded = group_names_in(columns)
    has_counters = any(key.endswith("/steps") for key in columns)
    if not recorded and columns and (has_counters or columns is not history):
        raise TypeError(
            "history must be norms by name, or metrics with record_norms or groups, "
            f"got {short_repr(history)}"
        )
    names = recorded or {key: key for key in columns}
    if only is not None:
        patterns = check_patterns("only", only)
        chosen = {
            key: name
            for key, name in names.items()
            if any(matches(each, name) for each in patterns)
        }
        if not chosen:
            raise ValueError(
                f"only: {only!r} matches none of {a_few(list(names.values()))}"
            )
        names = chosen
    values = {key: runs.per_step(columns, key) for key in names}
    if len({x.shape for x in values.values()}) != 1:
        raise ValueError(
            "history must have one or more groups with equally many steps, got "
            f"{list(names.values())[:20]}"
        )
    return columns, names, values


# What `record_norms` measures beside updates.
_KINDS = re.compile(rf"(?:{runs.RECORDER}/)?(params|ratio|forward|backward)(?:/.*)?")


def kind_of(name: str) -> str:
    """Return the kind of a recorded norm, "" for gradients and updates."""
    found = _KINDS.fullmatch(name)
    return found[1] if found else ""


def kinds_of(columns: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Return the kinds of groups in a history; those of a clip have none."""
    recorded = bool(recorded_in(columns))
    return {name: kind_of(name) if recorded else "" for name in names}


LABELS = {
    "params": "norm of the weights",
    "ratio": "norm of the update / norm of the weights",
    "forward": "norm of the activations",
    "backward": "norm of the activations' gradient",
}


# In the order of time.
_ALL = {
    "forward": "all of the forward pass",
    "backward": "all of the backward pass",
    "": "all groups",
}


def bad_groups_in(columns: Mapping[str, Any], like: str) -> dict[float, str]:
    """Return which groups are not finite, by step, if the history has groups."""
    points = {}
    for key, name in group_names_in(columns).items():
        taken = runs.steps_taken(columns, key)
        norms = runs.per_step(columns, key, like)
        points[name] = np.flatnonzero(taken), norms[taken]
    return bad_groups(points, kinds_of(columns, points))


def bad_groups(points: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[float, str]:
    """Return which groups are not finite, by step.

    If a step broke in the forward pass, everything after it is not finite, too, so that
    only the kind that comes first in time is named.
    """
    causes: dict[float, str] = {}
    for kind in _ALL:
        names = [name for name in points if kinds[name] == kind]
        bad: dict[float, list[str]] = {}
        for name in names:
            x, y = points[name]
            for step in x[~np.isfinite(y)].tolist():
                bad.setdefault(step, []).append(name)
        for step, found in bad.items():
            some = draw.words(found)
            causes.setdefault(step, _ALL[kind] if found == names else some)
    return causes if len(points) > 1 else {}
