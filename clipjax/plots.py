"""Three pictures: norms over the steps, norms of groups over the steps, norms of the units of weights.

They need Matplotlib, which `import clipjax` does not load. Each function takes `ax`,
the axes to draw on, and returns them; None makes a new figure:
`plots.norms(log).figure.savefig("norms.png")`. The legend is beside the axes if the
figure has a layout, such as "constrained". Lines differ in colors that can be told
apart by people who cannot tell red from green. A scale is logarithmic if values differ
by more than a factor of 20. Crosses at the top are values that are not finite. Shapes
that do not match, and no steps, raise a ValueError.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from clipjax import _checks
from clipjax._core import bounds, clipping, trees, units
from clipjax._core.messages import a_few, short_repr

try:
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError(
        "clipjax.plots needs Matplotlib: pip install matplotlib"
    ) from error

# Okabe and Ito's colors that are visible on white and on black, and two of Tol's.
_COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#aa4499",
    "#999933",
)
_GREY = "#8a8a8a"
_BOUND: dict[str, Any] = {"linestyle": (0, (6, 2)), "linewidth": 1.6}


def norms(
    norms: Any, *, threshold: Any = None, scale: Any = None, ax: Any = None
) -> Any:
    """Draw the gradient norm over the steps, from 0 on, the threshold, and which steps were clipped.

    Args:
      norms: the norms before clipping, `(steps,)`, or a :class:`clipjax.NormLog`.
      threshold: a number, or one for each step, `(steps,)` or a
        `NormLog("zclip/threshold")`.
      scale: what each gradient was multiplied by, in the same forms: the metric
        `scale`. If it is given, the steps whose scale is below 1 count as clipped, else
        those whose norm is above the threshold.
      ax: the axes to draw on; None makes a new figure.

    Returns:
      The axes. The legend has the share of the steps with a finite norm that were
      clipped.

    Example:
      >>> from clipjax import plots
      >>> ax = plots.norms([0.5, 4.0, 1.0, 2.0], threshold=1.0)
      >>> [line.get_label() for line in ax.lines]
      ['norm', 'clipped (50.0%)', 'threshold 1']
    """
    values, threshold = (
        _per_step("norms", norms),
        getattr(threshold, "norms", threshold),
    )
    limits = _per_step(
        "threshold", np.inf if threshold is None else threshold, values.shape
    )
    finite = np.isfinite(values)
    above = (
        values > limits
        if scale is None
        else _per_step("scale", scale, values.shape) < 1
    )
    ax, steps, clipped = _new(ax), np.arange(len(values)), finite & above
    _line(ax, steps, values, color=_GREY, linewidth=1, label="norm")
    if threshold is not None or scale is not None:
        count, label = (
            clipped.sum(),
            f"clipped ({clipped.sum() / max(1, finite.sum()):.1%})",
        )
        size = 5 if count < 200 else 3 if count < 2000 else 1.5
        ax.plot(
            steps[clipped],
            values[clipped],
            "^",
            c=_COLORS[1],
            ms=size,
            mew=0,
            label=label,
        )
    if threshold is not None:
        label = "threshold" if np.ndim(threshold) else f"threshold {limits[0]:.4g}"
        _line(ax, steps, limits, color=_COLORS[0], zorder=2.5, label=label, **_BOUND)
    ax.set(xlabel="step", ylabel="norm of the gradient")
    return _finished(ax, [(steps, values)])


def group_norms(
    history: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    only: str | Sequence[str] | None = None,
    ax: Any = None,
) -> Any:
    """Draw the norm of each group, such as a layer, over the steps, as one line.

    Args:
      history: the norms of each group, `(steps,)`, by name; or, of a chain with
        :func:`clipjax.record_norms` or :func:`clipjax.clip_by_group_norm`, what
        `clipjax.metrics` returned at each step, in a list or stacked by a `scan`; a
        step that was skipped, or is accumulated, adds no norm.
      only: path patterns of the groups to draw, as in `"gradients/blocks/*"`; None
        draws all.
      ax: the axes to draw on; None makes a new figure.

    Returns:
      The axes. Groups are sorted by name, `layer_2` before `layer_10`. Of more than 8,
      those with the 8 largest norms are colored and in the legend, and others are grey.
      Norms of weights that were recorded are dashed.

    Example:
      >>> from clipjax import plots
      >>> ax = plots.group_norms({"encoder": [2.0, 1.0], "head": [0.5, 0.1]})
      >>> [line.get_label() for line in ax.lines]
      ['encoder', 'head']
    """
    given, at_each_step = history, not isinstance(history, Mapping)
    if not isinstance(history, Mapping):
        rows = (
            jax.device_get(list(history))
            if isinstance(history, Sequence)
            else [history]
        )
        if not all(
            isinstance(row, Mapping) and row.keys() == rows[0].keys() for row in rows
        ):
            shown = short_repr(given)
            raise TypeError(
                "history must be norms by name, or metrics of the same names at each "
                f"step, got {shown}"
            )
        history = {key: [row[key] for row in rows] for key in rows[0]} if rows else {}
    recorded = _groups_in(history)
    if not recorded and any(at_each_step or key.endswith("/steps") for key in history):
        shown = short_repr(given)
        raise TypeError(
            "history must be norms by name, or metrics with record_norms or groups, "
            f"got {shown}"
        )
    names = recorded or {key: key for key in history}
    if only is not None:
        patterns = _checks.check_patterns("only", only)
        chosen = {
            key: name
            for key, name in names.items()
            if any(trees.matches(each, name) for each in patterns)
        }
        if not chosen:
            raise ValueError(
                f"only: {only!r} matches none of {a_few(list(names.values()))}"
            )
        names = chosen
    found = {name: _taken(history, key) for key, name in names.items()}
    if len({x.shape for x in found.values()}) != 1:
        raise ValueError(
            "history must have one or more groups with equally many steps, got "
            f"{list(found)[:20]}"
        )
    ax = _new(ax)
    ax.set(xlabel="step", ylabel="norm")
    weights = [name for name in recorded.values() if name.partition("/")[0] == "params"]
    return _lines(
        ax,
        {name: (np.arange(len(x)), x) for name, x in found.items()},
        "groups",
        dashed=weights,
    )


def unit_norms(
    params: Any,
    *,
    axes: units.Axes | Literal["auto"] = "auto",
    radius: Any = None,
    ax: Any = None,
) -> Any:
    """Draw the norms of the units of weights, sorted in each leaf, and their radius.

    Args:
      params: the weights.
      axes: the axes that are reduced, as in :func:`clipjax.max_norm`.
      radius: a number; None draws none.
      ax: the axes to draw on; None makes a new figure.

    Returns:
      The axes, with one line for each leaf, sorted and colored as in
      :func:`group_norms`. Units at the radius are the flat end of a line; the legend
      has the share of the units there or above.

    Raises:
      TypeError, ValueError: `radius` is negative or not a number; `axes` is invalid, or
        applies to no leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import plots
      >>> params = {"kernel": jnp.array([[3.0, 0.6], [4.0, 0.8]])}
      >>> ax = plots.unit_norms(params, radius=2.0)
      >>> [line.get_label() for line in ax.lines]
      ['kernel (50%)', 'radius 2']
    """
    bound = float(
        bounds.as_constant("radius", np.inf if radius is None else radius, scalar=True)
    )
    lines = {}
    found = units.of_tree(params, units.check_axes(axes, auto=units.fan_in_of_matrices))
    for each, norm in zip(found, units.norms_of(found), strict=True):
        sizes = np.sort(np.asarray(norm, np.float64), axis=None)
        at_bound = sizes >= bound * (1 - 4 * clipping.margin(each.leaf.value.dtype))
        share = (
            f" ({at_bound.sum() / max(1, sizes.size):.0%})" if bound < np.inf else ""
        )
        lines[each.leaf.name + share] = (
            100 * (np.arange(sizes.size) + 0.5) / max(1, sizes.size),
            sizes,
        )
    ax = _new(ax)
    ax.set(
        xlabel="units of a leaf, sorted by norm (%)",
        ylabel="norm of a unit's weights",
        xlim=(-2, 102),
    )
    return _lines(ax, lines, "leaves", bound)


def _per_step(
    name: str, values: Any, shape: tuple[int, ...] | None = None
) -> np.ndarray:
    try:
        array = np.asarray(
            jax.device_get(getattr(values, "norms", values)), np.float64
        )  # those of a NormLog
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be numbers, one for each step, got {short_repr(values)}"
        ) from error
    array = array if array.ndim or not shape else np.full(shape, array)
    if array.ndim != 1 or not array.size or array.shape != (shape or array.shape):
        raise ValueError(
            f"{name} must have shape {shape or '(steps,), with at least one'}, got "
            f"{array.shape}"
        )
    return array


def _groups_in(history: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the groups whose norms are among metrics, by key."""
    recorded = [
        key
        for key in history
        if key.startswith("record_norms") and not key.endswith("/steps")
    ]
    clipped = [
        key for key in history if re.fullmatch("clip_by_group_norm[^/]*/.+/norm", key)
    ]
    names = {
        key: key.removesuffix("/norm").removeprefix("clip_by_group_norm/")
        for key in clipped
    }
    return {key: key.removeprefix("record_norms/") for key in recorded} or names


