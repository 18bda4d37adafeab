"""Draw norms over the steps, layer by layer, bad steps, and norms of output units.

The functions need Matplotlib, which `import clipjax` does not load. Each one draws on
the axes `ax`, or on a new figure if `ax` is None, and returns the axes, so that
`plots.norms(history).figure.savefig("norms.png")` saves a picture.

If the figure has a layout, such as "constrained", the legend is beside the axes, or
below them if the axes are narrow. Color-blind readers can tell the colors of lines,
`plots.COLORS`, apart. Text and marks have the color of the labels of the axes, so that
a figure in Matplotlib's `dark_background` is as readable as a light one. A scale is
logarithmic, and its label says so, if the largest value is more than 20 times the
smallest. A cross at the top of the axes is a value that is not finite.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clipjax import _drawing as draw
from clipjax._core.aliases import AutoAxes, Tree
from clipjax._core.bounds import constant
from clipjax._core.clip import least_inside
from clipjax._core.leaves import check_patterns, flatten, matches
from clipjax._core.messages import a_few, short_repr
from clipjax._core.units import (
    axes_of,
    check_axes,
    fan_in_of_matrices,
    map_units,
    norms_of,
    present,
)
from clipjax.monitoring import history as runs
from clipjax.monitoring.bad_steps import BadStep
from clipjax.monitoring.bad_steps import bad_steps as find_bad_steps

__all__ = ["COLORS", "bad_steps", "group_norms", "heat_map", "norms", "unit_norms"]

COLORS = draw.COLORS


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
      that were clipped. The legend has the percentage of finite norms that were
      clipped, and, if a step was skipped, the percentage of all steps that were
      skipped. A skipped step is drawn at the norm that the skip measured.

      A norm that is not finite is a cross at the top. If the history has norms of
      groups, as :func:`clipjax.record_norms` measures, text at a cross names the groups
      that are not finite. The text stands at the first cross of each set of groups.

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
    key = _norm_in(columns) if name is None else runs.key_of(columns, name)
    own = key.removesuffix("/norm")
    norm = runs.per_step(columns, key)
    if not norm.size:
        raise ValueError("history must have at least one step")
    taken = runs.steps_taken(columns, key)
    skips = _skips_in(columns)
    skipped = np.zeros(norm.shape, bool)
    for skip in skips:
        is_new = np.diff(runs.per_step(columns, f"{skip}/skipped", key), prepend=0) > 0
        norm = np.where(is_new, runs.per_step(columns, f"{skip}/norm", key), norm)
        skipped |= is_new
    steps = np.arange(norm.size)
    shown = taken | skipped
    limits = np.broadcast_to(_limits_in(columns, own, key), norm.shape)
    has_clips = own not in skips and {f"{own}/scale", f"{own}/threshold"} & {*columns}
    is_clipped = _is_clipped(columns, own, key, norm) if has_clips else False
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
        seen = skipped & np.isfinite(norm)
        label = f"skipped ({_percent(skipped.sum(), skipped.size)})"
        draw.marks(ax, steps, norm, seen, label=label, **style)
        draw.at_top(ax, steps[skipped & ~seen], ms=5, **style)
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
    kind = _kind_of(key) if key in _recorded_in(columns) else ""
    ax.set(xlabel="step", ylabel=_LABELS.get(kind, "norm of the gradient"))
    bad = {*steps[shown & ~np.isfinite(norm)].tolist()}
    causes = {x: text for x, text in _causes_in(columns, key).items() if x in bad}
    return draw.finished(ax, [(steps[shown], norm[shown])], causes=causes)


def _percent(count: int | np.integer[Any], of: int | np.integer[Any]) -> str:
    return f"{100 * count / max(1, of):.3g}%"


def group_norms(
    history: runs.History,
    *,
    only: str | Sequence[str] | None = None,
    ax: Any = None,
) -> Any:
    """Draw the norm of each group, such as a layer, over the steps, as one line.

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

      A norm that is not finite is a cross at the top. Text at the first cross of each
      set of groups, at most three times, names the groups that are not finite. If
      probes were not finite in the forward pass, the text names only these probes,
      because the forward pass comes first. Otherwise it names the probes of the
      backward pass, and if those were finite, the groups of gradients.

      If the history has several kinds of norms, each kind has its own line style:
      gradients or updates are solid, weights dashed, ratios long-dashed, probes of the
      forward pass, such as `"forward/blocks/3"`, dotted, and probes of the backward
      pass dash-dotted. If ratios or probes are among them, the 8 colored lines are
      those with the largest norms in proportion to the largest of their kind, since
      activations are often larger than gradients, and ratios are smaller.

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
    columns, names, values = _norms_by_group(history, only)
    labels = {key: runs.label_of(columns, key) for key in names}
    one_of_each = {label: key for key, label in labels.items()}
    taken = {x: runs.steps_taken(columns, key) for x, key in one_of_each.items()}
    found = {name: values[key][taken[labels[key]]] for key, name in names.items()}
    points = {name: (np.arange(len(x)), x) for name, x in found.items()}
    recorded = bool(_recorded_in(columns))
    kinds = {name: _kind_of(name) if recorded else "" for name in found}
    points = _where_probes_saw(points, kinds)
    weights = [name for name, kind in kinds.items() if kind == "params"]
    ax = draw.new_axes(ax)
    label = "norm, or ratio of two norms" if "ratio" in kinds.values() else "norm"
    if len({*kinds.values()}) == 1:
        label = _LABELS.get(kinds[next(iter(kinds))], label)
    ax.set(xlabel="step", ylabel=label)
    causes = _causes(points, kinds)
    if {*kinds.values()} <= {"", "params"}:
        return draw.lines(ax, points, "groups", dashed=weights, causes=causes)
    return _lines_by_kind(ax, points, kinds, causes)


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
        default. Their steps are counted from the first step of `history`.
      ax: the axes to draw on. None, the default, makes a new figure.

    Returns:
      The axes, with one row for each group, and a color bar with a logarithmic scale
      beside them. A norm that is not finite has a color of its own, and a norm of 0 has
      no color. Each bad step has a triangle above the map, and a ring on the row of the
      group that `print` of the bad step names, if there is such a row. If there are
      more than 30 steps for each inch of the axes, a column shows the largest norm of
      several steps. A step that `record_norms` did not see, such as an accumulated one,
      repeats the norms of the step before.

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
    _, names, values = _norms_by_group(history, only)
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
    marked = [
        (step.step, row)
        for step in bad
        for row, name in enumerate(in_order)
        if _layer_named(step) in (name, name.partition("/")[2]) and _layer_named(step)
    ]
    ax = draw.new_axes(ax, height=1.4 + 0.3 * max(4, len(labels)))
    draw.cells(ax, norms_by_row, f"norm{of}")
    ax.set_yticks(range(len(labels)), labels)
    ax.set_xlabel("step")
    return draw.bad_steps_above(ax, [step.step for step in bad], marked)


