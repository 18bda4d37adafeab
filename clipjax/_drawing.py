"""How pictures are drawn: colors, lines, marks, scales and legends."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from clipjax._core.messages import short_repr

try:
    from matplotlib import pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap, LogNorm, to_rgb
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError(
        "clipjax.plots needs Matplotlib: pip install matplotlib"
    ) from error

# Okabe and Ito's colors that are visible on white and on black, and two of Tol's.
COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#aa4499",
    "#999933",
)
GREY = "#8a8a8a"
BOUND: dict[str, Any] = {"linestyle": (0, (6, 2)), "linewidth": 1.6}


def new_axes(ax: Any, height: float = 4) -> Any:
    """Return the axes, or those of a new figure."""
    if isinstance(ax, Axes):
        return ax
    if ax is not None:
        raise TypeError(
            "ax must be one of Matplotlib's axes, such as plt.subplots()[1], got "
            f"{short_repr(ax)}"
        )
    return plt.subplots(figsize=(8, height), layout="constrained")[1]


def line(ax: Any, x: np.ndarray, y: np.ndarray, **style: Any) -> None:
    """Draw a line, with dots where a value has no neighbors."""
    good = np.isfinite(np.concatenate([[np.nan], y, [np.nan]]))
    alone = np.flatnonzero(good[1:-1] & ~good[:-2] & ~good[2:]).tolist()
    dots = {"marker": "o", "markersize": 4, "markevery": alone} if alone else {}
    ax.plot(x, _drawable(y), **style, **dots)


def marks(
    ax: Any, x: np.ndarray, y: np.ndarray, where: np.ndarray, **style: Any
) -> None:
    """Draw marks, smaller ones if there are many."""
    count = where.sum()
    size = 5 if count < 200 else 3 if count < 2000 else 1.5
    ax.plot(x[where], _drawable(y[where]), linestyle="", ms=size, **style)


def at_top(ax: Any, x: np.ndarray, **style: Any) -> None:
    """Draw marks at the top of the axes, whatever their scale."""
    if x.size:
        top = ax.get_xaxis_transform()
        ax.plot(x, np.full(x.shape, 0.98), linestyle="", transform=top, **style)


def _drawable(y: np.ndarray) -> np.ndarray:
    """Return NaN for what is not finite, and no size with which margins overflow."""
    y = np.where(np.isfinite(y), y, np.nan)
    return np.where(y > 0, np.clip(y, 1e-100, 1e100), y)


def lines(
    ax: Any,
    points: dict[str, Any],
    what: str,
    bound: float = np.inf,
    dashed: Collection[str] = (),
) -> Any:
    """Draw lines, x and y by name, and a bound below them."""
    largest = {
        name: np.max(y, initial=0, where=np.isfinite(y))
        for name, (_, y) in points.items()
    }
    colors = colors_of(largest)
    for name in in_order(points):
        # Labels that begin with "_" are not in the legend.
        label = f" {name}" if name.startswith("_") else name
        style: dict[str, Any] = {
            "color": GREY,
            "linewidth": 0.6,
            "alpha": 0.6,
            "zorder": 1.6,
            "label": f"_{name}",
        }
        if name in colors:
            style = {"color": colors[name], "linewidth": 1.2, "label": label}
        line(ax, *points[name], linestyle="--" if name in dashed else "-", **style)
    title = _title(colors, points, what)
    if bound < np.inf:
        ax.axhline(
            bound,
            c=plt.rcParams["text.color"],
            zorder=1.5,
            label=f"radius {bound:.4g}",
            **BOUND,
        )
        title = f"{title}\n(share of units at the radius)".strip()
    return finished(ax, list(points.values()), title)


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names, with numbers in them as numbers: `layer_2` before `layer_10`."""

    def parts(name: str) -> list[Any]:
        return [int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", name)]

    return sorted(names, key=parts)


def colors_of(values: Mapping[str, float]) -> dict[str, str]:
    """Return a color for each of the largest, sorted by name."""
    order = in_order(values)
    largest = sorted(order, key=lambda name: values[name])[-len(COLORS) :]
    return dict(zip(in_order(largest), COLORS, strict=False))


def _title(colors: Collection[str], names: Collection[str], what: str) -> str:
    if len(colors) == len(names):
        return ""
    return f"the {len(colors)} largest of {len(names)} {what}"


def _place(ax: Any) -> dict[str, Any]:
    """Return where the legend is: beside the axes, if the figure makes room for it."""
    style = {"alignment": "left", "fontsize": "small", "title_fontsize": "small"}
    if not ax.figure.get_layout_engine():
        return style | {"loc": "upper right"}
    beside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "frameon": False}
    return style | beside


