"""Projections of the norms of units of weights."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from clipjax import _checks
from clipjax._core import bounds, clipping, units
from clipjax._core.aliases import Tree
from clipjax.weights import limits
from clipjax.weights.projection import Projection, rescaled_weights, written

Factor: TypeAlias = Callable[..., jax.Array]  # of (norms, dtype, *limits)


def max_norm(radius: limits.Limit, *, axes: units.AutoAxes = "auto") -> Projection:
    """Project each unit's weights onto the ball of a radius: w * min(1, radius / |w|).

    Args:
      radius: a number, an array that broadcasts to the units, a schedule `step ->
        radius`, or a mapping from path patterns to these, where the first match wins
        and other leaves are not changed.
      axes: the axes that are reduced. "auto": `clipjax.fan_in` for kernels (in, out) of
        rank 2, and an error for higher ranks; biases are not changed.

    Returns:
      A :class:`Projection`: a function of the weights, and the last link of a chain.

    Equals `keras.constraints.MaxNorm`, whose `axis` is `axes`.

    References:
      Srebro et al., 2005, Maximum-margin matrix factorization; Srivastava et al., 2014,
      Dropout.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.array([[3.0, 0.3], [4.0, 0.4]])  # (in, out)
      >>> print(clipjax.max_norm(1.0)(kernel).round(3))
      [[0.6 0.3]
       [0.8 0.4]]
    """
    radii = limits.by_leaf("radius", radius)
    name = written(max_norm, radius, axes=axes)
    return _rescaling(
        name,
        axes,
        [radii],
        lambda norm, dtype, radius: clipping.factor_to(radius, norm, dtype),
    )


def min_max_norm(
    low: limits.Limit,
    high: limits.Limit,
    *,
    rate: bounds.Bound = 1.0,
    axes: units.AutoAxes = "auto",
) -> Projection:
    """Bring each unit's norm between two: w * clip(|w|, low, high) / |w|.

    Args:
      low: the smallest norm, in the forms of :func:`max_norm`; finite. Where no pattern
        of a mapping matches, 0.
      high: the largest norm, likewise; infinity where no pattern matches.
      rate: the share of the way to the limit that a unit outside moves at each call,
        from 0 to 1. 1 projects.
      axes: the axes that are reduced, as in :func:`max_norm`.

    A unit of norm 0 stays 0, since it has no direction to grow in.

    Equals `keras.constraints.MinMaxNorm`, whose `axis` is `axes`.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.array([[3.0, 0.3], [4.0, 0.4]])  # norms 5 and 0.5
      >>> print(clipjax.min_max_norm(1.0, 2.0)(kernel).round(3))
      [[1.2 0.6]
       [1.6 0.8]]
    """
    rates = limits.of_rate(rate)
    lows = limits.by_leaf("low", low, other=0.0)
    highs = limits.by_leaf("high", high, other=np.inf)
    for pattern, each in lows.given.items():
        key = f"low[{pattern!r}]" if lows.by_path else "low"
        limits.check_at_most(key, each, np.finfo(np.float64).max, "finite")
    _checks.check_order(low, high)

    name = written(min_max_norm, low, high, rate=rate, axes=axes)
    return _rescaling(name, axes, [lows, highs], _factor_between, [rates])


def unit_norm(*, axes: units.AutoAxes = "auto") -> Projection:
    """Bring each unit's norm to 1: w / |w|.

    Args:
      axes: the axes that are reduced, as in :func:`max_norm`.

    A unit of norm 0 stays 0.

    Equals `keras.constraints.UnitNorm`, whose `axis` is `axes`.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.array([[3.0, 0.3, 0.0], [4.0, 0.4, 0.0]])  # (in, out)
      >>> print(clipjax.unit_norm()(kernel).round(3))
      [[0.6 0.6 0. ]
       [0.8 0.8 0. ]]
    """
    both = [limits.by_leaf("low", 1), limits.by_leaf("high", 1)]
    name = written(unit_norm, axes=axes)
    return _rescaling(name, axes, both, functools.partial(_factor_between, rate=1))


def _rescaling(
    name: str,
    axes: Any,
    each_limit: Sequence[limits.Limits],
    factor: Factor,
    rates: Sequence[limits.Limits] = (),
) -> Projection:
    """Make the projection that multiplies units by `factor(norms, dtype, *limits)`.

    A rate is the last of them. It is for all leaves, so it chooses none.
    """
    axes = units.check_axes(axes, auto=units.fan_in_of_matrices)
    arguments = [*each_limit, *rates]

    def units_of(params: Tree) -> list[units.LeafUnits]:
        return units.of_tree(params, axes, limits.are_given(each_limit, params))

    def rescale(params: Tree, step: Any) -> Tree:
        found = units_of(params)
        if len(each_limit) == 2:
            low, high = each_limit
            limits.check_order_by_path(
                low, high, params, {each.place for each in found}
            )
        of_leaves = [(each.name, each.at(params, step)) for each in arguments]
        factors = []
        for each, norm in zip(found, units.norms_of(found), strict=True):
            fitted = [
                bounds.fit_bound(name, of_leaf[each.place], norm, each.leaf)
                for name, of_leaf in of_leaves
            ]
            factors.append(factor(norm, each.leaf.value.dtype, *fitted))
        return rescaled_weights(params, found, factors)

    scheduled = any(each.scheduled for each in arguments)
    return Projection(name, rescale, scheduled=scheduled, units_of=units_of)


@functools.partial(jax.jit, static_argnames="dtype")
def _factor_between(
    norm: jax.Array, dtype: Any, low: Any, high: Any, rate: Any
) -> jax.Array:
    """Return 1 inside two bounds, else what takes a norm `rate` of the way to them.

    A unit that was brought up to `low` ends a margin or two below it, and counts as
    inside. 0 has no direction to grow.
    """
    high = jnp.asarray(high, norm.dtype)
    low = jnp.minimum(jnp.asarray(low, norm.dtype), high)
    rate = jnp.minimum(jnp.asarray(rate, norm.dtype), 1)
    above = (norm >= clipping.least_inside(low, dtype)) | (norm == 0)
    near = rate * (1 - clipping.margin(dtype)) * jnp.clip(norm, low, high)
    target = near + (1 - rate) * norm
    return clipping.quotient_or_1((norm <= high) & above, target, norm)
