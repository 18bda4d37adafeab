"""Pictures of norms over the steps, of groups, of bad steps, and of units of weights.

They need Matplotlib, which `import clipjax` does not load. Each function takes `ax`,
the axes to draw on, and returns them; None makes a new figure:
`plots.norms(history).figure.savefig("norms.png")`. The legend is beside the axes if the
figure has a layout, such as "constrained". Lines differ in colors that can be told
apart by people who cannot tell red from green. A scale is logarithmic if values differ
by more than a factor of 20. Crosses at the top are values that are not finite. Shapes
that do not match, and no steps, raise a ValueError.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from clipjax import _checks
from clipjax._core import bounds, clipping, trees, units
from clipjax._core.messages import a_few, short_repr
from clipjax.monitoring.bad_steps import bad_steps as find_bad_steps
from clipjax.monitoring.history import (
    History,
    columns_of,
    key_of,
    label_of,
    per_step,
    steps_taken,
)

try:
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
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


def norms(history: History, name: str | None = None, *, ax: Any = None) -> Any:
    """Draw a norm over the steps, its threshold, and what was clipped and skipped.

    Args:
      history: what `clipjax.metrics` returned at each step, in a list or stacked by a
        `scan`.
      name: which norm: a transformation, such as `"zclip"`, or a whole key. Not needed
        if one clip has a norm, or none but a skip.
      ax: the axes to draw on; None makes a new figure.

    Returns:
      The axes. The threshold is the metric `threshold`, or else the norm after the clip
      where it clipped, so that a fixed one is a line through these steps. The legend
      has the shares of the steps that were clipped, of those with a finite norm, and
      skipped, of all. A skipped step is at the norm that the skip has seen, or at the
      top if that is not finite.

    Raises:
      ValueError: several clips have a norm, and none is named.

    Example:
      >>> from clipjax import plots
      >>> norms, thresholds = [0.5, 4.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.5]
      >>> history = {"zclip/norm": norms, "zclip/threshold": thresholds}
      >>> ax = plots.norms(history)
      >>> [line.get_label() for line in ax.lines]
      ['norm', 'clipped (50.0%)', 'threshold']
    """
    columns = columns_of(history)
    key = _norm_in(columns) if name is None else key_of(columns, name)
    own = key.removesuffix("/norm")
    norm = per_step(columns, key)
    if not norm.size:
        raise ValueError("history must have at least one step")
    taken = steps_taken(columns, key)
    skips = _skips_in(columns)
    skipped = np.zeros(norm.shape, bool)
    for skip in skips:
        is_new = np.diff(per_step(columns, f"{skip}/skipped"), prepend=0) > 0
        norm = np.where(is_new, per_step(columns, f"{skip}/norm"), norm)
        skipped |= is_new
    limits = _limits_of(columns, own, taken)
    steps = np.arange(norm.size)
    shown = taken | skipped
    ax = _new(ax)
    _line(ax, steps[shown], norm[shown], color=_GREY, linewidth=1, label="norm")
    if own not in skips and (limits is not None or f"{own}/scale" in columns):
        counted = taken & ~skipped & np.isfinite(norm)
        clipped = counted & _is_clipped(columns, own, norm, limits)
        share = clipped.sum() / max(1, counted.sum())
        style = {"marker": "^", "color": _COLORS[1], "mew": 0}
        _marks(ax, steps, norm, clipped, label=f"clipped ({share:.1%})", **style)
    if skips:
        style = {"marker": "o", "color": _COLORS[3], "mfc": "none"}
        seen = skipped & np.isfinite(norm)
        _marks(ax, steps, norm, seen, label=f"skipped ({skipped.mean():.1%})", **style)
        _at_top(ax, steps[skipped & ~seen], ms=5, **style)
    if limits is not None:
        known = taken & ~np.isnan(limits)
        least, most = limits[known].min(), limits[known].max()
        same = least == most or most < 1.001 * least
        label = f"threshold {least:.4g}" if same else "threshold"
        style = {"color": _COLORS[0], "zorder": 2.5, "label": label}
        _line(ax, steps[known], limits[known], **style, **_BOUND)
    ax.set(xlabel="step", ylabel="norm of the gradient")
    return _finished(ax, [(steps[shown], norm[shown])])


def group_norms(
    history: History,
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
    columns = columns_of(history)
    recorded = _groups_in(columns)
    of_metrics = columns is not history or any(
        key.endswith("/steps") for key in columns
    )
    if not recorded and columns and of_metrics:
        raise TypeError(
            "history must be norms by name, or metrics with record_norms or groups, "
            f"got {short_repr(history)}"
        )
    names = recorded or {key: key for key in columns}
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
    values = {key: per_step(columns, key) for key in names}
    if len({x.shape for x in values.values()}) != 1:
        raise ValueError(
            "history must have one or more groups with equally many steps, got "
            f"{list(names.values())[:20]}"
        )
    labels = {key: label_of(columns, key) for key in names}
    one_of_each = {label: key for key, label in labels.items()}
    taken = {x: steps_taken(columns, key) for x, key in one_of_each.items()}
    found = {name: values[key][taken[labels[key]]] for key, name in names.items()}
    ax = _new(ax)
    ax.set(xlabel="step", ylabel="norm")
    weights = [name for name in recorded.values() if name.partition("/")[0] == "params"]
    return _lines(
        ax,
        {name: (np.arange(len(x)), x) for name, x in found.items()},
        "groups",
        dashed=weights,
    )


def bad_steps(opt_state: Any, *, ax: Any = None) -> Any:
    """Draw which groups the norm of each bad step came from, as bars.

    Args:
      opt_state: an optimizer state with a recorder that keeps bad steps, as for
        :func:`clipjax.bad_steps`.
      ax: the axes to draw on; None makes a new figure.

    Returns:
      The axes, with one bar for each step, the oldest at the top. Its parts are the
      shares of the groups in the squared norm, sorted and colored as in
      :func:`group_norms`. In a hatched bar they are the groups that were not finite, of
      equal shares. In front of it is the norm, or the loss if that was bad.

    Raises:
      ValueError: no recorder keeps bad steps, or it has no groups.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> from clipjax import plots
      >>> tx = clipjax.record_norms("leaf", keep=4)
      >>> grads = {"body": jnp.ones(3), "head": jnp.array([jnp.inf])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> ax = plots.bad_steps(state)
      >>> [text.get_text() for text in ax.legend_.get_texts()]
      ['head']
    """
    steps = find_bad_steps(opt_state)
    if any(not step.groups for step in steps):
        raise ValueError(
            "opt_state: its recorder has one norm for all leaves; name groups, as in "
            "record_norms('leaf', keep=16)"
        )
    each = [_shares(step.groups) for step in steps]
    names = steps[0].groups if steps else {}
    largest = {name: max(shares[name] for shares in each) for name in names}
    colors = _colors({name: share for name, share in largest.items() if share > 0})
    ax = _new(ax, height=1.2 + 0.3 * max(3, len(steps)))
    for row, (step, shares) in enumerate(zip(steps, each, strict=True)):
        is_bad = not np.isfinite([*step.groups.values()]).all()
        style = {"height": 0.7, "ec": "white", "hatch": "////" if is_bad else None}
        start = 0.0
        for name, color in colors.items():
            ax.barh(row, shares[name], left=start, color=color, **style)
            start += shares[name]
        # The others, as one.
        ax.barh(row, sum(shares.values()) - start, left=start, color=_GREY, **style)
    labels = [f"{step.step}: {step.cause}" for step in steps]
    ax.set_yticks(range(len(steps)), labels)
    ax.set(xlabel="share of the squared norm (%)", ylabel="step", xlim=(0, 100))
    ax.invert_yaxis()
    ax.legend(
        handles=[Patch(color=color, label=name) for name, color in colors.items()],
        title=f"of {len(names)} groups",
        **_place(ax),
    )
    return ax


def _shares(groups: Mapping[str, float]) -> dict[str, float]:
    """Return the shares of groups in the squared norm, in percent.

    Of groups that are not finite, each has the same.
    """
    sizes = np.array([*groups.values()])
    bad = ~np.isfinite(sizes)
    parts = bad.astype(float)
    if not bad.any() and sizes.any():
        parts = (sizes / sizes.max()) ** 2
    return dict(zip(groups, 100 * parts / (parts.sum() or 1), strict=True))


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


def _norm_in(columns: Mapping[str, Any]) -> str:
    """Return the key of the one norm that is not that of a skip, or of the one norm."""
    found = [key for key in columns if key == "norm" or key.endswith("/norm")]
    of_skips = [f"{skip}/norm" for skip in _skips_in(columns)]
    of_clips = [key for key in found if key not in of_skips]
    chosen = of_clips or found or _recorded_in(columns)
    if len(chosen) != 1:
        raise ValueError(
            "name must say which norm to draw, of "
            f"{a_few(chosen or list(columns)) or 'none'}"
        )
    return chosen[0]


def _skips_in(columns: Mapping[str, Any]) -> list[str]:
    """Return the names of the transformations that skip steps."""
    ends = "/skipped"
    return [key.removesuffix(ends) for key in columns if key.endswith(ends)]


def _limits_of(
    columns: Mapping[str, Any], own: str, taken: np.ndarray
) -> np.ndarray | None:
    """Return the threshold at each step, NaN where it is not known."""
    if f"{own}/threshold" in columns:
        return per_step(columns, f"{own}/threshold")
    if f"{own}/norm_after" not in columns or f"{own}/scale" not in columns:
        return None
    after = per_step(columns, f"{own}/norm_after")
    clipped = taken & (per_step(columns, f"{own}/scale") < 1)
    if not clipped.any():
        return None
    least, most = after[clipped].min(), after[clipped].max()
    # Rounding and margins of a fixed threshold are smaller.
    if most < 1.001 * least:
        return np.full(after.shape, np.median(after[clipped]))
    return np.where(clipped, after, np.nan)


def _is_clipped(
    columns: Mapping[str, Any], own: str, norm: np.ndarray, limits: Any
) -> np.ndarray:
    if f"{own}/scale" in columns:
        return per_step(columns, f"{own}/scale") < 1
    return norm > limits


def _recorded_in(columns: Mapping[str, Any]) -> list[str]:
    """Return the keys of norms that `record_norms` has measured."""
    return [
        key
        for key in columns
        if key.startswith("record_norms") and not key.endswith("/steps")
    ]


def _groups_in(columns: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the groups whose norms are among metrics, by key."""
    recorded = _recorded_in(columns)
    if recorded:
        return {key: key.removeprefix("record_norms/") for key in recorded}
    return {
        key: key.removesuffix("/norm").removeprefix("clip_by_group_norm/")
        for key in columns
        if re.fullmatch("clip_by_group_norm[^/]*/.+/norm", key)
    }


def _new(ax: Any, height: float = 4) -> Any:
    if ax is not None:
        return ax
    return plt.subplots(figsize=(8, height), layout="constrained")[1]


def _line(ax: Any, x: np.ndarray, y: np.ndarray, **style: Any) -> None:
    """Draw a line, with dots where a value has no neighbors."""
    good = np.isfinite(np.concatenate([[np.nan], y, [np.nan]]))
    alone = np.flatnonzero(good[1:-1] & ~good[:-2] & ~good[2:]).tolist()
    dots = {"marker": "o", "markersize": 4, "markevery": alone} if alone else {}
    ax.plot(x, _drawable(y), **style, **dots)


def _marks(
    ax: Any, x: np.ndarray, y: np.ndarray, where: np.ndarray, **style: Any
) -> None:
    """Draw marks, smaller ones if there are many."""
    count = where.sum()
    size = 5 if count < 200 else 3 if count < 2000 else 1.5
    ax.plot(x[where], _drawable(y[where]), linestyle="", ms=size, **style)


def _at_top(ax: Any, x: np.ndarray, **style: Any) -> None:
    """Draw marks at the top of the axes, whatever their scale."""
    if x.size:
        top = ax.get_xaxis_transform()
        ax.plot(x, np.full(x.shape, 0.98), linestyle="", transform=top, **style)


def _drawable(y: np.ndarray) -> np.ndarray:
    """Return NaN for what is not finite, and no size with which margins overflow."""
    y = np.where(np.isfinite(y), y, np.nan)
    return np.where(y > 0, np.clip(y, 1e-100, 1e100), y)


def _lines(
    ax: Any,
    lines: dict[str, Any],
    what: str,
    bound: float = np.inf,
    dashed: Collection[str] = (),
) -> Any:
    """Draw lines, x and y by name, and a bound below them."""
    largest = {
        name: np.max(y, initial=0, where=np.isfinite(y))
        for name, (_, y) in lines.items()
    }
    colors = _colors(largest)
    for name in _in_order(lines):
        # Labels that begin with "_" are not in the legend.
        label = f" {name}" if name.startswith("_") else name
        style: dict[str, Any] = {
            "color": _GREY,
            "linewidth": 0.6,
            "alpha": 0.6,
            "zorder": 1.6,
            "label": f"_{name}",
        }
        if name in colors:
            style = {"color": colors[name], "linewidth": 1.2, "label": label}
        _line(ax, *lines[name], linestyle="--" if name in dashed else "-", **style)
    title = _title(colors, lines, what)
    if bound < np.inf:
        ax.axhline(
            bound,
            c=plt.rcParams["text.color"],
            zorder=1.5,
            label=f"radius {bound:.4g}",
            **_BOUND,
        )
        title = f"{title}\n(share of units at the radius)".strip()
    return _finished(ax, list(lines.values()), title)


def _in_order(names: Iterable[str]) -> list[str]:
    """Sort names, with numbers in them as numbers: `layer_2` before `layer_10`."""

    def parts(name: str) -> list[Any]:
        return [int(x) if x.isdecimal() else x for x in re.split(r"(\d+)", name)]

    return sorted(names, key=parts)


def _colors(sizes: Mapping[str, float]) -> dict[str, str]:
    """Return a color for each of the largest, sorted by name."""
    order = _in_order(sizes)
    largest = sorted(order, key=lambda name: sizes[name])[-len(_COLORS) :]
    return dict(zip(_in_order(largest), _COLORS, strict=False))


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


def _finished(ax: Any, points: Sequence[Any], title: str = "") -> Any:
    """Mark what is not finite, choose the scale for what is, and add the legend."""
    ax.margins(y=0.08)
    bad = np.concatenate([[], *(x[~np.isfinite(y)] for x, y in points)])
    ink = plt.rcParams["text.color"]
    _at_top(ax, bad, marker="x", color=ink, ms=4, label="not finite")
    ax.autoscale(axis="y")
    # Of all that is drawn.
    least = ax.dataLim.minposy
    top = ax.dataLim.y1
    zeros = ax.dataLim.y0 <= 0
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
    legend = ax.legend(title=title or None, **_place(ax))
    for handle in legend.legend_handles:
        if isinstance(handle, Line2D):  # the axes may have other artists
            handle.set_markersize(5)
    return ax
