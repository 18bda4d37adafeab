"""Projections of the norms of units of weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from clipjax import _checks
from clipjax._core import bounds, clipping, units
from clipjax.weights import limits
from clipjax.weights.projection import Projection, written

Axes = units.Axes | Literal["auto"]


def max_norm(radius: limits.Limit, *, axes: Axes = "auto") -> Projection:
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
    name = written("max_norm", radius, axes=(axes, "auto"))
    return _rescaling(
        name,
        lambda norm, dtype, radius: clipping.factor_to(radius, norm, dtype),
        axes,
        radius=radius,
    )


def min_max_norm(
    low: limits.Limit,
    high: limits.Limit,
    *,
    rate: bounds.Bound = 1.0,
    axes: Axes = "auto",
) -> Projection:
    """Bring each unit's norm between two: w * (rate * clip(|w|, low, high) / |w| + 1 - rate).

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
    name = written("min_max_norm", low, high, rate=(rate, 1.0), axes=(axes, "auto"))
    bounds.check_bound("rate", rate)
    made = _rescaling(name, _factor_between, axes, low=low, high=high, rate=rate)
    if not (isinstance(low, Mapping) or isinstance(high, Mapping)):
        _checks.check_order(low, high)
    _check_at_most("rate", rate, 1, "at most 1")
    lows = (
        {f"low[{key!r}]": value for key, value in low.items()}
        if isinstance(low, Mapping)
        else {"low": low}
    )
    for key, value in lows.items():
        _check_at_most(key, value, np.finfo(np.float64).max, "finite")
    return made


def _check_at_most(name: str, value: Any, most: float, wanted: str) -> None:
    if not (callable(value) or isinstance(value, jax.core.Tracer)) and np.any(
        np.asarray(value) > most
    ):
        raise ValueError(f"{name} must be {wanted}, got {bounds.short_repr(value)}")


def unit_norm(*, axes: Axes = "auto") -> Projection:
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
    return _rescaling(
        written("unit_norm", axes=(axes, "auto")),
        _factor_between,
        axes,
        low=1,
        high=1,
        rate=1,
    )


def _rescaling(
    name: str, factor: Callable[..., jax.Array], axes: Any, **given: Any
) -> Projection:
    """Make the projection that multiplies units by `factor(norms, dtype, **limits)`."""
    axes = units.check_axes(axes, auto=units.fan_in_of_matrices)
    each_limit = {key: limits.by_leaf(key, value) for key, value in given.items()}
    by_path = any(isinstance(given.get(key), Mapping) for key in ("low", "high"))
    scheduled = {
        (key, pattern) for key, each in each_limit.items() for pattern in each.scheduled
    }

    def find(params: Any) -> list[units.LeafUnits]:
        patterns = zip(
            *(
                each.patterns(params)
                for key, each in each_limit.items()
                if key != "rate"
            ),
            strict=True,
        )
        return units.of_tree(
            params, axes, [any(p is not None for p in of_leaf) for of_leaf in patterns]
        )

    def rescale(params: Any, step: Any) -> Any:
        now = {
            key: (each.patterns(params), each.at(step))
            for key, each in each_limit.items()
        }
        found, factors = find(params), []
        for each, norm in zip(found, units.norms_of(found), strict=True):
            here = {
                key: at.get(of_leaf[each.place], _FREE.get(key))
                for key, (of_leaf, at) in now.items()
            }
            if by_path and scheduled.isdisjoint(
                (key, now[key][0][each.place]) for key in ("low", "high")
            ):
                _checks.check_order(here["low"], here["high"], each.leaf)
            fitted = {
                key: bounds.fit_bound(key, limit, norm, each.leaf)
                for key, limit in here.items()
            }
            factors.append(factor(norm, each.leaf.value.dtype, **fitted))
        return clipping.rescaled(params, found, factors)

    return Projection(name, rescale, scheduled=bool(scheduled), find=find)


# The limits of a leaf that no pattern matches.
_FREE = {"low": 0.0, "high": np.inf}


@functools.partial(jax.jit, static_argnames="dtype")
def _factor_between(
    norm: jax.Array, dtype: Any, low: Any, high: Any, rate: Any
) -> jax.Array:
    """Return 1 inside the two bounds, else the factor that takes a norm `rate` of the way to the nearer one.

    A unit that was brought up to `low` ends a margin or two below it, so up to 4
    margins below count as inside. 0 has no direction to grow.
    """
    low, high, rate = (jnp.asarray(x, norm.dtype) for x in (low, high, rate))
    low, rate, small = (
        jnp.minimum(low, high),
        jnp.minimum(rate, 1),
        clipping.margin(dtype),
    )
    inside = (norm <= high) & ((norm >= low * (1 - 4 * small)) | (norm == 0))
    return clipping.quotient_or_1(
        inside, rate * (1 - small) * jnp.clip(norm, low, high) + (1 - rate) * norm, norm
    )
