"""How pictures are drawn: colors, lines, the mark of what is not finite, legends."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from clipjax._core.leaves import short_repr
from clipjax._extra import extra

with extra("plots"):
    from matplotlib import pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.colors import to_rgb
    from matplotlib.ticker import MaxNLocator
    from matplotlib.transforms import ScaledTranslation

# Visible on white and on black. Any two are 16 or more apart in CIELAB, in normal color
# vision and without one kind of cone.
COLORS = (
    "#0072b2",
    "#cc79a7",
    "#009e73",
    "#e69f00",
    "#56b4e9",
    "#9933ee",
    "#995533",
    "#5f8a00",
)
GREY = "#8a8a8a"
NOT_FINITE = "#f05a00"


def new_axes(ax: Any, height: float = 4) -> Any:
    """Return the axes, or those of a new figure."""
    if ax is None:
        return plt.subplots(figsize=(8, height), layout="constrained")[1]
    if isinstance(ax, Axes):
        return ax
    raise TypeError(
        "ax must be one of Matplotlib's axes, such as plt.subplots()[1], got "
        f"{short_repr(ax)}"
    )


def ink(ax: Any) -> Any:
    """Return the color of text on these axes, which is light in a dark figure."""
    return ax.xaxis.label.get_color()


def is_dark(ax: Any) -> bool:
    """Return whether the ground of these axes is dark."""
    return bool(np.mean(to_rgb(ax.get_facecolor())) < 0.5)


def line(ax: Any, x: np.ndarray, y: np.ndarray, **style: Any) -> None:
    """Draw a line, with a gap and a cross at the top where a value is not finite."""
    good = np.isfinite(y)
    # A point without neighbors would have no line.
    dots = {"marker": "."} if good.sum() < 20 else {}
    ax.plot(x, np.where(good, y, np.nan), **dots | style)
    at_top(ax, x[~good], marker="x", color=NOT_FINITE, mew=2, label="not finite")


def at_top(ax: Any, x: np.ndarray, **style: Any) -> None:
    """Draw marks at the top of the axes, whatever their scale."""
    if x.size:
        top = ax.get_xaxis_transform()
        ax.plot(x, np.full(x.shape, 0.97), linestyle="", transform=top, **style)


def finish(ax: Any, title: str = "") -> Any:
    """Choose the scale, and add the legend below the axes.

    The scale is logarithmic if the largest value is more than 20 times the smallest.
    """
    ax.margins(y=0.1)
    ax.autoscale(axis="y")
    if ax.dataLim.y1 > 20 * ax.dataLim.minposy:
        ax.set_yscale("log", nonpositive="clip")
    else:
        ax.set_ylim(bottom=0)
    steps_below(ax)
    ax.grid(color=ink(ax), alpha=0.12)
    legend_below(ax, title)
    return ax


def steps_below(ax: Any) -> None:
    """Place ticks at whole steps."""
    whole = {"integer": True, "min_n_ticks": 1, "steps": [1, 2, 5, 10]}
    ax.xaxis.set_major_locator(MaxNLocator("auto", **whole))
    ax.set_xlabel("step")


def legend_below(ax: Any, title: str) -> None:
    """Add a legend below the axes, if the figure has a layout that makes room for it.

    Otherwise the legend is in the axes.
    """
    handles, labels = ax.get_legend_handles_labels()
    by_label = dict(zip(labels, handles, strict=True))
    if "not finite" in by_label:  # last, as it is no group
        by_label["not finite"] = by_label.pop("not finite")
    style: dict[str, Any] = {"title": title, "labelcolor": ink(ax)}
    if ax.figure.get_layout_engine():
        size = ax.xaxis.label.get_size()  # in points; ticks and a label are in between
        down = ScaledTranslation(0, -3.3 * size / 72, ax.figure.dpi_scale_trans)
        style |= {"loc": "upper left", "bbox_to_anchor": (0, 0), "borderaxespad": 0}
        style |= {"bbox_transform": ax.transAxes + down, "frameon": False}
        # A letter is about half as wide as it is high, and a line 5 letters long.
        width = 72 * ax.bbox.width / ax.figure.dpi
        letters = 5 + max(map(len, by_label))
        style["ncols"] = int(np.clip(width / (0.5 * size * letters), 1, 4))
    legend = ax.legend(by_label.values(), by_label, **style)
    legend.set_alignment("left")
    legend.get_title().set_color(ink(ax))


def colored(names: Sequence[str], sizes: Sequence[float]) -> dict[str, str]:
    """Return a color for each of the names with the largest sizes."""
    order = sorted(range(len(names)), key=lambda i: sizes[i])[-len(COLORS) :]
    return dict(zip([names[i] for i in sorted(order)], COLORS, strict=False))
