"""How pictures are drawn: colors, lines, marks, scales and legends."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from clipjax._core.messages import short_repr
from clipjax._extra import extra

with extra("plots"):
    from matplotlib import pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.colors import to_rgb
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import MaxNLocator
    from matplotlib.transforms import ScaledTranslation

# Okabe and Ito's colors that are visible on white and on black, and a violet and a
# brown that people who are color-blind can tell from these.
COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#9933ee",
    "#995533",
)
GREY = "#8a8a8a"
LOG = ", log scale"
BOUND: dict[str, Any] = {"linestyle": (0, (6, 2)), "linewidth": 1.6}
# Of the lines that get no color of their own.
REST: dict[str, Any] = {"color": GREY, "linewidth": 0.6, "alpha": 0.6, "zorder": 1.6}


def new_axes(ax: Any, height: float = 4, width: float = 8) -> Any:
    """Return the axes, or those of a new figure."""
    if isinstance(ax, Axes):
        return ax
    if ax is not None:
        raise TypeError(
            "ax must be one of Matplotlib's axes, such as plt.subplots()[1], got "
            f"{short_repr(ax)}"
        )
    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def split(ax: Any) -> Any:
    """Make room in the right half of the axes for new ones with the same y axis."""
    spec = ax.get_subplotspec()
    if spec is None:  # they were placed by hand
        left, bottom, width, height = ax.get_position().bounds
        ax.set_position((left, bottom, 0.48 * width, height))
        half = (left + 0.52 * width, bottom, 0.48 * width, height)
        return ax.figure.add_axes(half, sharey=ax)
    halves = spec.subgridspec(1, 2)
    ax.set_subplotspec(halves[0])
    return ax.figure.add_subplot(halves[1], sharey=ax)


def ink(ax: Any) -> Any:
    """Return the color of text on these axes, which is light in a dark figure."""
    return ax.xaxis.label.get_color()


def is_dark(ax: Any) -> bool:
    """Return whether the ground of these axes is dark."""
    return bool(np.mean(to_rgb(ax.get_facecolor())) < 0.5)


def line(ax: Any, x: np.ndarray, y: np.ndarray, **style: Any) -> None:
    """Draw a line, with dots where a value has no neighbors."""
    good = np.isfinite(np.concatenate([[np.nan], y, [np.nan]]))
    alone = np.flatnonzero(good[1:-1] & ~good[:-2] & ~good[2:]).tolist()
    dots = {"marker": "o", "markersize": 4, "markevery": alone} if alone else {}
    ax.plot(x, drawable(y), **style, **dots)


def marks(
    ax: Any, x: np.ndarray, y: np.ndarray, where: np.ndarray, **style: Any
) -> None:
    """Draw marks, smaller ones if there are many."""
    count = where.sum()
    size = 5 if count < 200 else 3 if count < 2000 else 1.5
    ax.plot(x[where], drawable(y[where]), linestyle="", ms=size, **style)


def at_top(ax: Any, x: np.ndarray, **style: Any) -> None:
    """Draw marks at the top of the axes, whatever their scale."""
    if x.size:
        top = ax.get_xaxis_transform()
        ax.plot(x, np.full(x.shape, 0.98), linestyle="", transform=top, **style)


def say_at_top(ax: Any, texts: Mapping[float, str]) -> None:
    """Write texts below the marks at the top, each at the first x that has it.

    They are in rows of their own, above the lines: the first three, for which there is
    room.
    """
    first: dict[str, float] = {}
    for x in sorted(texts):
        first.setdefault(texts[x], x)
    some = [*first.items()][:3]
    scale = ax.yaxis.get_transform()
    low, high = scale.transform(ax.get_ylim())
    room = 0.08 * len(some) * (high - low)
    ax.set_ylim(top=scale.inverted().transform(high + room))
    middle = np.mean(ax.get_xlim())
    for row, (text, x) in enumerate(some):
        is_right = x > middle
        ax.annotate(
            f"{x:g}: {text}",
            (x, 0.91 - 0.07 * row),
            xycoords=ax.get_xaxis_transform(),
            xytext=(4 if is_right else -4, 0),
            textcoords="offset points",
            ha="right" if is_right else "left",
            va="center",
            size="small",
            color=ink(ax),
            path_effects=[withStroke(linewidth=3, foreground=ax.get_facecolor())],
        )


def drawable(y: np.ndarray) -> np.ndarray:
    """Return NaN for what is not finite, and no size with which margins overflow."""
    y = np.where(np.isfinite(y), y, np.nan)
    return np.where(y > 0, np.clip(y, 1e-100, 1e100), y)


def largest(points: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest finite value of each line."""
    return {
        name: np.max(y, initial=0, where=np.isfinite(y))
        for name, (_, y) in points.items()
    }


def lines(
    ax: Any,
    points: Mapping[str, Any],
    what: str,
    *,
    sizes: Mapping[str, float],
    bound: float = np.inf,
    styles: Mapping[str, Any] | None = None,
    causes: Mapping[float, str] | None = None,
) -> Any:
    """Draw lines, x and y by name, those of the largest sizes in color, and a bound."""
    colors = colors_of(sizes)
    for name in in_order(points):
        # Labels that begin with "_" are not in the legend.
        label = f" {name}" if name.startswith("_") else name
        own = {"color": colors.get(name), "linewidth": 1.2, "label": label}
        style = own if name in colors else {**REST, "label": f"_{name}"}
        line(ax, *points[name], linestyle=(styles or {}).get(name, "-"), **style)
    if bound < np.inf:
        style = {"c": ink(ax), "zorder": 1.5, "label": f"radius {bound:.4g}", **BOUND}
        ax.axhline(bound, **style)
    title = _title(colors, points, what)
    return finished(ax, list(points.values()), title, causes)


