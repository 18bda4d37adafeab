"""What the pictures of `clipjax.plots` share: colours, scales, legends."""

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

# Each stands out by 3 to 1 against white and against black, and the colour-blind tell them apart.
GREY, VERMILION, BLUE, GREEN, PURPLE, OCHRE = "#7f8b99", "#d55e00", "#0072b2", "#009e73", "#b8609a", "#a67c00"
COLORS = (BLUE, VERMILION, GREEN, PURPLE, OCHRE, None)  # None: the colour of text
STYLES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (4, 1.5, 1, 1.5)))
DOTS: dict[str, Any] = {"linestyle": "none", "marker": ".", "markersize": 4.5, "markeredgewidth": 0}
DASHED: dict[str, Any] = {"linestyle": (0, (5, 3)), "linewidth": 1.3, "zorder": 1.5}


def new_figure(width: float, height: float) -> Figure:
    """A figure that pyplot does not know."""
    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def new_axes(ax: Any) -> Any:
    """The axes that were given, or those of a new figure."""
    return new_figure(7.2, 4.2).subplots() if ax is None else ax


def ink() -> Any:
    """The colour of text."""
    return mpl.rcParams["text.color"]


def line(i: int) -> dict[str, Any]:
    """The look of one line among several."""
    return {"color": COLORS[i % len(COLORS)] or ink(), "linestyle": STYLES[i % len(STYLES)]}


def cross(ax: Any, steps: np.ndarray) -> None:
    """Mark steps along the upper edge, whatever the scale."""
    if steps.size:
        where = {"transform": ax.get_xaxis_transform(), "label": "not finite", "linestyle": "none"}
        ax.plot(steps, np.full(steps.shape, 0.975), marker="x", color=ink(), markersize=4, **where)


def log_scale(ax: Any, side: str, *values: np.ndarray) -> None:
    """Make an axis logarithmic and fit it to these values; what is far from all of them is left out."""
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
    """Write 50 as 50%."""
    axis.set_major_formatter(PercentFormatter(100))


def finished(ax: Any, *, markerscale: float = 2) -> Any:
    """What all pictures share; the legend above the axes, and a title that was there above the legend."""
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
    """As many columns as are likely to fit into so many inches, before anything is laid out."""
    for columns in range(len(labels), 1, -1):
        rows = -(-len(labels) // columns)
        longest = [max(map(len, labels[i : i + rows])) for i in range(0, len(labels), rows)]
        if sum(0.006 * mpl.rcParams["font.size"] * length + 0.37 for length in longest) <= 1.1 * width:
            return columns
    return 1


def spread(values: np.ndarray, every: np.ndarray) -> np.ndarray:
    """How far each point is moved off the middle of its row, so that those which are alike stack up."""
    finite = every[np.isfinite(every)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    bins = np.nan_to_num((values - low) / (high - low or 1.0) * 90, posinf=90, neginf=0).astype(int)
    places = np.zeros(values.shape)
    for one in np.unique(bins):
        (at,) = np.nonzero(bins == one)
        places[at] = (np.arange(at.size) - (at.size - 1) / 2) * min(0.06, 0.8 / at.size)
    return places


def bounds(ax: Any, rows: Sequence[Judged]) -> None:
    """A line where all rows share a bound, a piece of one in each row where they do not."""
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
    """Which units are at a bound, within the rounding of their dtype."""
    near = max(row.eps, 1e-6)
    at_low = (row.low > 0) & (np.abs(row.value - row.low) <= near * row.low)
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        return at_low | (np.abs(row.value - row.high) <= near * np.where(row.high < np.inf, row.high, np.nan))


def short(paths: Sequence[str]) -> list[str]:
    """The paths, without what leaves of weights are called in every layer."""
    short = [re.sub("/(kernel|embedding|weight)$", "", path) for path in paths]
    return short if len(set(short)) == len(paths) else list(paths)
