"""Bad steps, as bars of the groups that their norms come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clipjax._core.aliases import Tree
from clipjax.monitoring.bad_steps import BadStep, place_of_probes
from clipjax.monitoring.bad_steps import bad_steps as find_bad_steps
from clipjax.plots import _drawing as draw
from clipjax.plots._cells import shades


def bad_steps(opt_state: Tree, *, ax: Any = None) -> Any:
    """Draw which groups the norm of each bad step came from, as bars.

    Use it after a run broke, or on its checkpoint, to see which layers had the largest
    gradients at the bad steps, and in which layer each step broke.

    Args:
      opt_state: an optimizer state, or a tree that contains one, as for
        :func:`clipjax.bad_steps`. A `record_norms` of the chain has to have groups, and
        `keep` above 0.
      ax: the axes to draw on. None, the default, makes a new figure.

    Returns:
      The axes, with one bar for each bad step, the oldest at the top. The parts of a
      bar are the groups, each as wide as its fraction of the squared norm. They are
      sorted and colored as in :func:`group_norms`. If groups are not finite, the bar is
      hatched, and is divided equally among these groups. The label in front of a bar is
      the norm of the step, or its loss if the loss was bad.

      If the model has probes, a second bar for each step has the norms that the probes
      measured. They are in the order of time: the forward pass from the first layer to
      the last, and then the backward pass from the last layer to the first. Cells whose
      norms are not finite are hatched. If the probes tell where the step broke, a star
      marks the place and text below the bar names it. A star between the two passes
      means that the step broke in the loss, or after the last probe of the model.

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
      >>> [text.get_text() for text in ax.legend_.get_texts()]
      ['head', 'not finite']
    """
    steps = find_bad_steps(opt_state)
    if steps and not any(step.groups for step in steps):
        raise ValueError(
            "opt_state: its recorder has one norm for all leaves; name groups, as in "
            "record_norms('leaf', keep=16)"
        )
    each = [_shares(step.groups) for step in steps]
    # Of several recorders, each may have other groups.
    names = dict.fromkeys(name for shares in each for name in shares)
    largest = {name: max(shares.get(name, 0) for shares in each) for name in names}
    colors = draw.colors_of(
        {name: share for name, share in largest.items() if share > 0}
    )
    of_probes = any(step.forward or step.backward for step in steps)
    height = (0.55 if of_probes else 0.3) * max(3, len(steps))
    ax = draw.new_axes(ax, 1.2 + height + of_probes, 10 if of_probes else 8)
    field: dict[str, Any] = {"height": 0.5 if of_probes else 0.7}
    field |= {"edgecolor": ax.get_facecolor()}
    has_bad = False
    for row, (step, shares) in enumerate(zip(steps, each, strict=True)):
        is_bad = not np.isfinite([*step.groups.values()]).all()
        has_bad |= is_bad
        style = {**field, "hatch": _HATCH if is_bad else None}
        start = 0.0
        for name, color in colors.items():
            share = shares.get(name, 0)
            ax.barh(row, share, left=start, color=color, **style)
            start += share
        # The others, as one.
        ax.barh(row, sum(shares.values()) - start, left=start, color=draw.GREY, **style)
    more = []
    if has_bad:
        label = "not finite"
        more.append(draw.field(ax, label, facecolor=draw.GREY, hatch=_HATCH))
    if of_probes:
        more += _draw_probes(ax, steps, field)
    labels = [
        f"{x.step}: loss {x.loss:.2g}"
        if x.is_of_loss
        else f"{x.step}: norm {x.norm:.2g}"
        for x in steps
    ]
    ax.set_yticks(range(len(steps)), labels)
    ax.set(xlabel="fraction of the squared norm (%)", ylabel="step", xlim=(0, 100))
    ax.set_ylim(max(1, len(steps)) - 0.4, -0.5)
    some = f"{len(colors)} of {len(names)} groups"
    title = "" if len(colors) == len(names) else some
    return draw.legend_of_colors(ax, colors, title, more=more)


# Of norms that are not finite.
_HATCH = "////"


def _draw_probes(ax: Any, steps: Sequence[BadStep], field: Any) -> list[Any]:
    """Draw the norms that probes saw, beside the bars, and where each step broke.

    Returns:
      What the legend needs.
    """
    beside = draw.split(ax)
    beside.tick_params(left=False, labelleft=False)
    stars = []
    ticks: dict[float, str] = {}
    start = 0
    for of, arrow in (("forward", "forward pass →"), ("backward", "backward pass →")):
        seen = [getattr(step, of) for step in steps]
        names = list(dict.fromkeys(name for norms in seen for name in norms))
        names = names[::-1] if of == "backward" else names  # in the order of time
        values = [[norms.get(name, 0.0) for name in names] for norms in seen]
        colors = shades(beside, np.array(values))
        for row, (step, norms) in enumerate(zip(steps, seen, strict=True)):
            place = place_of_probes(step)
            if of == "backward" and place.began_in == "loss":
                stars.append((start - 0.5, row))
            for x, name in enumerate(names, start):
                if name not in norms:
                    continue
                hatch = None if np.isfinite(norms[name]) else _HATCH
                cell = {"color": colors[row, x - start], "hatch": hatch, **field}
                beside.barh(row, 1, left=x, **cell)
                if (of, name) == (place.began_in, place.layer):
                    stars.append((x + 0.5, row))
        shown = range(len(names)) if len(names) <= 12 else (0, len(names) - 1)
        ticks |= {start + i + 0.5: names[i] for i in shown}
        style = {"transform": beside.get_xaxis_transform(), "color": draw.ink(ax)}
        beside.text(start, 1.03, arrow, size="small", **style)
        start += len(names) + 1
    beside.set_xticks([*ticks], [*ticks.values()], rotation=90, size="small")
    beside.set_xlim(0, start - 1)
    shade = "lighter" if draw.is_dark(beside) else "darker"
    title = {"loc": "left", "pad": 24, "size": "medium", "color": draw.ink(ax)}
    beside.set_title(f"norms that probes saw, larger ones {shade}", **title)
    for row, step in enumerate(steps):
        words = {"size": "small", "va": "top", "color": draw.ink(ax)}
        beside.text(0.1, row + 0.26, place_of_probes(step).words, **words)
    if not stars:
        return []
    across, down = zip(*stars, strict=True)
    return [draw.star(beside, across, down, "where it broke")]


def _shares(groups: Mapping[str, float]) -> dict[str, float]:
    """Return the fraction of each group in the squared norm, in percent.

    If groups are not finite, these groups have equal fractions and others have 0.
    """
    values = np.array([*groups.values()])
    bad = ~np.isfinite(values)
    parts = bad.astype(float)
    if not bad.any() and values.any():
        parts = (values / values.max()) ** 2
    return dict(zip(groups, 100 * parts / (parts.sum() or 1), strict=True))
