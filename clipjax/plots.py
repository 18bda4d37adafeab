"""Plots of what the transformations measured.

This module needs Matplotlib, and `import clipjax` does not load it: `from clipjax import plots`.

Each function takes `ax`, the Matplotlib axes to draw on, and returns them. Without `ax` it makes a new
figure, which is not registered with pyplot: `plots.norms(history).figure.savefig("norms.png")`. The legend is
above the axes, where it covers no data, and an existing title of the axes is moved above the legend. Text and
the lines of bounds are in Matplotlib's own colors, which `plt.style.use("dark_background")` inverts; the
other colors are readable on white and on black, and with color blindness.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from clipjax import _drawing as drawing
from clipjax._core.arguments import shown
from clipjax._core.axes import FAN_IN_OF_MATRICES, Axes
from clipjax._core.bounds import Bound
from clipjax.monitoring.history import History, columns, fitting, norms_of_groups, norms_over_steps
from clipjax.monitoring.norm_log import NormLog, replays_of
from clipjax.monitoring.replay import Replay, Rules, suggestion
from clipjax.weights.constraints import max_norm
from clipjax.weights.verify import judged

__all__ = ["clip_rates", "norms", "threshold_rates", "thresholds", "unit_norms"]


def norms(
    history: History | NormLog | Any,
    name: str | None = None,
    *,
    after: Any = None,
    bound: Any = None,
    clipped: Any = None,
    skipped: Any = None,
    ax: Any = None,
) -> Any:
    """Draw norms over the steps, before and after clipping, and the bound, on a logarithmic scale.

    Args:
      history: what `clipjax.metrics` returned at each step, in a list or as `scan` stacks it; the rows of a
        log with the same names; a :class:`clipjax.NormLog`; or the norms themselves, `(steps,)`.
      name: which norm of the metrics to draw, such as `"zclip"`, `"clip_by_group_norm/norm/head"` or
        `"record_norms/updates"`; required if there are several.
      after: the norms after clipping, `(steps,)`; by default the metric `norm_after`.
      bound: the bound, a number or `(steps,)`; by default the metric `threshold`, if the rule has one.
      clipped: which steps were clipped, bool `(steps,)`. By default those whose norm is larger than after
        clipping, or, if that is not known, above the bound.
      skipped: which steps were skipped, bool `(steps,)`. By default those above the threshold, for a rule
        that counts the steps it skipped.
      ax: the axes to draw on.

    Returns:
      The axes. The legend gives the share of clipped steps among those whose norm is finite. Other norms are
      drawn as crosses along the upper edge; norms of 0, which a logarithmic scale cannot show, are left out.

    Raises:
      ValueError: there are no steps; the metrics hold no norm, or several and `name` is missing; two shapes
        do not match.

    Example:
      >>> import clipjax, jax.numpy as jnp, numpy as np
      >>> from clipjax import plots
      >>> tx, history = clipjax.clip_by_global_norm(1.0), []
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (0.5, 4.0, 2.0):
      ...     _, state = tx.update(jnp.array([norm]), state)
      ...     history.append(clipjax.metrics(state))
      >>> ax = plots.norms(history, bound=1.0)
      >>> for line in ax.lines:
      ...     print(line.get_label(), np.asarray(line.get_ydata()))
      not clipped [0.5]
      before clipping (66.7%) [4. 2.]
      after [1. 1.]
      bound 1 [1. 1.]
    """
    what, steps, before, found = norms_over_steps(history, name)
    after = found.get("norm_after") if after is None else fitting("after", after, before)
    threshold = found.get("threshold") if bound is None else np.asarray(bound, np.float64)
    limits = None
    if threshold is not None and np.isfinite(threshold).any():
        whole = threshold if np.ndim(threshold) else np.full(before.shape, threshold)
        limits = np.where(np.isfinite(whole), fitting("bound", whole, before), np.nan)
    above = np.zeros(before.shape, bool) if limits is None else before > limits
    if skipped is None:
        skipped = above if "skipped" in found else np.zeros(before.shape, bool)
    if clipped is None:
        clipped = above if after is None else after < before
    skipped = fitting("skipped", skipped, before).astype(bool)
    clipped = fitting("clipped", clipped, before).astype(bool) & ~skipped

    ax = drawing.new_axes(ax)
    finite = np.isfinite(before)
    visible = finite & (before > 0)
    share = np.mean(clipped[finite]) if finite.any() else 0
    acted = "clipped" if after is None else "before clipping"
    untouched = "each step" if limits is None and not clipped.any() else "not clipped"
    kinds = [
        (untouched, drawing.GRAY, before, ~clipped & ~skipped),
        (f"{acted} ({share:.1%})", drawing.VERMILION, before, clipped),
        ("after", drawing.BLUE, before if after is None else after, clipped & (after is not None)),
        ("skipped", drawing.PURPLE, before, skipped),
    ]
    for label, color, values, which in kinds:
        chosen = which & visible & (values > 0)
        if chosen.any():
            ax.plot(steps[chosen], values[chosen], color=color, label=label, zorder=2, **drawing.DOTS)
    drawing.cross(ax, steps[~finite])
    if limits is not None and np.unique(limits).size == 1:
        ax.axhline(limits[0], color=drawing.ink(), label=f"bound {limits[0]:.3g}", **drawing.DASHED)
    elif limits is not None:
        ax.plot(steps, limits, color=drawing.ink(), linewidth=1, label="threshold", zorder=3)
    ax.set(xlabel="step", ylabel=what)
    seen = [before] if after is None else [before, after]
    if limits is not None and visible.any():  # a bound that is not too far away
        least, most = before[visible].min() / 30, before[visible].max() * 30
        seen.append(limits[(limits > least) & (limits < most)])
    drawing.log_scale(ax, "y", *seen)
    return drawing.finished(ax)


def unit_norms(
    params: Any,
    projection: Any = None,
    *,
    axes: Axes = FAN_IN_OF_MATRICES,
    radius: Bound | None = None,
    step: Any = None,
    ax: Any = None,
) -> Any:
    """Draw the norm of each unit of the weights, layer by layer, with the bound.

    Each row is a leaf, and each point in it a unit; points with close values are stacked. The text beside a
    row says how many units are at the bound, up to the rounding of their dtype.

    Args:
      params: the weights.
      projection: the projection that bounds the norms, such as `clipjax.max_norm(3.0)`; or what
        `clipjax.chain` or `clipjax.bounded` made with it. Units that are out of bounds according to
        :func:`clipjax.verify` have another color.
      axes: without a projection: the axes that are reduced, as in :func:`clipjax.max_norm`.
      radius: without a projection: the bound, as in :func:`clipjax.max_norm`; None draws no bound.
      step: the step at which to evaluate bounds that are schedules.
      ax: the axes to draw on.

    Returns:
      The axes.

    Raises:
      TypeError, ValueError: as :func:`clipjax.verify`, and as the projection for such weights.

    Example:
      >>> import clipjax, jax.numpy as jnp, numpy as np
      >>> from clipjax import plots
      >>> params = {"Dense_0": {"kernel": jnp.array([[3.0, 0.6], [4.0, 0.8]])}}
      >>> ax = plots.unit_norms(params, clipjax.max_norm(1.5))
      >>> for line in ax.lines:
      ...     print(line.get_label(), np.asarray(line.get_xdata()).round(6))
      in bounds [1.]
      out of bounds [5.]
      bound 1.5 [1.5 1.5]
    """
    bounded = projection is not None or radius is not None
    if projection is None:
        projection = max_norm(np.inf if radius is None else radius, axes=axes)
    rows = list(judged(params, projection, step))
    ax = drawing.new_axes(ax)
    values = [row.value.ravel() for row in rows]
    every = np.concatenate(values) if values else np.zeros(0)
    obeys = [((r.value >= r.low) & (r.value <= r.high)).ravel() for r in rows]
    obeying = np.concatenate(obeys) if rows else np.zeros(0, bool)
    places = np.concatenate([i + drawing.spread(x, every) for i, x in enumerate(values)]) if rows else every
    inside = "in bounds" if bounded else "a unit"
    for label, color, which in (
        (inside, drawing.BLUE, obeying),
        ("out of bounds", drawing.VERMILION, ~obeying),
    ):
        if which.any():
            ax.plot(every[which], places[which], color=color, label=label, **drawing.DOTS)
    drawing.bounds(ax, rows)
    ax.set_yticks(range(len(rows)), drawing.short([row.path for row in rows]))
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set(xlabel="norm of a unit's weights")
    if bounded:
        beside = {"transform": ax.get_yaxis_transform(), "va": "center", "fontsize": "small"}
        ax.text(1.01, -0.5, "at the bound", **(beside | {"va": "bottom"}))
        for i, row in enumerate(rows):
            ax.text(1.01, i, f"{np.sum(drawing.at_bound(row))} of {row.value.size}", **beside)
    return drawing.finished(ax)


def clip_rates(history: History, *, bound: Any = None, ax: Any = None) -> Any:
    """Draw the share of steps at which each group, layer or transformation was clipped.

    Args:
      history: metrics of one step or of several, as in :func:`norms`; the shares are the last values of
        every `clipped_fraction`. With a `bound`, norms over the steps: those of
        `clipjax.record_norms("leaf")`, or otherwise all norms; or a mapping from names to arrays `(steps,)`.
      bound: the bound on the norms: a number, or a mapping from the names of norms to numbers.
      ax: the axes to draw on.

    Returns:
      The axes.

    Raises:
      ValueError: the metrics hold no `clipped_fraction`; or with a bound, no norm, or not every one it names.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> from clipjax import plots
      >>> tx = clipjax.clip_by_group_norm({"head/*": 1.0, "*": 2.0})
      >>> grads = {"body": {"w": jnp.ones(2)}, "head": {"w": jnp.ones(2)}}
      >>> ax = plots.clip_rates(clipjax.metrics(tx.update(grads, tx.init(grads))[1]))
      >>> for label, bar in zip(ax.get_yticklabels(), ax.patches, strict=True):
      ...     print(label.get_text(), bar.get_width())
      clip_by_group_norm 100.0
      * 0.0
      head/* 100.0
    """
    found = columns(history)
    if bound is None:
        rates = {
            _group(key): np.ravel(column)[-1]
            for key, column in found.items()
            if "/clipped_fraction" in f"/{key}"
        }
        missing = "clipped_fraction"
    else:
        of_groups = norms_of_groups(found)
        limits = bound if isinstance(bound, Mapping) else dict.fromkeys(of_groups, bound)
        if unknown := [name for name in limits if name not in of_groups]:
            raise ValueError(f"bound: {shown(unknown)} name no norm; there are {shown(list(of_groups))}")
        rates = {key: _rate(x, limits[key]) for key, x in of_groups.items() if key in limits}
        missing = "norm"
    if not rates:
        raise ValueError(f"history: there is no {missing} in {shown(list(found))}")
    ax = drawing.new_axes(ax)
    bars = ax.barh(
        range(len(rates)), [100 * rate for rate in rates.values()], height=0.7, color=drawing.VERMILION
    )
    ax.bar_label(bars, [f"{rate:.1%}" for rate in rates.values()], padding=3, fontsize="small")
    ax.set_yticks(range(len(rates)), list(rates))
    ax.set(xlabel="steps clipped", xlim=(0, 112), xticks=range(0, 101, 20))
    drawing.in_percent(ax.xaxis)
    ax.invert_yaxis()
    drawing.finished(ax)
    ax.grid(visible=False, axis="y")
    return ax


def thresholds(log: NormLog, rules: Rules | None = None, *, ax: Any = None) -> Any:
    """Draw a log's norms over the steps, and the threshold that each rule would have used.

    Args:
      log: the norms of a run.
      rules: transformations for :meth:`clipjax.NormLog.replay`, by name, or what that method returned; None
        stands for every rule that follows the norm.
      ax: the axes to draw on.

    Returns:
      The axes. The legend gives the share of steps that each rule would have clipped.

    Raises:
      TypeError, ValueError: as :meth:`clipjax.NormLog.replay`.

    Example:
      >>> import clipjax
      >>> from clipjax import plots
      >>> log = clipjax.NormLog()
      >>> log.extend([1.0, 2.0, 8.0])
      >>> ax = plots.thresholds(log, {"median": clipjax.clip_by_quantile(0.5)})
      >>> [line.get_label() for line in ax.lines]
      ['norm', 'median: clips 67%']
    """
    replays, values, ax = _replays(log, rules), log.norms, drawing.new_axes(ax)
    steps = log.dropped + 1 + np.arange(len(values))
    finite = np.isfinite(values)
    visible = finite & (values > 0)
    ax.plot(steps[visible], values[visible], color=drawing.GRAY, label="norm", zorder=1, **drawing.DOTS)
    drawing.cross(ax, steps[~finite])
    for i, (name, replay) in enumerate(replays.items()):
        limits = np.where(np.isfinite(replay.thresholds), replay.thresholds, np.nan)
        rate = suggestion(replay, values).clip_rate if finite.any() else 0.0
        ax.plot(steps, limits, label=f"{name}: clips {rate:.0%}", linewidth=1.4, zorder=2, **drawing.line(i))
    ax.set(xlabel="step", ylabel="norm of the gradient")
    drawing.log_scale(ax, "y", values)
    return drawing.finished(ax)


def threshold_rates(log: NormLog, rules: Rules | None = None, *, ax: Any = None) -> Any:
    """Draw how often each constant threshold would have clipped, and where each rule has settled.

    Args:
      log: the norms of a run.
      rules: as for :func:`thresholds`.
      ax: the axes to draw on.

    Returns:
      The axes.

    Raises:
      TypeError, ValueError: as :meth:`clipjax.NormLog.replay`; no norm is finite.

    Example:
      >>> import clipjax
      >>> from clipjax import plots
      >>> log = clipjax.NormLog()
      >>> log.extend([1.0, 2.0, 4.0, 8.0])
      >>> print(plots.threshold_rates(log, {}).lines[0].get_ydata())
      [75. 50. 25.  0.]
    """
    replays, ax = _replays(log, rules), drawing.new_axes(ax)
    ascending = np.unique(log.norms[np.isfinite(log.norms) & (log.norms > 0)])
    ax.plot(ascending, 100 * log.clip_rate(ascending), color=drawing.ink(), linewidth=1.2, label="a constant")
    for i, (name, replay) in enumerate(replays.items()):
        threshold = suggestion(replay, log.norms).threshold
        if np.isfinite(threshold):
            rate, color = 100 * log.clip_rate(threshold), drawing.line(i)["color"]
            ax.plot(threshold, rate, "osD^vP"[i % 6], color=color, label=name)
    ax.set(xlabel="threshold", ylabel="steps that it clips", ylim=(-3, 103))
    drawing.in_percent(ax.yaxis)
    drawing.log_scale(ax, "x", ascending)
    return drawing.finished(ax, markerscale=1)


def write_log(log: NormLog, rules: Rules | None, path: str | Path) -> None:
    """Save a figure with :func:`thresholds` and :func:`threshold_rates` side by side."""
    replays = replays_of(log, rules)
    figure = drawing.new_figure(13, 4.8)
    left, right = figure.subplots(1, 2, width_ratios=(1.6, 1))
    left.set_title("Norms, and the threshold that each rule would have used", loc="left")
    right.set_title("Constants, and where each rule has settled", loc="left")
    thresholds(log, replays, ax=left)
    threshold_rates(log, replays, ax=right).legend_.remove()
    figure.savefig(path)


def _group(key: str) -> str:
    """Return the group of a metric, or its transformation if it has no group."""
    prefix, _, group = key.partition("/clipped_fraction")
    return group.removeprefix("/") or prefix


def _rate(values: np.ndarray, bound: Any) -> float:
    finite = values[np.isfinite(values)]
    return float(np.mean(finite > bound)) if finite.size else 0.0


def _replays(log: Any, rules: Rules | None) -> dict[str, Replay]:
    if not isinstance(log, NormLog):
        raise TypeError(f"log must be a clipjax.NormLog, got {shown(log)}")
    return replays_of(log, rules)