def _taken(history: Mapping[str, Any], key: str) -> np.ndarray:
    """Return the values of a metric at the steps that its transformation took; it shows the last one at others."""
    values, counter = (
        _per_step(f"history[{key!r}]", history[key]),
        f"{key.partition('/')[0]}/steps",
    )
    if counter not in history:
        return values
    return values[
        np.diff(_per_step(counter, history[counter], values.shape), prepend=0) != 0
    ]


def _new(ax: Any) -> Any:
    return plt.subplots(figsize=(8, 4), layout="constrained")[1] if ax is None else ax


def _line(ax: Any, x: np.ndarray, y: np.ndarray, **style: Any) -> None:
    """Draw a line, with dots where a value has no neighbors."""
    good = np.isfinite(np.concatenate([[np.nan], y, [np.nan]]))
    alone = np.flatnonzero(good[1:-1] & ~good[:-2] & ~good[2:]).tolist()
    dots = {"marker": "o", "markersize": 4, "markevery": alone} if alone else {}
    ax.plot(x, np.where(np.isfinite(y), y, np.nan), **style, **dots)


def _lines(
    ax: Any,
    lines: dict[str, Any],
    what: str,
    bound: float = np.inf,
    dashed: Collection[str] = (),
) -> Any:
    """Draw lines, x and y by name, and a bound below them."""
    order = sorted(
        lines,
        key=lambda name: [
            int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", name)
        ],
    )
    largest = {
        name: np.max(y, initial=0, where=np.isfinite(y))
        for name, (_, y) in lines.items()
    }
    named = set(sorted(order, key=lambda name: largest[name])[-len(_COLORS) :])
    colors = iter(_COLORS)
    for name in order:
        label = (
            f" {name}" if name.startswith("_") else name
        )  # labels that begin with "_" are not in the legend
        style: dict[str, Any] = {
            "color": _GREY,
            "linewidth": 0.6,
            "alpha": 0.6,
            "zorder": 1.6,
            "label": f"_{name}",
        }
        if name in named:
            style = {"color": next(colors), "linewidth": 1.2, "label": label}
        _line(ax, *lines[name], linestyle="--" if name in dashed else "-", **style)
    title = (
        [f"the {len(named)} largest of {len(lines)} {what}"]
        if len(lines) > len(named)
        else []
    )
    if bound < np.inf:
        ax.axhline(
            bound,
            c=plt.rcParams["text.color"],
            zorder=1.5,
            label=f"radius {bound:.4g}",
            **_BOUND,
        )
        title.append("(share of units at the radius)")
    return _finished(ax, list(lines.values()), "\n".join(title))


