"""Constraints on single entries: the projections of weights onto boxes and the orthant."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from clipjax._core.arguments import explained, shown
from clipjax._core.bounds import Bound, Evaluate, bound_at, check_order
from clipjax._core.limits import check_entries, clip_entries
from clipjax._core.mesh import AxisName, names_of_leaves
from clipjax._core.norms import as_arrays, in_float64
from clipjax._core.paths import leaves_with_paths, path_name
from clipjax._core.stats import Stats
from clipjax._core.trees import Report
from clipjax._core.where import Where, check_where, merged, only, resolve_where
from clipjax.weights.checks import check_are_weights
from clipjax.weights.projections import How, Measured, Projection


class NonNegativeState(NamedTuple):
    """State of :func:`non_negative` as a link."""

    non_negative: Stats
    violation: jax.Array  # float: by how much the weights that came in were out of bounds


class BoxState(NamedTuple):
    """State of :func:`box` as a link."""

    box: Stats
    violation: jax.Array  # float: by how much the weights that came in were out of bounds


@explained
def box(low: Bound, high: Bound, *, where: Where = None, axis_name: AxisName = None) -> Projection:
    """Project each entry onto `[low, high]`.

    Args:
      low: a number of any sign, an array that broadcasts to every leaf, or a schedule `step -> limit`.
      high: the upper limit, alike. Where a traced `low` is above it, `high` holds.
      where: which leaves. None: all. A path pattern or several, as in the `axes` of
        :func:`clipjax.clip_by_norm`: globs of `"encoder/Dense_0/kernel"` or of its last components. Or a
        rule `(path, leaf) -> bool`. Or a tree of bools, or a prefix of one. Leaves that are neither float
        nor complex are left alone.
      axis_name: the mesh axes over which the metrics are taken, in `pmap` and unchecked `shard_map`.

    Returns:
      A :class:`Projection`. Its metric `norm` is the largest absolute entry before, over the leaves
      that `where` names, and `scale` what became of it.

    Raises:
      TypeError, ValueError: a limit is no number or NaN, or `low` is above `high`; `where` is none of its
      forms. When called, or in `init`: a pattern matches no leaf, a rule returns no bool, no leaf is
      bounded, or one that is no weight would be. When called: a leaf is complex. As a link: no `params` in
      `update`.

    Guarantees: measured in float64, no entry is outside its limits, by the call and after
    `optax.apply_updates`: a limit that the leaf's dtype does not hold is rounded inwards. (As a link from
    outside the box, an update can reach it only where it is at least an ulp of the weight wide.) Entries
    inside stay bit for bit; projecting twice is projecting once. NaN shows; an infinite entry becomes
    the limit.

    Equals `optax.projections.projection_box`, for the leaves that `where` names.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> params = {"bias": jnp.array([3.0, -3.0]), "scale": jnp.array([3.0, 0.5])}
      >>> projected = clipjax.box(0.0, 1.0, where="scale")(params)
      >>> print(projected["bias"], projected["scale"])
      [ 3. -3.] [1.  0.5]
    """
    check_order(low, high)
    lower, upper = bound_at("low", low, minimum=None), bound_at("high", high, minimum=None)
    return _entrywise(f"clipjax.box({shown(low)}, {shown(high)})", BoxState, lower, upper, where, axis_name)


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

    Guarantees: no entry is below 0, by the call and after `optax.apply_updates`; positive entries stay bit
    for bit, and -0.0 becomes 0.0 (as a link, it may stay); NaN shows, and so does +inf.

    Equals `keras.constraints.NonNeg` and `optax.projections.projection_non_negative`.

    Followed by :func:`clipjax.max_norm` it projects onto what both allow: the non-negative part of the
    ball. The other order ends inside it, too, but not at its nearest point.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> print(clipjax.non_negative()(jnp.array([-1.0, 0.0, 2.0])))
      [0. 0. 2.]
    """
    lower, upper = bound_at("low", 0.0), bound_at("high", math.inf)
    return _entrywise("clipjax.non_negative()", NonNegativeState, lower, upper, where, axis_name)


def _entrywise(
    name: str, state: type[Any], low: Evaluate, high: Evaluate, where: Where, axis_name: AxisName
) -> Projection:
    where = check_where(where)

    def choose(params: Any) -> list[bool]:
        chosen = resolve_where(where, params)
        check_are_weights(params, [i for i, yes in enumerate(chosen) if yes])
        return chosen

    def constrain(params: Any, step: Any) -> tuple[Any, Report]:
        params = as_arrays(params)
        projected, report = clip_entries(only(choose(params), params), low(step), high(step), axis_name)
        return merged(params, projected), report

    @in_float64
    def measure(params: Any, step: Any) -> list[Measured]:
        lowest, highest = low(step), high(step)
        each = zip(leaves_with_paths(params), names_of_leaves(params, axis_name), choose(params), strict=True)
        found = {path_name(path): (leaf, names) for (path, leaf), names, yes in each if yes}
        check_entries({path: leaf for path, (leaf, _) in found.items()}, lowest, highest)
        return [Measured(path, leaf, lowest, highest, names) for path, (leaf, names) in found.items()]

    return Projection(name, state, constrain, measure, How(check=choose))
