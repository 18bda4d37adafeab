"""Norms of output units, sorted."""

from __future__ import annotations

from typing import Any

import numpy as np

from clipjax._core.aliases import AutoAxes, Tree
from clipjax._core.bounds import constant
from clipjax._core.clip import least_inside
from clipjax._core.leaves import flatten
from clipjax._core.units import (
    axes_of,
    check_axes,
    fan_in_of_matrices,
    map_units,
    norms_of,
    present,
)
from clipjax.plots import _drawing as draw


def unit_norms(
    params: Tree,
    *,
    axes: AutoAxes = "auto",
    radius: Any = None,
    ax: Any = None,
) -> Any:
    """Draw the norms of all output units of weights, sorted within each leaf.

    Use it to choose the bound of :func:`clipjax.max_norm`, and to see how many output
    units are at the bound.

    Args:
      params: the weights.
      axes: the axes that are reduced, as in :func:`clipjax.max_norm`; "auto" by
        default.
      radius: the bound to draw, a number of at least 0. None, the default, draws none.
      ax: the axes to draw on. None, the default, makes a new figure.

    Returns:
      The axes, with one line for each leaf, colored as in :func:`group_norms`. Along a
      line, the output units are sorted by norm. If `radius` is given, the output units
      at the bound form the flat end of a line, and the legend has the percentage of
      output units at the bound or above it.

    Raises:
      TypeError: `radius` is not a number; `axes` has none of its forms; `ax` is not one
        of Matplotlib's axes.
      ValueError: `radius` is negative; `axes` do not fit a leaf, or apply to no leaf.

    See Also:
      :func:`clipjax.violations` lists the output units above a bound;
      :func:`clipjax.functional.unitwise_norms` returns the norms.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import plots
      >>> params = {"kernel": jnp.array([[3.0, 0.6], [4.0, 0.8]])}
      >>> ax = plots.unit_norms(params, radius=2.0)
      >>> [line.get_label() for line in ax.lines]
      ['kernel: 50% at the radius', 'radius 2']
    """
    given = np.inf if radius is None else radius
    bound = float(constant("radius", given, scalar=True))
    lines = {}
    weights = flatten(params)
    where = axes_of(weights, check_axes(axes, auto=fan_in_of_matrices))
    measured = map_units(
        lambda norm, leaf: (norm, leaf), norms_of(weights.values, where), weights.each
    )
    for norm, leaf in present(measured):
        ascending = np.sort(np.asarray(norm, np.float64), axis=None)
        count = max(1, ascending.size)
        at_bound = ascending >= least_inside(bound, leaf.value.dtype)
        share = (
            f": {at_bound.sum() / count:.0%} at the radius" if bound < np.inf else ""
        )
        percents = 100 * (np.arange(ascending.size) + 0.5) / count
        label = leaf.name + share
        while label in lines:  # those of {"a/b": x, "a": {"b": y}} have one name
            label += " "
        lines[label] = percents, ascending
    ax = draw.new_axes(ax)
    ax.set(xlabel="output units of an array, sorted by norm (%)", xlim=(-2, 102))
    ax.set_ylabel("norm of an output unit")
    return draw.lines(ax, lines, "leaves", sizes=draw.largest(lines), bound=bound)
