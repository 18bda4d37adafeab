"""What the figures of `clipjax.plots` share: colors, scales, legends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from clipjax.weights.verify import Judged

try:
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter
except ImportError as error:
    raise ImportError('clipjax.plots needs Matplotlib: pip install "clipjax[plots]"') from error

# Each has a contrast of 3 to 1 with white and with black, and they are distinguishable with color blindness.
GRAY, VERMILION, BLUE, GREEN, PURPLE, OCHRE = "#7f8b99", "#d55e00", "#0072b2", "#009e73", "#b8609a", "#a67c00"
COLORS = (BLUE, VERMILION, GREEN, PURPLE, OCHRE, None)  # None stands for the color of text
STYLES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1.5, 1, 1.5)))
DOTS: dict[str, Any] = {"linestyle": "none", "marker": ".", "markersize": 4.5, "markeredgewidth": 0}
DASHED: dict[str, Any] = {"linestyle": (0, (5, 3)), "linewidth": 1.3, "zorder": 1.5}


def new_figure(width: float, height: float) -> Figure:
    """Make a figure that is not registered with pyplot."""
    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def new_axes(ax: Any) -> Any:
    """Return the given axes, or those of a new figure."""
    return new_figure(7.2, 4.2).subplots() if ax is None else ax


def ink() -> Any:
    """Return the color of text."""
    return mpl.rcParams["text.color"]


def line(i: int) -> dict[str, Any]:
    """Return the style of line `i` among several."""
    return {"color": COLORS[i % len(COLORS)] or ink(), "linestyle": STYLES[i % len(STYLES)]}


def cross(ax: Any, steps: np.ndarray) -> None:
    """Mark steps along the upper edge, on any scale."""
    if steps.size:
        where = {"transform": ax.get_xaxis_transform(), "label": "not finite", "linestyle": "none"}
        ax.plot(steps, np.full(steps.shape, 0.975), marker="x", color=ink(), markersize=4, **where)


def log_scale(ax: Any, side: str, *values: np.ndarray) -> None:
    """Make an axis logarithmic and fit its limits to these values."""
    getattr(ax, f"set_{side}scale")("log")
    axis, seen = getattr(ax, f"{side}axis"), np.concatenate([x[np.isfinite(x) & (x > 0)] for x in values])
    if not seen.size:
        return
    low, high = seen.min(), seen.max()
    getattr(ax, f"set_{side}lim")(low / 1.5, high * 2)  # room for the crosses
    if high < 100 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())


def in_percent(axis: Any) -> None:
    """Format 50 as 50%."""
    axis.set_major_formatter(PercentFormatter(100))


def finished(ax: Any, *, markerscale: float = 2) -> Any:
    """Finish a figure: put the legend above the axes, and an existing title above the legend."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    ax.set_axisbelow(True)
    handles, labels = ax.get_legend_handles_labels()
    if not labels:
        return ax
    columns = _columns(labels, ax.bbox.width / ax.figure.dpi)
    ax.legend(
        handles,
        labels,
        loc="lower left",
        bbox_to_anchor=(-0.02, 1),
        ncols=columns,
        fontsize="small",
        frameon=False,
        borderaxespad=0.2,
        columnspacing=1,
        handlelength=1.6,
        handletextpad=0.5,
        markerscale=markerscale,
    )
    rows = -(-len(labels) // columns)
    for place in ("left", "center", "right"):
        if title := ax.get_title(loc=place):
            ax.set_title(title, loc=place, pad=8 + 15 * rows)
    return ax


def _columns(labels: Sequence[str], width: float) -> int:
    """Estimate how many legend columns fit into a width in inches, before the layout is known."""
    for columns in range(len(labels), 1, -1):
        rows = -(-len(labels) // columns)
        longest = [max(map(len, labels[i : i + rows])) for i in range(0, len(labels), rows)]
        if sum(0.006 * mpl.rcParams["font.size"] * length + 0.37 for length in longest) <= 1.1 * width:
            return columns
    return 1


def spread(values: np.ndarray, every: np.ndarray) -> np.ndarray:
    """Return the vertical offset of each point from the middle of its row, so that close values stack up."""
    finite = every[np.isfinite(every)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    bins = np.nan_to_num((values - low) / (high - low or 1.0) * 90, posinf=90, neginf=0).astype(int)
    places = np.zeros(values.shape)
    for one in np.unique(bins):
        (at,) = np.nonzero(bins == one)
        places[at] = (np.arange(at.size) - (at.size - 1) / 2) * min(0.06, 0.8 / at.size)
    return places


def bounds(ax: Any, rows: Sequence[Judged]) -> None:
    """Draw the bounds: one line if all rows share it, otherwise a short line in each row."""
    for side in ("high", "low"):
        limits = [np.unique(x[np.isfinite(x) & (x > 0)]) for x in (getattr(row, side) for row in rows)]
        shared = np.unique(np.concatenate(limits)) if limits else np.zeros(0)
        if shared.size == 1 and all(x.size for x in limits):
            ax.axvline(shared[0], color=ink(), label=f"bound {shared[0]:.3g}", **DASHED)
        elif shared.size:
            for i, each in enumerate(limits):
                label = "bound" if i == 0 else None
                ax.vlines(each, i - 0.45, i + 0.45, color=ink(), label=label, linewidth=1.3, zorder=1.5)
        if all(np.array_equal(row.low, row.high) for row in rows):
            return


def at_bound(row: Judged) -> np.ndarray:
    """Return which units are at a bound, up to the rounding of their dtype."""
    near = max(row.eps, 1e-6)
    at_low = (row.low > 0) & (np.abs(row.value - row.low) <= near * row.low)
    with np.errstate(invalid="ignore"):  # of infinity minus infinity
        return at_low | (np.abs(row.value - row.high) <= near * np.where(row.high < np.inf, row.high, np.nan))


def short(paths: Sequence[str]) -> list[str]:
    """Remove the names that weights have in every layer from the paths, if these stay unique."""
    short = [re.sub("/(kernel|embedding|weight)$", "", path) for path in paths]
    return short if len(set(short)) == len(paths) else list(paths)
