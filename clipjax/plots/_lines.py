"""Lines over the steps: a norm and its threshold, and the norms of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clipjax.monitoring import history as runs
from clipjax.plots import _drawing as draw
from clipjax.plots._columns import (
    columns_of,
    groups_of,
    key_of_norm,
    kind_in,
    skips_around,
    was_seen,
    was_skipped,
)


def norms(history: runs.History, *, name: str | None = None, ax: Any = None) -> Any:
    """Draw a norm over the steps, its threshold, and what was clipped and skipped.

    Use it to see whether a threshold suits a run: how many steps it clips, and which.

    Args:
      history: what :func:`clipjax.metrics` returned at each step, as a list of dicts or
        stacked by a `scan`.
      name: the norm to draw: the name of a transformation, such as `"zclip"`, or a
        whole key, such as `"record_norms/updates/head"`. None, the default, means the
        norm of the only clip, or the only norm of a history without a clip.
      ax: the axes to draw on. None, the default, makes a new figure.

    Returns:
      The axes. The legend has the percentage of the steps that were clipped, and of
      those that were skipped. A threshold that is no metric is read from the steps that
      were clipped, and drawn over all steps if it was the same at each of them; that of
      `adagc` is the smallest one of its leaves. A clip that a skip wraps has no norm at
      a skipped step, so the mark of that step is at the top; draw the norm of the skip
      to see how large the gradient was. An orange cross at the top is a norm that is
      not finite.

    Raises:
      TypeError: `history` is not a history, as when it is the dict of one step; `ax` is
        not one of Matplotlib's axes.
      ValueError: `history` has several norms and `name` is None, or has none of this
        name, or has no steps.

    See Also:
      :func:`group_norms` draws a line for each layer; :func:`clipjax.series` returns
      the numbers; :func:`clipjax.suggest` compares thresholds.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> from clipjax import plots
      >>> tx, history = clipjax.clip_by_global_norm(1.0), []
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (0.5, 4.0, 0.8, 2.0):
      ...     _, state = tx.update(jnp.array([norm]), state)
      ...     history.append(clipjax.metrics(state))
      >>> ax = plots.norms(history)
      >>> [line.get_label() for line in ax.lines]
      ['norm', 'clipped (50%)', 'threshold 1']
    """
    columns = columns_of(history)
    key = key_of_norm(columns, name)
    norm, saw = columns.values[key], was_seen(columns, key)
    skipped = np.zeros(norm.shape, bool)
    for skip in skips_around(columns, key):
        skipped |= was_skipped(columns, skip)
    steps = np.arange(norm.size)
    own = key.removesuffix("/norm")
    scale, limits, after = (
        columns.values.get(f"{own}/{x}") for x in ("scale", "threshold", "norm_after")
    )
    ax = draw.new_axes(ax)  # after all errors
    draw.line(ax, steps[saw], norm[saw], color=draw.GREY, lw=1, label="norm")
    varying: dict[str, Any] | None = {}
    clipped = np.zeros(norm.shape, bool)
    if scale is not None:
        clipped = saw & ((scale < 1) | _was_counted(columns.values, own))
        style: Any = {"ls": "", "marker": "^", "ms": 5, "color": draw.COLORS[0]}
        label = f"clipped ({_percent(clipped[saw])})"
        ax.plot(steps[clipped], norm[clipped], label=label, **style)
    if limits is None and scale is not None and after is not None:
        # It is what the clip left, if the largest norm was clipped most.
        left = np.where(clipped, norm * scale, np.nan)
        limits = np.where(np.isclose(left, after, rtol=1e-3), left, np.nan)
        varying = {"ls": "", "marker": "_"}
        if own.rpartition("/")[2].startswith("clip_by_value"):
            varying = None  # it may have two limits, of which one is the nearer one
    if limits is not None:
        free = norm[saw & ~clipped & ~skipped & np.isfinite(norm)]
        _draw_threshold(ax, steps[saw], limits[saw], free, varying)
    if skipped.any():
        style = {"marker": "o", "ms": 6, "mfc": "none", "mew": 1.5}
        style |= {"color": draw.COLORS[1], "label": f"skipped ({_percent(skipped)})"}
        shown = skipped & saw & np.isfinite(norm)
        ax.plot(steps[shown], norm[shown], ls="", **style)
        draw.at_top(ax, steps[skipped & ~shown], **style)
    ax.set_ylabel("norm")
    return draw.finish(ax)


def _was_counted(values: Mapping[str, np.ndarray], own: str) -> np.ndarray:
    """Return where a step was counted as clipped, if its row comes next to another.

    `clip_by_value` may clip elements that are not the largest.
    """
    steps, share = (values.get(f"{own}/{x}") for x in ("steps", "clipped_fraction"))
    if steps is None or share is None:
        return np.zeros((), bool)
    counted = np.round(share * steps)
    return (np.diff(counted, prepend=0) > 0) & (np.diff(steps, prepend=0) == 1)


def _percent(where: np.ndarray) -> str:
    return f"{100 * where.sum() / max(1, where.size):.3g}%"


def _draw_threshold(
    ax: Any, steps: np.ndarray, limits: np.ndarray, free: np.ndarray, varying: Any
) -> None:
    """Draw a threshold where it is known.

    One that is the same at all steps, and that no norm which is `free` exceeds, is a
    line across the axes; any other has the style `varying`, or none.
    """
    finite = limits[np.isfinite(limits)]
    if not finite.size:
        return
    style = {"color": draw.COLORS[0], "ls": (0, (6, 2)), "lw": 1.6, "zorder": 2.5}
    # What a fixed threshold leaves differs by rounding.
    if max([*finite, *free]) <= 1.001 * finite.min():
        ax.axhline(finite.min(), label=f"threshold {finite.min():.4g}", **style)
    elif varying is not None:
        limits = np.where(np.isfinite(limits), limits, np.nan)
        ax.plot(steps, limits, label="threshold", **style | varying)


def group_norms(
    history: runs.History, *, only: str | Sequence[str] | None = None, ax: Any = None
) -> Any:
    """Draw the norm of each group, such as a layer, as a line over the steps.

    Use it to compare the norms of a few layers; :func:`heat_map` shows many.

    Args:
      history: what :func:`clipjax.metrics` returned at each step, as a list of dicts or
        stacked by a `scan`. The chain needs :func:`clipjax.record_norms` with groups,
        or :func:`clipjax.clip_by_group_norm`.
      only: path patterns of the groups to draw, as in `"gradients/blocks/*"`. None, the
        default, draws all groups.
      ax: the axes to draw on. None, the default, makes a new figure.

    Returns:
      The axes, with one line for each group. Of more than 8 groups, the 8 with the
      largest norms are colored and in the legend; the other lines are grey. An orange
      cross at the top is a norm that is not finite.

    Raises:
      TypeError: `history` is not a history, as when it is the dict of one step, or has
        no groups; `ax` is not one of Matplotlib's axes.
      ValueError: no group matches `only`, or `history` has no steps.

    See Also:
      :func:`heat_map` draws the same norms as colors; :func:`norms` draws one norm and
      its threshold.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> from clipjax import plots
      >>> tx = clipjax.record_norms("leaf")
      >>> grads = {"body": jnp.ones(3), "head": jnp.ones(1)}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> ax = plots.group_norms([clipjax.metrics(state)])
      >>> [line.get_label() for line in ax.lines]
      ['body', 'head']
    """
    columns = columns_of(history)
    names = groups_of(columns, only)
    kind = kind_in([*names.values()])
    labels = {key: name.removeprefix(f"{kind}/") for key, name in names.items()}
    saw = {key: was_seen(columns, key) for key in names}
    points = {
        key: (np.flatnonzero(x), columns.values[key][x]) for key, x in saw.items()
    }
    largest = [np.max(y, initial=0, where=np.isfinite(y)) for _, y in points.values()]
    colors = draw.colored([*points], largest)
    ax = draw.new_axes(ax)
    for key, (x, y) in points.items():
        style = {"color": draw.GREY, "lw": 0.6, "zorder": 1.6, "label": "_other"}
        if key in colors:
            style = {"color": colors[key], "lw": 1.2, "label": labels[key]}
        draw.line(ax, x, y, **style)
    ax.set_ylabel(f"norm of {kind}" if kind else "norm")
    are_all = len(colors) == len(points)
    title = "" if are_all else f"the {len(colors)} largest of {len(points)} groups"
    return draw.finish(ax, title)