def in_order(names: Iterable[str]) -> list[str]:
    """Sort names, with numbers in them as numbers: `layer_2` before `layer_10`."""

    def parts(name: str) -> list[Any]:
        return [int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", name)]

    return sorted(names, key=parts)


def words(names: Sequence[str]) -> str:
    """Return names as short text: layers in a row as a range, of others the first."""
    runs: list[list[Any]] = []  # the text before a number, the first and the last one
    for name in in_order(names):
        before = name.rstrip("0123456789")
        number = name[len(before) :]
        last = runs[-1] if runs else None
        if last and number and last[0] == before and last[2] == int(number) - 1:
            last[2] = int(number)
        else:
            first = int(number) if number else None
            runs.append([before, first, first])
    texts = []
    for before, first, last in runs:
        numbers = f"{first} to {last}" if first != last else first
        texts.append(before if first is None else f"{before}{numbers}")
    if len(texts) > 2:
        return f"{texts[0]} and {len(texts) - 1} more"
    return ", ".join(texts)


def colors_of(values: Mapping[str, float]) -> dict[str, str]:
    """Return a color for each of the largest, sorted by name."""
    order = in_order(values)
    largest = sorted(order, key=lambda name: values[name])[-len(COLORS) :]
    return dict(zip(in_order(largest), COLORS, strict=False))


def _title(colors: Collection[str], names: Collection[str], what: str) -> str:
    if len(colors) == len(names):
        return ""
    return f"the {len(colors)} largest of {len(names)} {what}"


def _add_legend(ax: Any, handles: Sequence[Any], title: str) -> Any:
    """Add a legend off the data, if the figure has a layout, which makes room for it.

    It is beside the axes, or below if they are narrow. Without a layout, it is in them.
    """
    width = ax.bbox.width / ax.figure.dpi  # in inches
    style: dict[str, Any] = {"alignment": "left", "labelcolor": ink(ax)}
    style |= {"fontsize": "small", "title_fontsize": "small", "title": title or None}
    if not ax.figure.get_layout_engine():
        style |= {"loc": "upper right", "facecolor": ax.get_facecolor()}
    elif width < 5:
        size = ax.xaxis.label.get_size()  # in points; the x axis is in between
        inches = ScaledTranslation(
            0, -(2.6 * size + 12) / 72, ax.figure.dpi_scale_trans
        )
        at = {"bbox_to_anchor": (0, 0), "bbox_transform": ax.transAxes + inches}
        # A letter is about half as wide as it is high, and a line 3 letters long.
        letters = 5 + max((len(each.get_label()) for each in handles), default=0)
        columns = 72 * width // (0.45 * size * letters)
        at |= {"ncols": max(1, min(4, int(columns)))}
        style |= {"loc": "upper left", "frameon": False, "borderaxespad": 0} | at
    else:
        style |= {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "frameon": False}
    legend = ax.legend(handles=handles, **style)
    legend.get_title().set_color(ink(ax))
    return legend


def field(ax: Any, label: str, **style: Any) -> Any:
    """Return a field of a legend."""
    return Patch(label=label, edgecolor=ax.get_facecolor(), **style)


def legend_of_colors(
    ax: Any,
    colors: Mapping[str, str],
    title: str,
    *,
    more: Sequence[Any] = (),
) -> Any:
    """Add a legend of colored fields, and of more."""
    fields = [field(ax, name, facecolor=color) for name, color in colors.items()]
    if fields or more:
        _add_legend(ax, [*fields, *more], title)
    return ax


def star(ax: Any, x: Any, y: Any, label: str) -> Any:
    """Mark a point on a field of any color with a star."""
    look = {"marker": "*", "ms": 11, "mfc": ink(ax), "mec": ax.get_facecolor()}
    return ax.plot(x, y, linestyle="", clip_on=False, label=label, **look)[0]


def finished(
    ax: Any,
    points: Sequence[Any],
    title: str = "",
    causes: Mapping[float, str] | None = None,
) -> Any:
    """Mark what is not finite, choose the scale for what is, and add the legend.

    What is not finite gets a cross at the top of the axes, and what `causes` says of
    its x.
    """
    ax.margins(y=0.08)
    bad = np.concatenate([[], *(x[~np.isfinite(y)] for x, y in points)])
    at_top(ax, bad, marker="x", color=ink(ax), ms=4, label="not finite")
    ax.autoscale(axis="y")
    # Of everything that is drawn.
    least = ax.dataLim.minposy
    top = ax.dataLim.y1
    zeros = ax.dataLim.y0 <= 0
    label = ax.get_ylabel().removesuffix(LOG)
    if top > 20 * least:
        label += LOG
        with_zero = {"linthresh": 10 ** np.floor(np.log10(least)), "linscale": 0.5}
        ax.set_yscale("symlog", **with_zero) if zeros else ax.set_yscale("log")
        ax.set_ylim(bottom=0 if zeros else None)
    elif top > 0:
        ax.set_ylim(0, 1.08 * top)
    ax.xaxis.set_major_locator(ticks_at_steps())
    ax.set_ylabel(label)
    say_at_top(ax, causes or {})
    ax.grid(color=ink(ax), alpha=0.12)
    legend = _add_legend(ax, ax.get_legend_handles_labels()[0], title)
    for handle in legend.legend_handles:
        if isinstance(handle, Line2D):  # the axes may have other artists
            handle.set_markersize(5)
    return ax


def ticks_at_steps() -> Any:
    """Return what places ticks at whole steps."""
    return MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