def legend_of_colors(ax: Any, colors: Mapping[str, str], title: str) -> Any:
    """Add a legend of colored fields."""
    fields = [Patch(color=color, label=name) for name, color in colors.items()]
    ax.legend(handles=fields, title=title, **_place(ax))
    return ax


def finished(ax: Any, points: Sequence[Any], title: str = "") -> Any:
    """Mark what is not finite, choose the scale for what is, and add the legend."""
    ax.margins(y=0.08)
    bad = np.concatenate([[], *(x[~np.isfinite(y)] for x, y in points)])
    ink = plt.rcParams["text.color"]
    at_top(ax, bad, marker="x", color=ink, ms=4, label="not finite")
    ax.autoscale(axis="y")
    # Of everything that is drawn.
    least = ax.dataLim.minposy
    top = ax.dataLim.y1
    zeros = ax.dataLim.y0 <= 0
    if top > 20 * least:
        with_zero = {"linthresh": 10 ** np.floor(np.log10(least)), "linscale": 0.5}
        ax.set_yscale("symlog", **with_zero) if zeros else ax.set_yscale("log")
        ax.set_ylim(bottom=0 if zeros else None)
    elif top > 0:
        ax.set_ylim(0, 1.08 * top)
    ax.xaxis.set_major_locator(_of_steps())
    ax.grid(alpha=0.25)
    legend = ax.legend(title=title or None, **_place(ax))
    for handle in legend.legend_handles:
        if isinstance(handle, Line2D):  # the axes may have other artists
            handle.set_markersize(5)
    return ax


# Of norms that are not finite, on a light and on a dark ground: unlike every blue.
NOT_FINITE = ("#e66100", "#ff8f33")
# Thinner columns would not be seen beside others.
COLUMNS_PER_INCH = 30


def cells(ax: Any, values: np.ndarray, label: str) -> None:
    """Draw a row of cells for each row of norms, and a color bar.

    Blue is dark for large norms on a light ground, and light on a dark one.
    """
    count = values.shape[1]
    most = max(1, int(COLUMNS_PER_INCH * ax.bbox.width / ax.figure.dpi))
    starts = np.arange(0, count, -(-count // most))
    # NaN is the largest.
    values = np.maximum.reduceat(values, starts, axis=1)
    shown = _drawable(values)
    some = shown[shown > 0]
    top = some.max(initial=1e-100) if some.size else 1.0
    least = min(np.quantile(some, 0.01), top / 10) if some.size else 0.1
    is_dark = bool(np.mean(to_rgb(ax.get_facecolor())) < 0.5)
    blues = plt.get_cmap("Blues_r" if is_dark else "Blues")
    span = (0.0, 0.95) if is_dark else (0.05, 1.0)
    shades = ListedColormap(blues(np.linspace(*span, 256)))
    colors = shades.with_extremes(over=NOT_FINITE[is_dark], bad="none")
    bad = ~np.isfinite(values)
    shown = np.ma.masked_where(shown == 0, np.where(bad, 10 * top, shown))
    ends = np.arange(len(values) + 1) - 0.5
    mesh = ax.pcolormesh(
        np.append(starts, count) - 0.5,
        ends,
        shown,
        norm=LogNorm(least, top),
        cmap=colors,
    )
    ax.set(xlim=(-0.5, count - 0.5), ylim=(len(values) - 0.5, -0.5))
    ax.xaxis.set_major_locator(_of_steps())
    extend = "max" if bad.any() else "neither"
    place = {"ax": ax, "pad": 0.015, "aspect": 15}
    bar = ax.figure.colorbar(mesh, label=label, extend=extend, extendfrac=0.08, **place)
    if bad.any():
        style = {"color": NOT_FINITE[is_dark], "fontsize": "small", "loc": "left"}
        bar.ax.set_title("not finite", **style)


def bad_steps_above(
    ax: Any, steps: Sequence[int], marked: Sequence[tuple[int, int]]
) -> Any:
    """Draw triangles above steps, and rings on rows of them."""
    first, last = ax.get_xlim()
    inside = [step for step in steps if first < step < last]
    above = {"transform": ax.get_xaxis_transform(), "clip_on": False, "ls": ""}
    color = plt.rcParams["text.color"]
    ax.plot(inside, [1.04] * len(inside), marker="v", ms=6, c=color, mew=0, **above)
    rings = np.reshape([x for x in marked if x[0] in inside], (-1, 2)).T
    ring = {"marker": "o", "ls": "", "mfc": "none", "clip_on": False}
    # White within black is seen on every color.
    ax.plot(*rings, ms=9, mec="black", mew=3, **ring)
    ax.plot(*rings, ms=9, mec="white", mew=1.3, **ring)
    return ax


def _of_steps() -> Any:
    """Return what places ticks at whole steps."""
    return MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
