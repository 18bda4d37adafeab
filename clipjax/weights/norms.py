"""Projections of the norms of units of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from clipjax import _core
from clipjax._core import FAN_IN_OF_MATRICES, Axes
from clipjax.weights.projection import Projection


def max_norm(radius: optax.ScalarOrSchedule, *, axes: Axes = FAN_IN_OF_MATRICES) -> Projection:
    """Project each unit's weights onto the ball of a radius: w * min(1, radius / |w|).

    Args:
      radius: a number, an array that broadcasts to the units, or a schedule `step -> radius`.
      axes: the axes that are reduced. By default `clipjax.fan_in` for kernels (in, out) of rank 2, and an error
        for higher ranks; biases are not changed.

    Returns:
      A :class:`Projection`: a function of the weights, and the last link of a chain.

    Raises:
      TypeError, ValueError: `radius` is negative, NaN or not a number, or does not fit the units; `axes` is
        invalid, or applies to no leaf.

    Equals `keras.constraints.MaxNorm`, whose `axis` is `axes`.

    References:
      Srebro et al., 2005, Maximum-margin matrix factorization; Srivastava et al., 2014, Dropout.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.array([[3.0, 0.3], [4.0, 0.4]])  # (in, out)
      >>> print(clipjax.max_norm(1.0)(kernel).round(3))
      [[0.6 0.3]
       [0.8 0.4]]
    """
    return _rescaling(f"clipjax.max_norm({_core.short_repr(radius)})", _core.factor_to, axes, radius=radius)


def min_max_norm(
    low: optax.ScalarOrSchedule,
    high: optax.ScalarOrSchedule,
    *,
    rate: optax.ScalarOrSchedule = 1.0,
    axes: Axes = FAN_IN_OF_MATRICES,
) -> Projection:
    """Bring each unit's norm between two: w * (rate * clip(|w|, low, high) / |w| + 1 - rate).

    Args:
      low: the smallest norm: a number, an array that broadcasts to the units, or a schedule; finite.
      high: the largest norm, likewise.
      rate: the share of the way to the limit that a unit outside moves at each call, from 0 to 1. 1 projects.
      axes: the axes that are reduced, as in :func:`max_norm`.

    Returns:
      A :class:`Projection`.

    Raises:
      TypeError, ValueError: a limit is negative, NaN or not a number; `low` is infinite or above `high`; `rate`
        is not in [0, 1]; `axes` is invalid, or applies to no leaf.

    A unit of norm 0 stays 0, since it has no direction to grow in.

    Equals `keras.constraints.MinMaxNorm`, whose `axis` is `axes`.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.array([[3.0, 0.3], [4.0, 0.4]])  # norms 5 and 0.5
      >>> print(clipjax.min_max_norm(1.0, 2.0)(kernel).round(3))
      [[1.2 0.6]
       [1.6 0.8]]
    """
    _core.check_order(low, high)
    _core.check_bound("rate", rate)
    for name, value, most in (("low", low, np.finfo(np.float64).max), ("rate", rate, 1)):
        if not (callable(value) or isinstance(value, jax.core.Tracer)) and np.any(np.asarray(value) > most):
            wanted = "finite" if name == "low" else "at most 1"
            raise ValueError(f"{name} must be {wanted}, got {_core.short_repr(value)}")

    name = f"clipjax.min_max_norm({_core.short_repr(low)}, {_core.short_repr(high)}, rate={_core.short_repr(rate)})"
    return _rescaling(name, _core.factor_between, axes, low=low, high=high, rate=rate)


def unit_norm(*, axes: Axes = FAN_IN_OF_MATRICES) -> Projection:
    """Bring each unit's norm to 1: w / |w|.

    Args:
      axes: the axes that are reduced, as in :func:`max_norm`.

    Returns:
      A :class:`Projection`.

    Raises:
      TypeError, ValueError: `axes` is invalid, or applies to no leaf.

    A unit of norm 0 stays 0.

    Equals `keras.constraints.UnitNorm`, whose `axis` is `axes`.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.array([[3.0, 0.3, 0.0], [4.0, 0.4, 0.0]])  # (in, out)
      >>> print(clipjax.unit_norm()(kernel).round(3))
      [[0.6 0.6 0. ]
       [0.8 0.8 0. ]]
    """
    return _rescaling("clipjax.unit_norm()", _core.factor_between, axes, low=1, high=1, rate=1)


def _rescaling(name: str, factor: Callable[..., jax.Array], axes: Any, **limits: Any) -> Projection:
    """Make the projection that multiplies units by `factor(*limits, norms, dtype)`."""
    axes, each = _core.check_axes(axes), {limit: _core.as_schedule(limit, value) for limit, value in limits.items()}

    def constrain(params: Any, step: Any) -> Any:
        now = {limit: value(step) for limit, value in each.items()}

        def factor_of(units: _core.Units, norms: jax.Array) -> jax.Array:
            fitted = (_core.broadcastable(limit, value, norms, units.leaf) for limit, value in now.items())
            return factor(*fitted, norms, units.leaf.value.dtype)

        return _core.rescale_units(params, axes, factor_of)[0]

    return Projection(name, constrain, counts=any(map(callable, limits.values())), axes=axes)
