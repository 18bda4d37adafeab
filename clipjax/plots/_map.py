"""Norms of groups over the steps, as the colors of a map."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from clipjax._core.leaves import check_patterns, matches
from clipjax.monitoring import history as runs
from clipjax.monitoring.bad_steps import BadStep, places_of
from clipjax.plots import _drawing as draw
from clipjax.plots._cells import bad_steps_above, cells
from clipjax.plots._columns import kind_of, norms_by_group


def heat_map(
    history: runs.History,
    *,
    only: str | Sequence[str] | None = None,
    bad: Sequence[BadStep] = (),
    ax: Any = None,
) -> Any:
    """Draw the norm of each group over the steps as the color of a cell.

    Use it to see in one picture which layer a bad step came from, and when.

    Args:
      history: the norms, as in :func:`group_norms`.
      only: path patterns of the groups to draw, as in `["*/embed", "*/blocks/*",
        "*/head"]`. The rows follow the order of the patterns, and are sorted by name
        within each pattern. None, the default, draws all groups, sorted by name.
      bad: the bad steps to mark, as :func:`clipjax.bad_steps` returns them; none by
        default. A bad step that is not in `history` has no mark.
      ax: the axes to draw on. None, the default, makes a new figure.

    Returns:
      The axes, with one row for each group, and a color bar with a logarithmic scale
      beside them. A norm that is not finite has a color of its own, and a norm of 0 has
      no color. Each bad step has a triangle above the map, and a ring on the row of the
      group that `print` of the bad step names, if there is such a row. If there are
      more than 30 steps for each inch of the axes, a column shows the largest norm of
      several steps. At a step that `record_norms` did not see, such as a step whose
      gradients were only accumulated, the map repeats the norms of the step before.

    Raises:
      TypeError: `history` is not a history, has no groups, or has values that are not
        real numbers; `ax` is not one of Matplotlib's axes.
      ValueError: no group matches `only`, there are no steps, or groups differ in their
        number of steps.

    See Also:
      :func:`group_norms` draws lines; :func:`bad_steps` draws the norms of the bad
      steps only.

    Example:
      >>> from clipjax import plots
      >>> norms = {"embed": [2.0, 1.0], "blocks/0": [0.5, 0.1], "blocks/1": [1.0, 1.0]}
      >>> ax = plots.heat_map(norms, only=["embed", "blocks/*"])
      >>> [label.get_text() for label in ax.get_yticklabels()]
      ['embed', 'blocks/0', 'blocks/1']
    """
    columns, names, values = norms_by_group(history, only)
    rows = {name: values[key] for key, name in names.items()}
    in_order = draw.in_order(rows)
    if only is not None:
        patterns = check_patterns("only", only)
        in_order.sort(key=lambda name: [matches(x, name) for x in patterns].index(True))
    norms_by_row = np.stack([rows[name] for name in in_order])
    if not norms_by_row.size:
        raise ValueError("history must have at least one step")
    firsts = {name.partition("/")[0] for name in in_order}
    has_one_kind = len(firsts) == 1 and all("/" in name for name in in_order)
    of = f" of {firsts.pop()}" if has_one_kind else ""
    labels = [name.partition("/")[2] if of else name for name in in_order]
    keys = {name: key for key, name in names.items()}
    of_bad = {step.recorder for step in bad}
    recorders = {name: _label_in(columns, name, names) for name in of_bad}
    places = _places(columns, bad, recorders)
    marked = [
        (place, row)
        for place, step in places
        for row, name in enumerate(in_order)
        if _is_named(keys[name], step, recorders[step.recorder])
    ]
    ax = draw.new_axes(ax, height=1.4 + 0.3 * max(4, len(labels)))
    cells(ax, norms_by_row, f"norm{of}")
    ax.set_yticks(range(len(labels)), labels)
    ax.set_xlabel("step")
    return bad_steps_above(ax, [place for place, _ in places], marked)


def _label_in(
    columns: Mapping[str, Any], recorder: str, drawn: Iterable[str]
) -> str | None:
    """Return what the metrics of a recorder begin with, or None without a counter.

    A user may have put something in front of them, such as "train/". Then it is the
    recorder with the fewest names, and one whose norms are drawn.
    """
    counters = [key for key in columns if f"/{key}".endswith(f"/{recorder}/steps")]
    labels = [key.removesuffix("/steps") for key in counters]

    def order(label: str) -> tuple[int, bool]:
        is_drawn = any(key.startswith(f"{label}/") for key in drawn)
        return label.count("/"), not is_drawn

    return min(labels, key=order, default=None)


def _places(
    columns: Mapping[str, Any],
    bad: Sequence[BadStep],
    recorders: Mapping[str, str | None],
) -> list[tuple[int, BadStep]]:
    """Return bad steps with their places in a history, which may begin later."""
    places = []
    for step in bad:
        label = recorders[step.recorder]
        if label is None:
            places.append((step.step, step))
            continue
        counts = runs.per_step(columns, f"{label}/steps").tolist()
        if step.step + 1 in counts:
            places.append((counts.index(step.step + 1), step))
    return places


def _is_named(key: str, step: BadStep, label: str | None) -> bool:
    """Return whether the text of a bad step names the group of a metric.

    What `record_norms` has measured has a word for its kind in front.
    """
    of_probes, of_groups = places_of(step)
    _, layer, began_in = of_probes if of_probes.layer else of_groups
    if not layer or label is None:
        return bool(layer) and key == layer
    kind, _, group = key.removeprefix(f"{label}/").partition("/")
    is_own = key.startswith(f"{label}/") and group == layer
    return is_own and kind_of(kind) in ("", began_in)