def _finished(ax: Any, points: Sequence[Any], title: str = "") -> Any:
    """Mark what is not finite, choose the scale for what is, and add the legend."""
    ax.margins(y=0.08)
    bad = np.concatenate([[], *(x[~np.isfinite(y)] for x, y in points)])
    if bad.size:
        top, ink = ax.get_xaxis_transform(), plt.rcParams["text.color"]
        ax.plot(
            bad,
            np.full(bad.shape, 0.98),
            "x",
            color=ink,
            ms=4,
            transform=top,
            label="not finite",
        )
    ax.autoscale(axis="y")
    least, top, zeros = (
        ax.dataLim.minposy,
        ax.dataLim.y1,
        ax.dataLim.y0 <= 0,
    )  # of all that is drawn
    if top > 20 * least:
        with_zero = {"linthresh": 10 ** np.floor(np.log10(least)), "linscale": 0.5}
        ax.set_yscale("symlog", **with_zero) if zeros else ax.set_yscale("log")
        ax.set_ylim(bottom=0 if zeros else None)
    elif top > 0:
        ax.set_ylim(0, 1.08 * top)
    ax.xaxis.set_major_locator(
        MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
    )
    ax.grid(alpha=0.25)
    outside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "frameon": False}
    place = outside if ax.figure.get_layout_engine() else {"loc": "upper right"}
    legend = ax.legend(
        title=title or None,
        alignment="left",
        fontsize="small",
        title_fontsize="small",
        **place,
    )
    for handle in legend.legend_handles:
        if isinstance(handle, Line2D):  # the axes may have other artists
            handle.set_markersize(5)
    return ax
