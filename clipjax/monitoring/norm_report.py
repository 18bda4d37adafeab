"""A log of norms as a table for the terminal, and as a figure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from clipjax.monitoring.replay import Replay, Suggestion, suggestion

if TYPE_CHECKING:
    from clipjax.monitoring.norm_log import NormLog

_QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_NORM, _NONFINITE, _INK = "#9aa5b1", "#d62839", "#1d1d1f"
_COLORS = ("#22577a", "#e4572e", "#2a9d8f", "#8a5cb8", "#c98a0c", "#5b7b1e", "#b5467f")
_STYLE: dict[Any, Any] = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}


def table(log: NormLog, suggestions: Mapping[str, Suggestion]) -> str:
    """The quantiles, and what each rule would have done."""
    counts = f"{len(log)} gradient norms" + (f", {log.name}" if log.name else "")
    counts += f", {log.nonfinite_count} of them not finite" if log.nonfinite_count else ", all finite"
    counts += f"; {log.dropped} before them are not kept" if log.dropped else ""
    quantiles = _columns(
        ["quantile", *("largest" if q == 1 else f"{q:.0%}" for q in _QUANTILES)],
        ["norm", *(f"{x:.3g}" for x in log.quantiles(_QUANTILES))],
    )
    rows = [["rule", "threshold at the end", "steps it clips", "as a constant"]]
    for name, (threshold, rate) in suggestions.items():
        known = threshold < np.inf  # some rules have no threshold before enough steps
        rows.append(
            [
                name,
                f"{threshold:.4g}" if known else "none",
                f"{rate:.1%}",
                f"{float(log.clip_rate(threshold)):.1%}" if known else "-",
            ]
        )
    return "\n".join([counts, "", *quantiles, "", *_columns(*rows)])


def _columns(*rows: list[str]) -> list[str]:
    """Align the first column left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip()
        for first, *rest in rows
    ]


def plot(log: NormLog, target: Any, replays: Mapping[str, Replay]) -> None:
    """Write a figure to a path, or draw the norms on axes."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot needs matplotlib: pip install matplotlib") from error
    if not isinstance(target, str | os.PathLike):
        _draw_norms(log, target, replays)
        return
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(11.5, 4.6), dpi=120, layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.7, 1))
        _draw_norms(log, left, replays)
        _draw_rates(log, right, replays)
        handles = left.get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=5, frameon=False, markerscale=2)
        figure.savefig(target)


def _draw_norms(log: NormLog, axes: Any, replays: Mapping[str, Replay]) -> None:
    norms = log.norms
    steps = log.dropped + 1 + np.arange(len(norms))
    shown, nonfinite = np.isfinite(norms) & (norms > 0), steps[~np.isfinite(norms)]
    axes.plot(
        steps[shown], norms[shown], ".", markersize=3, color=_NORM, markeredgewidth=0, label="norm", zorder=1
    )
    if len(nonfinite):  # along the upper edge, whatever the scale
        edge = {"transform": axes.get_xaxis_transform(), "label": "not finite"}
        axes.plot(nonfinite, np.full(len(nonfinite), 0.985), "x", color=_NONFINITE, markersize=4, **edge)
    axes.set(xlabel="step", ylabel="norm of the gradient", yscale="log")
    axes.set_title("Norms, and the thresholds that each rule would have used", loc="left")
    axes.grid(alpha=0.25)
    if shown.any():  # to fit the norms: a threshold may be far away
        axes.set_ylim(norms[shown].min() / 2, norms[shown].max() * 3)
    for i, (name, replay) in enumerate(replays.items()):
        limits = np.where(np.isfinite(replay.thresholds), replay.thresholds, np.nan)
        axes.plot(steps, limits, color=_color(i), linewidth=1.2, label=name, zorder=2)


def _draw_rates(log: NormLog, axes: Any, replays: Mapping[str, Replay]) -> None:
    """The clip rate of every constant threshold, and where each rule has settled."""
    norms = log.norms
    ascending = np.sort(norms[np.isfinite(norms) & (norms > 0)])
    axes.plot(ascending, 100 * log.clip_rate(ascending), color=_INK, linewidth=1.2)
    for i, replay in enumerate(replays.values()):
        threshold = suggestion(replay, norms).threshold
        if np.isfinite(threshold):
            axes.plot(threshold, 100 * log.clip_rate(threshold), "o", color=_color(i), markersize=7, zorder=3)
    axes.set(xlabel="constant threshold", ylabel="steps clipped, %", xscale="log", ylim=(-3, 103))
    axes.set_title("What a constant would clip", loc="left")
    axes.grid(alpha=0.25)


def _color(i: int) -> str:
    return _COLORS[i % len(_COLORS)]
