"""The columns of a history: the metrics of each transformation at all steps."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from clipjax._core.leaves import a_few, check_patterns, matches, short_repr
from clipjax.monitoring import history as runs
from clipjax.monitoring.groups import natural_order


class Columns(NamedTuple):
    """The metrics in a history by key, and the names of their transformations."""

    values: dict[str, np.ndarray]  # (steps,)
    labels: dict[str, str]  # by key, too


def columns_of(history: runs.History) -> Columns:
    """Return the metrics in a history, without a user's own entries."""
    given = runs.columns_of(history)
    labels = {key: runs.label_of(given, key) for key in given}
    known = {key: label for key, label in labels.items() if label is not None}
    values = {key: runs.per_step(given, key) for key in known}
    if not any(x.size for x in values.values()):
        raise ValueError(
            "history must have the metrics of at least one step, got "
            f"{short_repr(history)}"
        )
    return Columns(values, known)


def key_of_norm(columns: Columns, name: str | None) -> str:
    """Return the key that a name means, or that of the only norm if it is None."""
    if name is not None:
        return runs.key_of(columns.values, name)
    of_all = [key for key, x in columns.labels.items() if key == f"{x}/norm"]
    of_clips = [
        key for key in of_all if f"{columns.labels[key]}/scale" in columns.values
    ]
    found = of_clips or of_all or list(_recorded(columns))
    if len(found) != 1:
        listed = a_few(found or list(columns.values))
        raise ValueError(f"name must say which norm to draw, of {listed}")
    return found[0]


def skips_around(columns: Columns, key: str) -> list[str]:
    """Return the names of the skips that may be around the transformation of a metric.

    A skip with another name in front belongs to another optimizer. For a skip it is
    that skip alone, since others may belong to other parts of `optax.partition`.
    """
    own, known = columns.labels[key], {*columns.labels.values()}
    skips = [x for x in known if f"{x}/skipped_last" in columns.values]
    if own in skips:
        return [own]
    return [x for x in skips if own.startswith(x[: x.rfind("/") + 1])]


def was_skipped(columns: Columns, skip: str) -> np.ndarray:
    """Return for each row whether a skip skipped its step."""
    key = f"{skip}/skipped_last"
    return runs.steps_taken(columns.values, key) & (columns.values[key] > 0)


def was_seen(columns: Columns, key: str) -> np.ndarray:
    """Return for each row whether its metric is that of a step that was seen.

    The counter does not tell at the first row of a tail, or if every tenth row was
    kept. There NaN is a norm that is not finite, unless the step was skipped although
    its gradients were finite.
    """
    saw = runs.steps_taken(columns.values, key)
    for skip in skips_around(columns, key):
        norm = columns.values.get(f"{skip}/norm", np.nan)
        is_frozen = was_skipped(columns, skip) & np.isfinite(norm)
        saw &= ~(is_frozen & np.isnan(columns.values[key]))
    return saw


def groups_of(columns: Columns, only: str | Sequence[str] | None) -> dict[str, str]:
    """Return the names of the groups that `only` selects, in its order, by key."""
    groups = _recorded(columns)
    for label in {*columns.labels.values()} if not groups else ():
        groups |= groups_in(columns, label)
    if not groups:
        raise TypeError(
            "history must have the norms of groups, which record_norms('leaf') "
            f"measures, got {a_few(list(columns.values))}"
        )
    # Of several transformations, each keeps its name.
    labels = {columns.labels[key] for key in groups}
    first = f"{labels.pop()}/" if len(labels) == 1 else ""
    in_order = sorted(groups, key=natural_order)
    names = {key: groups[key].removeprefix(first) for key in in_order}
    if only is None:
        return names
    chosen = {
        key: name
        for pattern in check_patterns("only", only)
        for key, name in names.items()
        if matches(pattern, name)
    }
    if not chosen:
        raise ValueError(f"only: {only!r} matches none of {a_few([*names.values()])}")
    return chosen


def groups_in(columns: Columns, label: str) -> dict[str, str]:
    """Return the names of the groups of a clip by key, none if it has no groups."""
    return {
        key: key.removesuffix("/norm")
        for key in columns.values
        if key.startswith(f"{label}/") and key.endswith("/norm")
        if key != f"{label}/norm"
    }


def _recorded(columns: Columns) -> dict[str, str]:
    """Return the keys of what `record_norms` has measured."""
    return {
        key: key
        for key, label in columns.labels.items()
        if label.rpartition("/")[2].startswith("record_norms")
        and key not in (f"{label}/steps", f"{label}/nonfinite_count")
    }


def kind_in(names: Sequence[str]) -> str:
    """Return what is in front of all names, such as "gradients", or ""."""
    firsts = {name.partition("/")[0] if "/" in name else "" for name in names}
    return firsts.pop() if len(firsts) == 1 else ""
