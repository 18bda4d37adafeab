"""Lines over the steps: a norm and its threshold, and the norms of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clipjax.monitoring import history as runs
from clipjax.plots import _drawing as draw
from clipjax.plots._columns import (
    LABELS,
    bad_groups,
    bad_groups_in,
    clipped_steps,
    kind_of,
    kinds_of,
    limits_in,
    norm_in,
    norms_by_group,
    recorded_in,
    skips_in,
    steps_seen,
)


def norms(history: runs.History, name: str | None = None, *, ax: Any = None) -> Any:
    """Draw a norm over the steps, its threshold, and what was clipped and skipped.

    Use it to see whether a threshold suits a run: how many steps it clips, and which.

    Args:
      history: what :func:`clipjax.metrics` returned at each step: a list of dicts, or
        one dict that a `scan` stacked.
      name: the norm to draw: a transformation, such as `"zclip"`, or a whole key, such
        as `"record_norms/gradients/head"`. None, the default, draws the norm of the
        only clip; without a clip, the only norm.
      ax: the axes to draw on. None, the default, makes a new figure.

    Returns:
      The axes. The threshold is the metric `threshold` of the transformation. If it has
      no such metric, the threshold is drawn at the norm after the clip, for the steps
      that were clipped; the groups of `clip_by_group_norm` have no common threshold.
      The legend has the percentage of finite norms that were clipped, and, if a step
      was skipped, the percentage of all steps that were skipped. A clip within a skip
      does not see a skipped step, which is drawn at the norm that the skip measured.
      Other numbers, such as the norm of a group, have no point there. If the history
      has several optimizers, give each a name by :func:`named`: the skips of another
      optimizer without a name would be drawn, too.

      A norm that is not finite is drawn as a cross at the top. If the history has norms
      of groups, as :func:`clipjax.record_norms` measures, text below a cross names the
      groups that are not finite. If the same groups are not finite at several steps,
      the text stands only at the first of these steps. There are at most three texts.

    Raises:
      TypeError: `history` is not a history, its values are not real numbers, or `ax` is
        not one of Matplotlib's axes.
      ValueError: `name` is needed to choose among several norms; nothing in `history`
        has this name; there are no steps, or metrics differ in their number of steps.

    See Also:
      :func:`group_norms` draws a line for each layer; :func:`clipjax.series` returns
      the numbers; :func:`clipjax.suggest` compares thresholds.

    Example:
      >>> from clipjax import plots
      >>> norms, thresholds = [0.5, 4.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.5]
      >>> history = {"zclip/norm": norms, "zclip/threshold": thresholds}
      >>> ax = plots.norms(history)
      >>> [line.get_label() for line in ax.lines]
      ['norm', 'clipped (50%)', 'threshold']
    """
    columns = runs.columns_of(history)
    key = norm_in(columns) if name is None else runs.key_of(columns, name)
    own = key.removesuffix("/norm")
    norm, taken, skipped, shown = steps_seen(columns, key)
    if not norm.size:
        raise ValueError("history must have at least one step")
    skips = skips_in(columns)
    steps = np.arange(norm.size)
    limits = np.broadcast_to(limits_in(columns, own, key), norm.shape)
    has_clips = own not in skips and {f"{own}/scale", f"{own}/threshold"} & {*columns}
    is_clipped = clipped_steps(columns, own, key, norm) if has_clips else False
    ax = draw.new_axes(ax)  # after all errors
    draw.line(ax, steps[shown], norm[shown], color=draw.GREY, linewidth=1, label="norm")
    if has_clips:
        finite = taken & ~skipped & np.isfinite(norm)
        clipped = finite & is_clipped
        label = f"clipped ({_percent(clipped.sum(), finite.sum())})"
        style = {"marker": "^", "color": draw.COLORS[1], "mew": 0}
        draw.marks(ax, steps, norm, clipped, label=label, **style)
    if skipped.any():
        style = {"marker": "o", "color": draw.COLORS[3], "mfc": "none"}
        drawn = skipped & shown
        seen = drawn & np.isfinite(norm)
        label = f"skipped ({_percent(skipped.sum(), skipped.size)})"
        draw.marks(ax, steps, norm, seen, label=label, **style)
        draw.at_top(ax, steps[drawn & ~seen], ms=5, **style)
    known = taken & ~np.isnan(limits)
    if known.any():
        least = limits[known].min()
        label = "threshold"
        # Rounding and margins of a fixed threshold are smaller.
        if limits[known].max() <= 1.001 * least:
            label = f"threshold {least:.4g}"
            limits = np.full(norm.shape, least)
            known = taken
        style = {"color": draw.COLORS[0], "zorder": 2.5, "label": label}
        draw.line(ax, steps[known], limits[known], **style, **draw.BOUND)
    kind = kind_of(key) if key in recorded_in(columns) else ""
    ax.set(xlabel="step", ylabel=LABELS.get(kind, "norm of the gradient"))
    bad = {*steps[shown & ~np.isfinite(norm)].tolist()}
    causes = {x: text for x, text in bad_groups_in(columns, key).items() if x in bad}
    return draw.finished(ax, [(steps[shown], norm[shown])], causes=causes)


def _percent(count: int | np.integer[Any], of: int | np.integer[Any]) -> str:
    return f"{100 * count / max(1, of):.3g}%"


def group_norms(
    history: runs.History,
    *,
    only: str | Sequence[str] | None = None,
    ax: Any = None,
) -> Any:
    """Draw the norm of each group, such as a layer, as a line over the steps.

    Use it to see which layers have large gradients, and how the norms of the layers
    develop.

    Args:
      history: what :func:`clipjax.metrics` returned at each step, in a list or stacked
        by a `scan`, if the chain has :func:`clipjax.record_norms` with groups or
        :func:`clipjax.clip_by_group_norm`. It may also be a mapping from the names of
        groups to their norms, `(steps,)`.
      only: path patterns of the groups to draw, as in `"gradients/blocks/*"`. None, the
        default, draws all groups.
      ax: the axes to draw on. None, the default, makes a new figure.

    Returns:
      The axes, with one line for each group. Groups are sorted by name, `layer_2`
      before `layer_10`. If there are more than 8 groups, the 8 with the largest norms
      are colored and in the legend, and the other lines are grey. A step that was
      skipped or is accumulated adds no point to a line. A step whose `update` got no
      `taps` adds no point to the line of a probe.

      A norm that is not finite is drawn as a cross at the top, and text below the cross
      names the groups that are not finite. If the same groups are not finite at several
      steps, the text stands only at the first of these steps. There are at most three
      texts. If a norm that a probe measured in the forward pass is not finite, the text
      names only such probes, because the forward pass comes first. Otherwise it names
      the probes whose norms in the backward pass are not finite or, if there are none,
      the groups of gradients.

      If the history has several kinds of norms, each kind has its own line style:
      gradients or updates are solid, weights dashed, ratios long-dashed, probes of the
      forward pass, such as `"forward/blocks/3"`, dotted, and probes of the backward
      pass dash-dotted. Activations are often larger than gradients, and ratios are
      smaller. Therefore, if the history has ratios or probes, the norms of each kind
      are divided by the largest norm of this kind before the 8 colored lines are
      chosen.

    Raises:
      TypeError: `history` is not a history, has no groups, or has values that are not
        real numbers; `ax` is not one of Matplotlib's axes.
      ValueError: no group matches `only`, or groups differ in their number of steps.

    See Also:
      :func:`heat_map` draws the same norms as colors, for many layers; :func:`norms`
      draws one norm and its threshold.

    Example:
      >>> from clipjax import plots
      >>> ax = plots.group_norms({"encoder": [2.0, 1.0], "head": [0.5, 0.1]})
      >>> [line.get_label() for line in ax.lines]
      ['encoder', 'head']
    """
    columns, names, values = norms_by_group(history, only)
    labels = {key: runs.label_of(columns, key) for key in names}
    one_of_each = {label: key for key, label in labels.items()}
    taken = {x: runs.steps_taken(columns, key) for x, key in one_of_each.items()}
    found = {name: values[key][taken[labels[key]]] for key, name in names.items()}
    points = {name: (np.arange(len(x)), x) for name, x in found.items()}
    kinds = kinds_of(columns, found)
    points = _where_probes_saw(points, kinds)
    ax = draw.new_axes(ax)
    label = "norm, or ratio of two norms" if "ratio" in kinds.values() else "norm"
    if len({*kinds.values()}) == 1:
        label = LABELS.get(kinds[next(iter(kinds))], label)
    ax.set(xlabel="step", ylabel=label)
    of_one_unit = {*kinds.values()} <= {"", "params"}
    return draw.lines(
        ax,
        points,
        "groups" if of_one_unit else "groups, by kind",
        sizes=draw.largest(points) if of_one_unit else _sizes(points, kinds),
        styles=_styles(kinds),
        causes=bad_groups(points, kinds),
    )


def _sizes(points: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, float]:
    """Return the largest norm of each group, divided by the largest of its kind.

    Ratios and probes have other units than gradients.
    """
    largest = draw.largest(points)
    of_kind: dict[str, float] = {}
    for name, kind in kinds.items():
        of_kind[kind] = max(of_kind.get(kind, 0), largest[name])
    return {name: x / (of_kind[kinds[name]] or 1) for name, x in largest.items()}


# Line styles, by the kind of a norm.
_STYLES: dict[str, Any] = {
    "params": "--",
    "ratio": (0, (8, 3)),
    "forward": ":",
    "backward": "-.",
}


def _styles(kinds: Mapping[str, str]) -> dict[str, Any]:
    """Return the line styles of groups, if they are of several kinds."""
    several = len({*kinds.values()}) > 1
    return {name: _STYLES.get(kind, "-") for name, kind in kinds.items() if several}


def _where_probes_saw(
    points: Mapping[str, Any], kinds: Mapping[str, str]
) -> dict[str, Any]:
    """Leave out the steps at which probes saw nothing, since `update` got no taps."""
    probes = {x for x, kind in kinds.items() if kind in ("forward", "backward")}
    sizes = {points[name][0].size for name in probes}
    if len(sizes) != 1:  # none, or of recorders with other steps
        return {**points}
    seen = np.any([points[name][1] != 0 for name in probes], axis=0)
    return {
        name: (x[seen], y[seen]) if name in probes else (x, y)
        for name, (x, y) in points.items()
    }