def _layer_named(step: BadStep) -> str:
    """Return the group that the text of a bad step names, "" for none or several."""
    if layer := step._place()[1]:
        return layer
    not_finite = [x for x, norm in step.groups.items() if not np.isfinite(norm)]
    if len(not_finite) == 1:
        return not_finite[0]
    if not_finite or step.is_of_loss or not step.groups:
        return ""
    return max(step.groups, key=lambda name: step.groups[name])


def _norms_by_group(
    history: runs.History, only: str | Sequence[str] | None
) -> tuple[Mapping[str, Any], dict[str, str], dict[str, np.ndarray]]:
    """Return a history by name, names of groups by key, and their norms by key."""
    columns = runs.columns_of(history)
    recorded = _groups_in(columns)
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
_KINDS = re.compile("(?:record_norms[^/]*/)?(params|ratio|forward|backward)(?:/.*)?")


def _kind_of(name: str) -> str:
    """Return the kind of a recorded norm, "" for gradients and updates."""
    found = _KINDS.fullmatch(name)
    return found[1] if found else ""


# Line styles, by the kind of a norm.
_STYLES: dict[str, Any] = {
    "params": "--",
    "ratio": (0, (8, 3)),
    "forward": ":",
    "backward": "-.",
}


_LABELS = {
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


def _causes_in(columns: Mapping[str, Any], like: str) -> dict[float, str]:
    """Return which groups are not finite, by step, if `record_norms` measured them."""
    groups = _groups_in(columns)
    points = {}
    for key, name in groups.items():
        taken = runs.steps_taken(columns, key)
        norms = runs.per_step(columns, key, like)
        points[name] = np.flatnonzero(taken), norms[taken]
    return _causes(points, {name: _kind_of(name) for name in points})


def _causes(points: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[float, str]:
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


def _lines_by_kind(
    ax: Any,
    points: dict[str, Any],
    kinds: Mapping[str, str],
    causes: Mapping[float, str],
) -> Any:
    """Draw lines of several kinds, the largest of each kind in color."""
    largest = {
        name: np.max(y, initial=0, where=np.isfinite(y))
        for name, (_, y) in points.items()
    }
    of_kind = {
        kind: max(largest[name] for name in points if kinds[name] == kind)
        for kind in kinds.values()
    }
    scaled = {name: x / (of_kind[kinds[name]] or 1) for name, x in largest.items()}
    colors = draw.colors_of(scaled)
    styles = _STYLES if len(of_kind) > 1 else {}
    for name in [*(x for x in points if x not in colors), *colors]:
        own = {"color": colors.get(name), "linewidth": 1.4, "label": name}
        style = own if name in colors else {**draw.REST, "label": f"_{name}"}
        draw.line(ax, *points[name], linestyle=styles.get(kinds[name], "-"), **style)
    some = f"{len(colors)} of {len(points)} groups, the largest of their kind"
    title = "" if len(colors) == len(points) else some
    return draw.finished(ax, list(points.values()), title, causes)


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


def bad_steps(opt_state: Tree, *, ax: Any = None) -> Any:
    """Draw which groups the norm of each bad step came from, as bars.

    Use it after a run broke, or on its checkpoint, to see which layers had the largest
    gradients at the bad steps, and in which layer each step broke.

    Args:
      opt_state: an optimizer state, or a tree that contains one, as for
        :func:`clipjax.bad_steps`. A `record_norms` of the chain has to have groups, and
        `keep` above 0.
      ax: the axes to draw on. None, the default, makes a new figure.

    Returns:
      The axes, with one bar for each bad step, the oldest at the top. The parts of a
      bar are the groups, each as wide as its fraction of the squared norm. They are
      sorted and colored as in :func:`group_norms`. If groups are not finite, the bar is
      hatched, and is divided equally among these groups. The label in front of a bar is
      the norm of the step, or its loss if the loss was bad.

      If the model has probes, a second bar for each step has the norms that the probes
      measured. They are in the order of time: the forward pass from the first layer to
      the last, and then the backward pass from the last layer to the first. Cells whose
      norms are not finite are hatched. If the probes tell where the step broke, a star
      marks the place and text below the bar names it. A star between the two passes
      means that the step broke in the loss, or after the last probe of the model.

    Raises:
      TypeError: `opt_state` is traced, or `ax` is not one of Matplotlib's axes.
      ValueError: no `record_norms` in `opt_state` keeps bad steps, or it has no groups.

    See Also:
      :func:`clipjax.bad_steps` returns the same steps as a list; :func:`heat_map` marks
      them in the norms of a whole run; :func:`clipjax.probe` measures inside the model.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> from clipjax import plots
      >>> tx = clipjax.record_norms("leaf", keep=4)
      >>> grads = {"body": jnp.ones(3), "head": jnp.array([jnp.inf])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> ax = plots.bad_steps(state)
      >>> [text.get_text() for text in ax.legend_.get_texts()]
      ['head', 'not finite']
    """
    steps = find_bad_steps(opt_state)
    if any(not step.groups for step in steps):
        raise ValueError(
            "opt_state: its recorder has one norm for all leaves; name groups, as in "
            "record_norms('leaf', keep=16)"
        )
    each = [_shares(step.groups) for step in steps]
    # Of several recorders, each may have other groups.
    names = dict.fromkeys(name for shares in each for name in shares)
    largest = {name: max(shares.get(name, 0) for shares in each) for name in names}
    colors = draw.colors_of(
        {name: share for name, share in largest.items() if share > 0}
    )
    of_probes = any(step.forward or step.backward for step in steps)
    height = (0.55 if of_probes else 0.3) * max(3, len(steps))
    ax = draw.new_axes(ax, 1.2 + height + of_probes, 10 if of_probes else 8)
    field: dict[str, Any] = {"height": 0.5 if of_probes else 0.7}
    field |= {"edgecolor": ax.get_facecolor()}
    has_bad = False
    for row, (step, shares) in enumerate(zip(steps, each, strict=True)):
        is_bad = not np.isfinite([*step.groups.values()]).all()
        has_bad |= is_bad
        style = {**field, "hatch": _HATCH if is_bad else None}
        start = 0.0
        for name, color in colors.items():
            share = shares.get(name, 0)
            ax.barh(row, share, left=start, color=color, **style)
            start += share
        # The others, as one.
        ax.barh(row, sum(shares.values()) - start, left=start, color=draw.GREY, **style)
    more = []
    if has_bad:
        label = "not finite"
        more.append(draw.field(ax, label, facecolor=draw.GREY, hatch=_HATCH))
    if of_probes:
        more += _draw_probes(ax, steps, field)
    labels = [
        f"{x.step}: loss {x.loss:.2g}"
        if x.is_of_loss
        else f"{x.step}: norm {x.norm:.2g}"
        for x in steps
    ]
    ax.set_yticks(range(len(steps)), labels)
    ax.set(xlabel="fraction of the squared norm (%)", ylabel="step", xlim=(0, 100))
    ax.set_ylim(max(1, len(steps)) - 0.4, -0.5)
    some = f"{len(colors)} of {len(names)} groups"
    title = "" if len(colors) == len(names) else some
    return draw.legend_of_colors(ax, colors, title, more=more)


# Of norms that are not finite.
_HATCH = "////"


def _draw_probes(ax: Any, steps: Sequence[BadStep], field: Any) -> list[Any]:
    """Draw the norms that probes saw, beside the bars, and where each step broke.

    Returns:
      What the legend needs.
    """
    beside = draw.split(ax)
    beside.tick_params(left=False, labelleft=False)
    stars = []
    ticks: dict[float, str] = {}
    start = 0
    for of, arrow in (("forward", "forward pass →"), ("backward", "backward pass →")):
        seen = [getattr(step, of) for step in steps]
        names = list(dict.fromkeys(name for norms in seen for name in norms))
        names = names[::-1] if of == "backward" else names  # in the order of time
        values = [[norms.get(name, 0.0) for name in names] for norms in seen]
        colors = draw.shades(beside, np.array(values))
        for row, (step, norms) in enumerate(zip(steps, seen, strict=True)):
            _, layer, began_in = step._place()
            if of == "backward" and began_in == "loss":
                stars.append((start - 0.5, row))
            for x, name in enumerate(names, start):
                if name not in norms:
                    continue
                hatch = None if np.isfinite(norms[name]) else _HATCH
                cell = {"color": colors[row, x - start], "hatch": hatch, **field}
                beside.barh(row, 1, left=x, **cell)
                if (of, name) == (began_in, layer):
                    stars.append((x + 0.5, row))
        shown = range(len(names)) if len(names) <= 12 else (0, len(names) - 1)
        ticks |= {start + i + 0.5: names[i] for i in shown}
        style = {"transform": beside.get_xaxis_transform(), "color": draw.ink(ax)}
        beside.text(start, 1.03, arrow, size="small", **style)
        start += len(names) + 1
    beside.set_xticks([*ticks], [*ticks.values()], rotation=90, size="small")
    beside.set_xlim(0, start - 1)
    shade = "lighter" if draw.is_dark(beside) else "darker"
    title = {"loc": "left", "pad": 24, "size": "medium", "color": draw.ink(ax)}
    beside.set_title(f"norms that probes saw, larger ones {shade}", **title)
    for row, step in enumerate(steps):
        words = {"size": "small", "va": "top", "color": draw.ink(ax)}
        beside.text(0.1, row + 0.26, step._origin(), **words)
    if not stars:
        return []
    across, down = zip(*stars, strict=True)
    return [draw.star(beside, across, down, "where it broke")]


def _shares(groups: Mapping[str, float]) -> dict[str, float]:
    """Return the fraction of each group in the squared norm, in percent.

    If groups are not finite, these groups have equal fractions and others have 0.
    """
    values = np.array([*groups.values()])
    bad = ~np.isfinite(values)
    parts = bad.astype(float)
    if not bad.any() and values.any():
        parts = (values / values.max()) ** 2
    return dict(zip(groups, 100 * parts / (parts.sum() or 1), strict=True))


def unit_norms(
    params: Tree,
    *,
    axes: AutoAxes = "auto",
    radius: Any = None,
    ax: Any = None,
) -> Any:
    """Draw the norms of all output units of weights, sorted within each leaf.

    Use it to choose the bound of :func:`clipjax.max_norm`, and to see how many output
    units are at the bound.

    Args:
      params: the weights.
      axes: the axes that are reduced, as in :func:`clipjax.max_norm`; "auto" by
        default.
      radius: the bound to draw, a number of at least 0. None, the default, draws none.
      ax: the axes to draw on. None, the default, makes a new figure.

    Returns:
      The axes, with one line for each leaf, colored as in :func:`group_norms`. Along a
      line, the output units are sorted by norm. If `radius` is given, the output units
      at the bound form the flat end of a line, and the legend has the percentage of
      output units at the bound or above it.

    Raises:
      TypeError: `radius` is not a number; `axes` has none of its forms; `ax` is not one
        of Matplotlib's axes.
      ValueError: `radius` is negative; `axes` do not fit a leaf, or apply to no leaf.

    See Also:
      :func:`clipjax.violations` lists the output units above a bound;
      :func:`clipjax.functional.unitwise_norms` returns the norms.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import plots
      >>> params = {"kernel": jnp.array([[3.0, 0.6], [4.0, 0.8]])}
      >>> ax = plots.unit_norms(params, radius=2.0)
      >>> [line.get_label() for line in ax.lines]
      ['kernel: 50% at the radius', 'radius 2']
    """
    given = np.inf if radius is None else radius
    bound = float(constant("radius", given, scalar=True))
    lines = {}
    weights = flatten(params)
    where = axes_of(weights, check_axes(axes, auto=fan_in_of_matrices))
    measured = map_units(
        lambda norm, leaf: (norm, leaf), norms_of(weights.values, where), weights.each
    )
    for norm, leaf in present(measured):
        ascending = np.sort(np.asarray(norm, np.float64), axis=None)
        count = max(1, ascending.size)
        at_bound = ascending >= least_inside(bound, leaf.value.dtype)
        share = (
            f": {at_bound.sum() / count:.0%} at the radius" if bound < np.inf else ""
        )
        percents = 100 * (np.arange(ascending.size) + 0.5) / count
        label = leaf.name + share
        while label in lines:  # those of {"a/b": x, "a": {"b": y}} have one name
            label += " "
        lines[label] = percents, ascending
    ax = draw.new_axes(ax)
    ax.set(xlabel="output units of an array, sorted by norm (%)", xlim=(-2, 102))
    ax.set_ylabel("norm of an output unit")
    return draw.lines(ax, lines, "leaves", bound)


def _norm_in(columns: Mapping[str, Any]) -> str:
    """Return the key of the only clip's norm, else of the only norm."""
    found = [key for key in columns if key == "norm" or key.endswith("/norm")]
    of_skips = [f"{skip}/norm" for skip in _skips_in(columns)]
    of_clips = [key for key in found if key not in of_skips]
    chosen = of_clips or found or _recorded_in(columns)
    if len(chosen) != 1:
        listed = a_few(chosen or list(columns)) or "none"
        raise ValueError(f"name must say which norm to draw, of {listed}")
    return chosen[0]


def _skips_in(columns: Mapping[str, Any]) -> list[str]:
    """Return the names of the transformations that skip steps."""
    ends = "/skipped"
    found = [key.removesuffix(ends) for key in columns if key.endswith(ends)]
    # A user's own "data/skipped" has no norm.
    return [skip for skip in found if f"{skip}/norm" in columns]


def _limits_in(columns: Mapping[str, Any], own: str, key: str) -> np.ndarray:
    """Return the threshold at each step, NaN where it is not known."""
    if f"{own}/threshold" in columns:
        return runs.per_step(columns, f"{own}/threshold", key)
    if {f"{own}/norm_after", f"{own}/scale"} <= {*columns}:
        after = runs.per_step(columns, f"{own}/norm_after", key)
        return np.where(runs.per_step(columns, f"{own}/scale", key) < 1, after, np.nan)
    return np.array(np.nan)


def _is_clipped(
    columns: Mapping[str, Any], own: str, key: str, norm: np.ndarray
) -> np.ndarray:
    if f"{own}/scale" in columns:
        return runs.per_step(columns, f"{own}/scale", key) < 1
    return norm > runs.per_step(columns, f"{own}/threshold", key)


def _recorded_in(columns: Mapping[str, Any]) -> list[str]:
    """Return the keys of norms that `record_norms` has measured."""
    # A group, too, may be called "steps".
    recorded = "record_norms[^/]*/(?!steps$).+"
    return [key for key in columns if re.fullmatch(recorded, key)]


def _groups_in(columns: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the groups whose norms are among metrics, by key."""
    recorded = _recorded_in(columns)
    if recorded:
        return {key: key.removeprefix("record_norms/") for key in recorded}
    return {
        key: key.removesuffix("/norm").removeprefix("clip_by_group_norm/")
        for key in columns
        if re.fullmatch("clip_by_group_norm[^/]*/.+/norm", key)
    }
