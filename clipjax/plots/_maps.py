"""Maps of norms: of a whole run, and of the bad steps in an optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.colors import ListedColormap, LogNorm

from clipjax._core.aliases import Tree
from clipjax._core.leaves import short_repr
from clipjax.monitoring import history as runs
from clipjax.monitoring.bad_steps import BadStep, places_of
from clipjax.monitoring.bad_steps import bad_steps as find_bad_steps
from clipjax.plots import _drawing as draw
from clipjax.plots._columns import Columns, columns_of, groups_of, kind_in, was_seen


def heat_map(
    history: runs.History,
    *,
    only: str | Sequence[str] | None = None,
    bad: Sequence[BadStep] = (),
    ax: Any = None,
) -> Any:
    """Draw the norm of each group over the steps as the color of a cell.

    Use it to see in one picture when a run broke, and in which layer.

    Args:
      history: what :func:`clipjax.metrics` returned at each step, as in
        :func:`group_norms`.
      only: path patterns of the groups to draw, as in `["*/embed", "*/blocks/*",
        "*/head"]`. The rows follow the order of the patterns. None, the default, draws
        all groups, sorted by name.
      bad: the bad steps to mark, a list as :func:`clipjax.bad_steps` returns it; none
        by default. Those that are not in `history` have no mark.
      ax: the axes to draw on. None, the default, makes a new figure.

    Returns:
      The axes, with one row for each group, and a color bar. Orange is a norm that is
      not finite, and a norm of 0 has no color. Each bad step has a triangle above the
      map, and a ring on the layer that `print` of the step names. In a long run a
      column shows the largest norm of several steps.

    Raises:
      TypeError: `history` is not a history, as when it is the dict of one step, or has
        no groups; `bad` is not a list of bad steps; `ax` is not one of Matplotlib's
        axes.
      ValueError: no group matches `only`, or `history` has no steps.

    See Also:
      :func:`bad_steps` needs no history; :func:`group_norms` draws lines.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> from clipjax import plots
      >>> tx = clipjax.record_norms("leaf", keep=4)
      >>> grads = {"body": jnp.ones(3), "head": jnp.array([jnp.inf])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> history, bad = [clipjax.metrics(state)], clipjax.bad_steps(state)
      >>> ax = plots.heat_map(history, only=["*/head", "*/body"], bad=bad)
      >>> [label.get_text() for label in ax.get_yticklabels()]
      ['head', 'body']
    """
    if not (isinstance(bad, Sequence) and all(isinstance(x, BadStep) for x in bad)):
        raise TypeError(
            "bad must be a list of bad steps, as in bad=clipjax.bad_steps(opt_state), "
            f"got {short_repr(bad)}"
        )
    columns = columns_of(history)
    names = groups_of(columns, only)
    kind = kind_in([*names.values()])
    labels = [name.removeprefix(f"{kind}/") for name in names.values()]
    norms = np.stack([_held(columns, key) for key in names])
    ax = draw.new_axes(ax, height=1.4 + 0.3 * max(4, len(labels)))
    _cells(ax, norms, labels, f"norm of {kind}" if kind else "norm")
    places = [_place_of(columns, step) for step in bad]
    at = [x for x, _ in places]
    above = {"transform": ax.get_xaxis_transform(), "clip_on": False, "ls": ""}
    ax.plot(at, np.full(len(at), 1.04), marker="v", ms=6, c=draw.ink(ax), **above)
    rings = [
        (x, row)
        for step, (x, label) in zip(bad, places, strict=True)
        for row, key in enumerate(names)
        if columns.labels[key] == label
        and _is_named(key.removeprefix(f"{label}/").partition("/")[2], step)
    ]
    _draw_rings(ax, rings)
    draw.steps_below(ax)
    return ax


def _held(columns: Columns, key: str) -> np.ndarray:
    """Return a norm, at steps that were not seen that of the step before.

    It is 0 before the first of these, and where the chain has no such norm.
    """
    saw = was_seen(columns, key)
    last = np.maximum.accumulate(np.where(saw, np.arange(saw.size), -1))
    is_there = np.isfinite(columns.values[f"{columns.labels[key]}/steps"])
    return np.where(is_there & (last >= 0), columns.values[key][last], 0)


def bad_steps(opt_state: Tree, *, ax: Any = None) -> Any:
    """Draw the norms of the bad steps that the optimizer state has kept, as a map.

    Use it after a run broke, or on its checkpoint, where there is no history.

    Args:
      opt_state: an optimizer state, or a tree that contains one, as for
        :func:`clipjax.bad_steps`. Its `record_norms` needs groups, and `keep` above 0.
      ax: the axes to draw on. None, the default, makes a new figure.

    Returns:
      The axes, with one column for each bad step, the oldest first, and one row for
      each group. Below these are the rows of the probes, if the model has some, in the
      order of the model. If several `record_norms` have kept steps, their names are in
      front. Colors and rings are as in :func:`heat_map`.

    Raises:
      TypeError: `opt_state` is traced, or `ax` is not one of Matplotlib's axes.
      ValueError: no `record_norms` in `opt_state` keeps bad steps, or it has no groups.

    See Also:
      :func:`clipjax.bad_steps` returns the same steps as a list; :func:`heat_map` marks
      them in the norms of a whole run; :func:`clipjax.probe` measures inside the model.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> from clipjax import plots
      >>> tx = clipjax.record_norms("leaf", keep=4)
      >>> grads = {"body": jnp.ones(3), "head": jnp.array([jnp.inf])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> ax = plots.bad_steps(state)
      >>> [label.get_text() for label in ax.get_xticklabels()]
      ['0: norm inf']
    """
    steps = find_bad_steps(opt_state)
    cells = [_cells_of(step) for step in steps]
    rows = [*dict.fromkeys(row for each in cells for row in each)]
    if steps and not rows:
        raise ValueError(
            "opt_state: its recorder has one norm for all leaves; name groups, as in "
            "record_norms('leaf', keep=16)"
        )
    ax = draw.new_axes(ax, height=2.4 + 0.3 * max(4, len(rows)))
    ax.set_xlabel("bad step")
    if not steps:
        return ax
    # Of several recorders, each keeps its name.
    several = len({step.recorder for step in steps}) > 1
    names = [f"{row[0]}/" * several + row[1] for row in rows]
    norms = [[each.get(row, 0) for each in cells] for row in rows]
    mesh = _cells(ax, np.array(norms), names, "norm")
    mesh.set(edgecolor=ax.get_facecolor(), linewidth=1)
    rings = [
        (x, y)
        for x, step in enumerate(steps)
        for y, (recorder, name) in enumerate(rows)
        if recorder == step.recorder
        and _is_named(name.removeprefix("forward/").removeprefix("backward/"), step)
    ]
    _draw_rings(ax, rings)
    texts = [f"{step.recorder}, " * several + _short(step) for step in steps]
    ax.set_xticks(range(len(steps)), texts, rotation=90)
    return ax


def _cells_of(step: BadStep) -> dict[tuple[str, str], float]:
    """Return the norms of the groups and of the probes, by recorder and name."""
    of_probes = {"forward": step.forward, "backward": step.backward}
    norms = step.groups | {
        f"{of}/{name}": norm
        for of, seen in of_probes.items()
        for name, norm in seen.items()
    }
    return {(step.recorder, name): norm for name, norm in norms.items()}


def _short(step: BadStep) -> str:
    """Return which step was bad, and how many bad steps came directly after it."""
    value = f"loss {step.loss:.2g}" if step.is_of_loss else f"norm {step.norm:.2g}"
    more = f", {step.followed_by} more" if step.followed_by else ""
    return f"{step.step}: {value}{more}"


# Thinner columns would not be seen beside others.
COLUMNS_PER_INCH = 30


def _cells(ax: Any, norms: np.ndarray, names: Sequence[str], label: str) -> Any:
    """Draw a row of cells for each row of norms, and a color bar; return the cells.

    Blue is dark for large norms on a light ground, and light on a dark one.
    """
    count = norms.shape[1]
    most = max(1, int(COLUMNS_PER_INCH * ax.bbox.width / ax.figure.dpi))
    starts = np.arange(0, count, -(-count // most))
    norms = np.maximum.reduceat(norms, starts, axis=1)  # NaN is the largest
    finite = np.isfinite(norms)
    some = norms[finite & (norms > 0)]
    top = some.max() if some.size else 1.0
    least = min(np.quantile(some, 0.01), top / 10) if some.size else 0.1
    is_dark = draw.is_dark(ax)
    blues = plt.get_cmap("Blues_r" if is_dark else "Blues")
    low, high = (0.0, 0.95) if is_dark else (0.05, 1.0)
    shades = blues(np.linspace(low, high, 256))
    colors = ListedColormap(shades).with_extremes(over=draw.NOT_FINITE, bad="none")
    shown = np.ma.masked_equal(np.where(finite, norms, 10 * top), 0)
    edges = np.append(starts, count) - 0.5, np.arange(len(norms) + 1) - 0.5
    mesh = ax.pcolormesh(*edges, shown, norm=LogNorm(least, top), cmap=colors)
    ax.set(xlim=(-0.5, count - 0.5), ylim=(len(norms) - 0.5, -0.5))
    ax.set_yticks(range(len(names)), names)
    bar = ax.figure.colorbar(mesh, ax=ax, label=label, pad=0.015, aspect=15)
    if not finite.all():
        style = {"color": draw.NOT_FINITE, "fontsize": "small", "loc": "left"}
        bar.ax.set_title("not finite", **style)
    return mesh


def _is_named(group: str, step: BadStep) -> bool:
    """Return whether the text of a bad step names a group."""
    return bool(group) and group in [place.layer for place in places_of(step)]


def _draw_rings(ax: Any, rings: Sequence[tuple[float, int]]) -> None:
    """Draw rings, white within black, which are seen on every color."""
    at = np.reshape(rings, (-1, 2)).T
    style = {"marker": "o", "ls": "", "mfc": "none", "clip_on": False, "ms": 9}
    ax.plot(*at, mec="black", mew=3, **style)
    ax.plot(*at, mec="white", mew=1.3, **style)


def _place_of(columns: Columns, step: BadStep) -> tuple[float, str]:
    """Return the place of a bad step in a history, and the name of its recorder.

    The place is NaN if the history does not have the step. A user may have put
    something in front of all metrics, such as "train/".
    """
    labels = {*columns.labels.values()}
    own = [x for x in labels if f"/{x}".endswith(f"/{step.recorder}")]
    if not own:
        return np.nan, ""
    label = min(own, key=len)
    key = f"{label}/steps"
    is_step = columns.values[key] == step.step + 1
    # If `adopt` made the recorder anew, the last of its counters is that of the state.
    found = np.flatnonzero(is_step & runs.steps_taken(columns.values, key))
    return (float(found[-1]) if found.size else np.nan), label
