"""Projections that constrain the norms of units of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipjax._core.arguments import explained, shown
from clipjax._core.axes import FAN_IN_OF_MATRICES, Axes, check_axes
from clipjax._core.bounds import Bound, Evaluate, bound_at, check_order
from clipjax._core.dtypes import as_arrays, in_float64
from clipjax._core.maxima import smaller
from clipjax._core.mesh import AxisName
from clipjax._core.rescale import Precision, Scale, between, low_enough, precision_of
from clipjax._core.stats import Stats
from clipjax._core.trees import (
    Decision,
    Rule,
    Unit,
    for_each,
    for_units,
    measure_units,
    size_of,
    units_of,
    within,
)
from clipjax.weights.link import larger_than
from clipjax.weights.projections import How, Measured, Projection
from clipjax.weights.units import OfUnits


class MaxNormState(NamedTuple):
    """State of :func:`max_norm` as a link."""

    max_norm: Stats
    violation: jax.Array  # float: by how much the incoming weights were out of bounds


class MinMaxNormState(NamedTuple):
    """State of :func:`min_max_norm` as a link."""

    min_max_norm: Stats
    violation: jax.Array  # float: by how much the incoming weights were out of bounds


class UnitNormState(NamedTuple):
    """State of :func:`unit_norm` as a link."""

    unit_norm: Stats
    violation: jax.Array  # float: by how much the incoming weights were out of bounds


@explained
def max_norm(
    radius: Bound, *, axes: Axes = FAN_IN_OF_MATRICES, specs: Any = None, axis_name: AxisName = None
) -> Projection:
    """Project each unit's weights onto the ball of norm `radius`: w * min(1, radius / |w|).

    Args:
      radius: a number, an array that broadcasts to the units, or a schedule `step -> radius`.
      axes: the axes that are reduced, as in `clipjax.clip_by_norm`. By default `clipjax.fan_in` for
        leaves of rank 2, which are Dense kernels (in, out), and an error for higher ranks and for Equinox
        modules, whose layers have other axes. Pass `clipjax.fan_in` itself for convolutions,
        `clipjax.flax.unit_axes(model)` for any Flax model, `clipjax.equinox.unit_axes(model)` for Equinox.
        Biases are left alone.
      specs: inside `shard_map`, the `PartitionSpec` tree of the parameters.
      axis_name: the mesh axes that split the units, in `pmap` and unchecked `shard_map`.

    Returns:
      A :class:`Projection`: a function `params -> params` that can also be the last link of a chain,
      where `update` needs `params`. A link that is not last bounds nothing: `clipjax.chain` raises an
      error, and in `optax.chain` its metric `violation` is above 0.

    Raises:
      TypeError, ValueError: `radius` is not a number, is negative or is NaN; `axes` is invalid. When called,
      or in `init`: no leaf is bounded, or a leaf that is not a weight would be changed. As a link: `update`
      gets no `params`.

    Guarantees: measured in float64, no projected unit's norm is above `radius`, both after a call and after
    `optax.apply_updates`, in any dtype. A unit that was outside ends at most 4 ulp below `radius` (as a
    link, ulp of the larger of its norm before and the radius). A unit that was inside is unchanged, bit for
    bit, so projecting twice is the same as projecting once. A unit whose norm is not finite becomes NaN. As
    a link, 16-bit leaves get a float32 update, which `optax.apply_updates` rounds once; inside
    `optax.apply_if_finite`, which does not allow that, the update keeps its dtype, and the 4 ulp are those
    of a 16-bit sum.

    Equals `keras.constraints.MaxNorm` (whose `axis` is `axes`) and TensorFlow 1's assign operations
    after the step.

    References:
      Srebro et al., 2005, Maximum-margin matrix factorization; Srivastava et al., 2014, Dropout.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.array([[3.0, 0.3], [4.0, 0.4]])  # (in, out): a unit is a column
      >>> print(clipjax.max_norm(1.0)(kernel).round(3))
      [[0.6 0.3]
       [0.8 0.4]]
    """
    bound, axes = bound_at("radius", radius), check_axes(axes)

    def rule_at(step: Any) -> Rule:
        at_step = bound(step)
        return within("radius", lambda _: at_step)

    def measure(params: Any, step: Any) -> list[Measured]:
        return measured_norms(params, None, bound(step), of_units)

    of_units = OfUnits(rule_at, axes, specs, axis_name)
    how = How(of_units=of_units, check=of_units.check)
    return Projection(f"clipjax.max_norm({shown(radius)})", MaxNormState, of_units.constrain, measure, how)


@explained
def min_max_norm(
    low: Bound,
    high: Bound,
    *,
    rate: Bound = 1.0,
    axes: Axes = FAN_IN_OF_MATRICES,
    specs: Any = None,
    axis_name: AxisName = None,
) -> Projection:
    """Bring each unit's norm between `low` and `high`: w * (rate * clip(|w|, low, high) / |w| + 1 - rate).

    Args:
      low: the smallest norm: a number, an array that broadcasts to the units, or a schedule
        `step -> norm`. Must be finite; above the largest number of a leaf's dtype, that number is used.
      high: the largest norm, in the same forms. Where a traced `low` is above `high`, `high` is used.
      rate: the share of the distance to the limit that a unit outside moves at each call, from 0 to 1, in
        the same forms. 1 projects; less moves the norm gradually.
      axes: the axes that are reduced, as in :func:`max_norm`.
      specs: inside `shard_map`, the `PartitionSpec` tree of the parameters.
      axis_name: the mesh axes that split the units, in `pmap` and unchecked `shard_map`.

    Returns:
      A :class:`Projection`. Its metric `norm` is the largest norm before the projection, and `scale` the
      smallest factor, which is 1 if units only grew.

    Raises:
      TypeError, ValueError: a limit is not a number, is negative or is NaN; `low` is infinite or above
      `high`; `rate` is not in [0, 1]; as :func:`max_norm`, for `axes` and weights.

    Guarantees: with `rate=1`, measured in float64, no unit's norm is above `high`, both after a call and
    after `optax.apply_updates`, in any dtype, and none is more than 4 ulp below `low` (as a link, ulp of
    the larger of its norm before and the limit). A unit that is inside, or below `low` by no more than
    rounding may cause (3e-7 of `low` in float32, an ulp of each entry in 16 bits), is unchanged, bit for
    bit, so projecting twice is the same as projecting once. A unit of norm 0 stays 0, as it has no direction
    to grow in; a unit whose norm is below the smallest normal float32 (float64 for float64 leaves) does not
    grow either. A unit whose norm is not finite becomes NaN. With `rate < 1` the formula holds up to the same
    rounding, and 16-bit entries that it moves by less than an ulp may stay or shrink by one ulp.

    Equals `keras.constraints.MinMaxNorm` (whose `axis` is `axes`), which divides by the norm plus 1e-7.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.array([[3.0, 0.3], [4.0, 0.4]])  # (in, out): the norms of the units are 5 and 0.5
      >>> print(clipjax.min_max_norm(1.0, 2.0)(kernel).round(3))
      [[1.2 0.6]
       [1.6 0.8]]
    """
    check_order(low, high)
    lower, upper, share = bound_at("low", low), bound_at("high", high), bound_at("rate", rate)
    _check_at_most("low", low, np.finfo(np.float64).max, "finite")
    _check_at_most("rate", rate, 1, "at most 1")
    name = f"clipjax.min_max_norm({shown(low)}, {shown(high)}, rate={shown(rate)})"
    return _between(name, MinMaxNormState, lower, upper, share, axes, specs, axis_name)


@explained
def unit_norm(
    *, axes: Axes = FAN_IN_OF_MATRICES, specs: Any = None, axis_name: AxisName = None
) -> Projection:
    """Bring each unit's norm to 1: w / |w|.

    Args:
      axes: the axes that are reduced, as in :func:`max_norm`.
      specs: inside `shard_map`, the `PartitionSpec` tree of the parameters.
      axis_name: the mesh axes that split the units, in `pmap` and unchecked `shard_map`.

    Returns:
      A :class:`Projection`, with the metrics of :func:`min_max_norm`.

    Raises:
      TypeError, ValueError: as :func:`max_norm`, for `axes` and weights.

    Guarantees: those of :func:`min_max_norm` with both limits 1. A norm is never above 1 and at most 4 ulp
    below it; a unit of norm 0 stays 0; projecting twice is the same as projecting once, bit for bit.

    Equals `keras.constraints.UnitNorm` (whose `axis` is `axes`), which divides by the norm plus 1e-7.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.array([[3.0, 0.3, 0.0], [4.0, 0.4, 0.0]])  # (in, out): a unit is a column
      >>> print(clipjax.unit_norm()(kernel).round(3))
      [[0.6 0.6 0. ]
       [0.8 0.8 0. ]]
    """
    one = bound_at("one", 1.0)
    return _between("clipjax.unit_norm()", UnitNormState, one, one, one, axes, specs, axis_name)


def scale_between(norm: jax.Array, low: Any, high: Any, rate: Any, *precision: jax.Array) -> Scale:
    """Return the scale that moves a norm between two limits, or `rate` of the way there."""
    return between(norm, low, high, rate, Precision(*precision))


@in_float64
def with_precision(
    units: Sequence[Unit], norms: Sequence[jax.Array], columns: Sequence[list[jax.Array]]
) -> list[list[jax.Array]]:
    """Append to the columns (one array per leaf in each) those of :class:`Precision`, one per field."""
    each = [precision_of(unit.leaf.dtype, size_of(unit)) for unit in units]
    of_rounding = ([for_each(n, x) for n, x in zip(norms, c, strict=True)] for c in zip(*each, strict=True))
    return [*columns, *of_rounding]


def _between(
    name: str,
    state: type[Any],
    low: Evaluate,
    high: Evaluate,
    rate: Evaluate,
    axes: Axes,
    specs: Any,
    axis_name: AxisName,
) -> Projection:
    axes = check_axes(axes)

    def rule_at(step: Any) -> Rule:
        limits = {"low": low(step), "high": high(step), "rate": in_float64(smaller)(rate(step), 1.0)}

        def rule(units: Sequence[Unit], norms: Sequence[jax.Array]) -> Decision:
            pairs = list(zip(units, norms, strict=True))
            columns = [[for_units(*limit, *pair) for pair in pairs] for limit in limits.items()]
            return scale_between, with_precision(units, norms, columns)

        return rule

    def measure(params: Any, step: Any) -> list[Measured]:
        return measured_norms(params, low(step), high(step), of_units)

    of_units = OfUnits(rule_at, axes, specs, axis_name)
    how = How(outside=larger_than, of_units=of_units, check=of_units.check)
    return Projection(name, state, of_units.constrain, measure, how)


def _check_at_most(name: str, value: Any, largest: float, what: str) -> None:
    if not (callable(value) or isinstance(value, jax.core.Tracer)) and np.any(np.asarray(value) > largest):
        raise ValueError(f"{name} must be {what}, got {shown(value)}")


@in_float64
def measured_norms(params: Any, low: jax.Array | None, high: jax.Array, how: OfUnits) -> list[Measured]:
    """Measure each unit's norm, with its limits; `low` is reduced by what rounding may lose."""
    measured = []
    params = as_arrays(params)
    how.check(params)
    units = units_of(params, how.axes, how.specs, how.axis_name)
    for unit, norm in zip(units, measure_units(units), strict=True):
        highest = for_units("radius" if low is None else "high", high, unit, norm)
        lowest = jnp.zeros_like(norm)
        if low is not None:
            least = smaller(for_units("low", low, unit, norm), highest)
            lowest = low_enough(norm, least, precision_of(unit.leaf.dtype, size_of(unit)))
        measured.append(Measured(unit.path, norm, lowest, highest, unit.over))
    return measured
