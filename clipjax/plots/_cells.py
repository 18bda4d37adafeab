"""Cells whose colors are norms."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import ListedColormap, LogNorm

from clipjax.plots._drawing import drawable, ink, is_dark, ticks_at_steps

# Of norms that are not finite, on a light and on a dark ground: unlike every blue.
NOT_FINITE = ("#e66100", "#ff8f33")


def blues(ax: Any) -> Any:
    """Return colors of norms: dark for large ones on a light ground, else light."""
    colors = plt.get_cmap("Blues_r" if is_dark(ax) else "Blues")
    span = (0.0, 0.95) if is_dark(ax) else (0.05, 1.0)
    listed = ListedColormap(colors(np.linspace(*span, 256)))
    return listed.with_extremes(over=NOT_FINITE[is_dark(ax)], bad="none")


def shades(ax: Any, values: np.ndarray) -> Any:
    """Return the colors of cells for norms, which may be zero or not finite."""
    colors = blues(ax)
    some = values[np.isfinite(values) & (values > 0)]
    least, top = (some.min(), some.max()) if some.size else (1.0, 1.0)
    scale = LogNorm(least, max(top, 10 * least), clip=True)
    shown = colors(scale(np.where(np.isin(values, some), values, least)))
    bad = ~np.isfinite(values)
    return np.where(bad[..., None], colors.get_over(), shown)


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
    shown = drawable(values)
    some = shown[shown > 0]
    top = some.max() if some.size else 1.0
    least = min(np.quantile(some, 0.01), top / 10) if some.size else 0.1
    colors = blues(ax)
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
    ax.xaxis.set_major_locator(ticks_at_steps())
    extend = "max" if bad.any() else "neither"
    place = {"ax": ax, "pad": 0.015, "aspect": 15}
    bar = ax.figure.colorbar(mesh, label=label, extend=extend, extendfrac=0.08, **place)
    if bad.any():
        style = {"color": colors.get_over(), "fontsize": "small", "loc": "left"}
        bar.ax.set_title("not finite", **style)


def bad_steps_above(
    ax: Any, steps: Sequence[int], marked: Sequence[tuple[int, int]]
) -> Any:
    """Draw triangles above steps, and rings on rows of them."""
    first, last = ax.get_xlim()
    inside = [step for step in steps if first < step < last]
    above = {"transform": ax.get_xaxis_transform(), "clip_on": False, "ls": ""}
    color = ink(ax)
    ax.plot(inside, [1.04] * len(inside), marker="v", ms=6, c=color, mew=0, **above)
    rings = np.reshape([x for x in marked if x[0] in inside], (-1, 2)).T
    ring = {"marker": "o", "ls": "", "mfc": "none", "clip_on": False}
    # White within black is seen on every color.
    ax.plot(*rings, ms=9, mec="black", mew=3, **ring)
    ax.plot(*rings, ms=9, mec="white", mew=1.3, **ring)
    return ax
