"""Rescaling to a bound: the only division by a norm, and the only product with the quotient.

A leaf of norm n > c becomes `leaf * c/n`, rounded so that its norm, measured in float64, is never
above c: in float32 by a factor that is two roundings too small, in 16 bits by rounding every entry
toward zero. Either costs less than 4 ulp of the norm. A leaf that grows to c is rounded in the same way.
Inside the bound the factor is exactly 1, and the product with 1 is the leaf, bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.dtypes import in_float64, is_wide, strong, weakly_typed_as, wide
from clipjax._core.maxima import larger, smaller
from clipjax._core.platforms import NORM_ERROR, once
from clipjax._core.rounding import exactly, rounded, smallest, widened

# The factor and its product with an entry are rounded to float32 once each, by at most 2**-24; the second
# term covers the error of the norm.
_SLACK = 2.0**-23 + 2 * NORM_ERROR
_SLACK_FLOAT64 = 2.0**-50


class Scale(NamedTuple):
    """The scale that brings a leaf to its bound: float64 scalars, or arrays with a number for each unit.

    Both are exactly 1 inside the bound. A factor alone, from a norm of 1e38 to a bound of 1e-3, would leave
    the range of a float32. The two together reach from 3e38 down to 1e-36, and from 1e-38 up to 3e38.
    """

    power: jax.Array  # a power of two, which is 1 unless the factor alone would be out of range
    factor: jax.Array  # bound / norm / power; NaN for a norm that is not finite


@in_float64
@jax.jit
def to_bound(norm: jax.Array, bound: jax.Array) -> Scale:
    """Compare norms with a bound, and divide: the basis of every clip and most projections."""
    inside = (norm <= bound) & (norm < jnp.inf)
    target, norm = jnp.where(inside, 1.0, bound), jnp.where(inside, 1.0, _or_nan(norm))
    # The factor stays well inside the range of float32, and so do entries times the power, whose sum is the
    # derivative of the factor. This needs the first step already where the factor alone would be in range.
    return _quotient(target, norm, (norm > 2.0**64 * target, 64), (norm > 2.0**180 * target, 123))


def _or_nan(norm: jax.Array) -> jax.Array:
    return jnp.where(norm < jnp.inf, norm, jnp.nan)


def _quotient(target: jax.Array, norm: jax.Array, *steps: tuple[jax.Array, int]) -> Scale:
    """Return target / norm as a scale, whose power is 2**-exponent of the last step that applies."""
    power, inverse = jnp.ones(()), jnp.ones(())
    for applies, exponent in steps:
        power = jnp.where(applies, 2.0**-exponent, power)
        inverse = jnp.where(applies, 2.0**exponent, inverse)
    return Scale(power, inverse * target / norm)  # there is no division by 0, not even in derivatives


class Precision(NamedTuple):
    """What rounding does to the units of a leaf, as float64 numbers."""

    slack: Any  # the share by which a factor is made smaller, since rounding may add to a norm
    lost: Any  # the share of a norm that rescaling may lose
    flushed: Any  # what it may lose in addition, as an absolute number
    smallest: Any  # the norm below which all entries may have been flushed to 0
    largest: Any  # the largest number of the dtype


@in_float64
def root_of(entries: Any) -> Any:
    """Return the square root of the number of entries, in float64; it may be symbolic, in `jax.export`."""
    return np.sqrt(np.float64(entries)) if isinstance(entries, int) else jnp.sqrt(wide(entries))


def precision_of(dtype: Any, entries: Any = 0) -> Precision:
    """Return what rounding does to units of `entries` entries.

    Rescaling may lose the factor's slack twice, a unit in the last place in 16 bits, and the smallest number
    for each entry.
    """
    wide_or_not = np.float64 if is_wide(dtype) else np.float32
    lost = 2.0**-46 if is_wide(dtype) else 2 * _SLACK
    if jnp.finfo(dtype).bits < 32:
        lost += float(jnp.finfo(dtype).eps)
    return Precision(
        slack=np.float64(_SLACK_FLOAT64 if is_wide(dtype) else _SLACK),
        lost=np.float64(lost),
        flushed=root_of(entries) * smallest(dtype),
        smallest=np.float64(np.finfo(wide_or_not).tiny),
        largest=np.float64(jnp.finfo(dtype).max),
    )


@in_float64
@jax.jit
def between(norm: jax.Array, low: jax.Array, high: jax.Array, rate: jax.Array, precision: Precision) -> Scale:
    """Compare norms with two limits, and move those outside by `rate` of the distance to the limit.

    A norm slightly below `low` because of rounding counts as inside, and so does 0, which has no direction to
    grow in. If `low` is above `high`, `high` is used.
    """
    low = smaller(smaller(low, high), precision.largest)
    inside = (norm <= high) & (norm >= low_enough(norm, low, precision))
    inside = (inside | (rate == 0)) & (norm < jnp.inf)
    too_large = norm > high
    outside, limit = jnp.where(inside, 1.0, norm), jnp.where(inside, 1.0, jnp.where(too_large, high, low))
    target = rate * limit + (1 - rate) * outside
    # A norm that is to grow by less than the factor's slack would otherwise shrink.
    least = larger(target, outside * (1 + 2 * precision.slack))
    target = jnp.where(inside, 1.0, jnp.where(too_large, target, least))
    norm = jnp.where(inside, 1.0, _or_nan(outside))
    down = (norm > 2.0**64 * target, 64), (norm > 2.0**180 * target, 123)
    up = (target > 2.0**64 * norm, -64), (target > 2.0**180 * norm, -126)
    far_up = (target > 2.0**300 * norm, -400), (target > 2.0**1000 * norm, -900)  # only occurs in float64
    return _quotient(target, norm, *down, *up, *far_up)


@in_float64
def low_enough(norm: jax.Array, low: jax.Array, precision: Precision) -> jax.Array:
    """Return the smallest norm that counts as not below `low`, given the rounding of the unit's dtype.

    A norm of 0 is never below: a unit that one device flushes to 0 must not grow on another.
    """
    floor = low * (1 - precision.lost) - precision.flushed
    return jnp.where(norm < precision.smallest, 0.0, floor)


@in_float64
def factor_of(scale: Scale) -> jax.Array:
    """Return the number by which the entries are multiplied."""
    return scale.power * scale.factor


@in_float64
def is_changed(scale: Scale) -> jax.Array:
    """Whether a scale changes anything."""
    return (scale.factor != 1) | (scale.power != 1)


@in_float64
@jax.jit
def rounded_down(scale: Scale, slack: Any) -> Scale:
    """Reduce a scale that is not 1 by more than rounding may add to a norm."""
    return scale._replace(factor=jnp.where(is_changed(scale), scale.factor * (1 - slack), scale.factor))


@in_float64
@jax.jit
def rescale(leaf: Any, scale: Scale) -> jax.Array:
    """Multiply a leaf by a scale that is rounded down for its dtype: the only place that rescales."""

    def product(x: jax.Array) -> jax.Array:
        entries = widened(x)
        both = lax.convert_element_type(jnp.stack(scale), entries.dtype)
        power, factor = once(both, x)
        # The power comes first, as derivatives need it; what it flushes to 0 would be 0 in the product, too.
        return exactly(rounded(entries * power * factor, x.dtype, toward_zero=True), x.dtype)

    x = strong(leaf)
    parts = lax.complex(product(x.real), product(x.imag)) if jnp.iscomplexobj(x) else product(x)
    return weakly_typed_as(leaf, parts)


def rescaled(leaf: Any, scale: Scale) -> jax.Array:
    """Multiply a leaf by a scale, rounded down for its dtype."""
    return rescale(leaf, rounded_down(scale, precision_of(leaf.dtype).slack))


def scale_by(factor: jax.Array) -> Scale:
    """Return the scale for a factor in [0, 1]."""
    return Scale(jnp.ones_like(wide(factor)), wide(factor))
