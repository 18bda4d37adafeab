"""A log of norms as a table for the terminal, and as a figure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from clipjax.monitoring.norm_log import NormLog, Replay, Suggestion

_QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_NORM, _BAD, _INK = "#9aa5b1", "#d62839", "#1d1d1f"
_COLORS = ("#22577a", "#e4572e", "#2a9d8f", "#8a5cb8", "#c98a0c", "#5b7b1e", "#b5467f")
_STYLE: dict[Any, Any] = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}


def table(log: NormLog, suggestions: Mapping[str, Suggestion]) -> str:
    """The quantiles, and what each rule would have done."""
    counts = f"{len(log)} gradient norms" + (f", {log.name}" if log.name else "")
    counts += f", {log.nonfinite_count} of them not finite" if log.nonfinite_count else ", all finite"
    counts += f"; {log.dropped} before them are not kept" if log.dropped else ""
    lines = [counts, ""]
    lines += _columns(
        ["quantile", *("largest" if q == 1 else f"{q:.0%}" for q in _QUANTILES)],
        ["norm", *(f"{x:.3g}" for x in log.quantiles(_QUANTILES))],
    )
    rows = [
        [
            name,
            f"{threshold:.4g}" if _is_one(threshold) else "none",
            f"{rate:.1%}",
            f"{float(log.clip_rate(threshold)):.1%}" if _is_one(threshold) else "-",
        ]
        for name, (threshold, rate) in suggestions.items()
    ]
    heads = ["rule", "threshold at the end", "steps it clips", "as a constant"]
    return "\n".join([*lines, "", *_columns(heads, *rows)])


def _is_one(threshold: float) -> bool:
    """Whether there is a threshold: some rules have none until they have seen enough."""
    return threshold < np.inf


def _columns(*rows: list[str]) -> list[str]:
    """Align the first column left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
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
        figure.legend(
            *left.get_legend_handles_labels(),
            loc="outside lower center",
            ncols=5,
            frameon=False,
            markerscale=2,
        )
        figure.savefig(target)


def _draw_norms(log: NormLog, axes: Any, replays: Mapping[str, Replay]) -> None:
    norms = log.norms
    steps = log.dropped + 1 + np.arange(len(norms))
    shown = np.isfinite(norms) & (norms > 0)
    axes.plot(
        steps[shown], norms[shown], ".", markersize=3, color=_NORM, markeredgewidth=0, label="norm", zorder=1
    )
    bad = steps[~np.isfinite(norms)]
    if len(bad):  # along the upper edge, whatever the scale
        where = axes.get_xaxis_transform()
        axes.plot(
            bad, np.full(len(bad), 0.985), "x", transform=where, color=_BAD, markersize=4, label="not finite"
        )
    axes.set(xlabel="step", ylabel="norm of the gradient", yscale="log")
    axes.set_title("Norms, and the thresholds that each rule would have used", loc="left")
    axes.grid(alpha=0.25)
    if shown.any():  # a threshold may be far away: it is the norms that are to be seen
        axes.set_ylim(norms[shown].min() / 2, norms[shown].max() * 3)
    for (name, replay), color in zip(replays.items(), _cycle(len(replays)), strict=True):
        limits = np.where([_is_one(x) for x in replay.thresholds], replay.thresholds, np.nan)
        axes.plot(steps, limits, color=color, linewidth=1.2, label=name, zorder=2)


def _draw_rates(log: NormLog, axes: Any, replays: Mapping[str, Replay]) -> None:
    """The clip rate of every constant threshold, and where each rule has settled."""
    from clipjax.monitoring.norm_log import suggestion

    norms = log.norms
    ascending = np.sort(norms[np.isfinite(norms) & (norms > 0)])
    axes.plot(ascending, 100 * log.clip_rate(ascending), color=_INK, linewidth=1.2)
    for replay, color in zip(replays.values(), _cycle(len(replays)), strict=True):
        threshold = suggestion(replay, norms).threshold
        if _is_one(threshold):
            axes.plot(threshold, 100 * log.clip_rate(threshold), "o", color=color, markersize=7, zorder=3)
    axes.set(xlabel="constant threshold", ylabel="steps clipped, %", xscale="log", ylim=(-3, 103))
    axes.set_title("What a constant would clip", loc="left")
    axes.grid(alpha=0.25)


def _cycle(count: int) -> list[str]:
    return [_COLORS[i % len(_COLORS)] for i in range(count)]
