"""Projections that constrain single entries of weights: onto boxes and the non-negative orthant."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from clipjax._core.arguments import explained, shown
from clipjax._core.clip_entries import check_entries, clip_entries
from clipjax._core.dtypes import as_arrays, in_float64
from clipjax._core.mesh import AxisName, names_of_leaves
from clipjax._core.paths import leaves_with_paths, path_name
from clipjax._core.stats import Stats
from clipjax._core.trees import Report, summary
from clipjax._core.where import Where, check_where, merged, only, resolve_where
from clipjax.weights.checks import check_are_weights
from clipjax.weights.limits import Group, Limits, check_limits, groups_of
from clipjax.weights.projections import How, Measured, Projection


class NonNegativeState(NamedTuple):
    """State of :func:`non_negative` as a link."""

    non_negative: Stats
    violation: jax.Array  # float: by how much the incoming weights were out of bounds


class BoxState(NamedTuple):
    """State of :func:`box` as a link."""

    box: Stats
    violation: jax.Array  # float: by how much the incoming weights were out of bounds


@explained
def box(low: Limits, high: Limits, *, where: Where = None, axis_name: AxisName = None) -> Projection:
    """Project each entry onto `[low, high]`.

    Args:
      low: the lower limit: a number of any sign, an array that broadcasts to every leaf, or a schedule
        `step -> limit`. For limits that differ from leaf to leaf: a rule `(path, leaf) -> limit`, which is
        distinguished from a schedule by its two arguments; or a mapping from path patterns (see `where`) to
        any of these, where the first match wins. A leaf that no pattern matches, or that gets
        :data:`clipjax.SKIP`, has no lower limit.
      high: the upper limit, in the same forms. Where a traced `low` is above `high`, `high` is used. A leaf
        that has neither limit is left alone.
      where: which leaves. None: all. A path pattern or several, as in the `axes` of
        :func:`clipjax.clip_by_norm`: globs of `"encoder/Dense_0/kernel"` or of its last components. Or a
        rule `(path, leaf) -> bool`. Or a tree of bools, or a prefix of one. Leaves that are neither float
        nor complex are left alone.
      axis_name: the mesh axes over which the metrics are taken, in `pmap` and unchecked `shard_map`.

    Returns:
      A :class:`Projection`. Its metric `norm` is the largest absolute entry before the projection, over the
      leaves that have limits, and `scale` the factor by which the projection reduced it (with limits that
      differ from leaf to leaf, the smallest such factor).

    Raises:
      TypeError, ValueError: a limit is not a number or is NaN; `low` is above `high`, for a pattern or a
      leaf; a function could be either a schedule or a rule; `where` is invalid. When called, or in
      `init`: a pattern matches no leaf, a rule does not return a bool or a limit, no leaf is bounded, or a
      leaf that is not a weight would be changed. When called: a leaf is complex. As a link: `update` gets no
      `params`.

    Guarantees: measured in float64, no entry is outside its limits, both after a call and after
    `optax.apply_updates`: a limit that the leaf's dtype cannot represent is rounded inward. (As a link, an
    update can bring a weight into the box from outside only if the box is at least an ulp of the weight
    wide.) Entries inside are unchanged, bit for bit; projecting twice is the same as projecting once. NaN
    stays NaN; an infinite entry becomes the limit.

    Equals `optax.projections.projection_box`, for the leaves that `where` names. With a rule it is weight
    clipping, which keeps each layer within a multiple of its initialization range: see the example.

    References:
      Elsayed et al., 2024, Weight clipping for deep continual and reinforcement learning, arXiv:2407.01704.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> params = {"bias": jnp.array([3.0, -3.0]), "scale": jnp.array([3.0, 0.5])}
      >>> projected = clipjax.box(0.0, 1.0, where="scale")(params)
      >>> print(projected["bias"], projected["scale"])
      [ 3. -3.] [1.  0.5]

      Weight clipping of kernels `(in, out)` that were drawn from ±1 / sqrt(in):

      >>> def range_of(path, kernel):
      ...     return 2.0 / kernel.shape[0] ** 0.5
      >>> clip = clipjax.box(lambda path, kernel: -range_of(path, kernel), range_of, where="kernel")
      >>> print(clip({"kernel": jnp.full((16, 2), 3.0), "bias": jnp.ones(2)})["kernel"][0])
      [0.5 0.5]
    """
    check_limits(low, high)
    return _entrywise(f"clipjax.box({shown(low)}, {shown(high)})", BoxState, low, high, where, axis_name)


@explained
def non_negative(*, where: Where = None, axis_name: AxisName = None) -> Projection:
    """Project each entry onto the non-negative numbers: max(w, 0).

    Args:
      where: which leaves, as in :func:`box`.
      axis_name: the mesh axes over which the metrics are taken, in `pmap` and unchecked `shard_map`.

    Returns:
      A :class:`Projection`, with the metrics of :func:`box`.

    Raises:
      TypeError, ValueError: as :func:`box`, for `where`.

    Guarantees: no entry is below 0, both after a call and after `optax.apply_updates`; positive entries are
    unchanged, bit for bit, and -0.0 becomes 0.0 (as a link, it may stay). NaN stays NaN, and +inf stays +inf.

    Equals `keras.constraints.NonNeg` and `optax.projections.projection_non_negative`.

    Followed by :func:`clipjax.max_norm` it projects onto the non-negative part of the ball. In the other
    order the result is also in that set, but it is not the nearest point of it.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> print(clipjax.non_negative()(jnp.array([-1.0, 0.0, 2.0])))
      [0. 0. 2.]
    """
    return _entrywise("clipjax.non_negative()", NonNegativeState, 0.0, math.inf, where, axis_name)


def _entrywise(
    name: str, state: type[Any], low: Limits, high: Limits, where: Where, axis_name: AxisName
) -> Projection:
    where = check_where(where)

    def groups(params: Any) -> list[Group]:
        found = groups_of(low, high, resolve_where(where, params), params)
        each = zip(*(group.chosen for group in found), strict=True)
        check_are_weights(params, [i for i, of_leaf in enumerate(each) if any(of_leaf)])
        return found

    def constrain(params: Any, step: Any) -> tuple[Any, Report]:
        params, reports = as_arrays(params), []
        for group in groups(params):
            part = only(group.chosen, params)
            projected, report = clip_entries(part, group.low(step), group.high(step), axis_name)
            params = merged(params, projected)
            reports.append(report)
        return params, reports[0] if len(reports) == 1 else summary(reports)

    @in_float64
    def measure(params: Any, step: Any) -> list[Measured]:
        each = list(zip(leaves_with_paths(params), names_of_leaves(params, axis_name), strict=True))
        measured = {}
        for group in groups(params):
            lowest, highest = group.low(step), group.high(step)
            check_entries(only(group.chosen, params), lowest, highest)
            for i, ((path, leaf), names) in enumerate(each):
                if group.chosen[i]:
                    measured[i] = Measured(path_name(path), leaf, lowest, highest, names)
        return [measured[i] for i in sorted(measured)]

    return Projection(name, state, constrain, measure, How(check=groups))
