"""Rescaling to a bound: the one division by a norm, and the one product with what it gives.

A leaf of norm n > c becomes `leaf * c/n`, rounded so that its norm, measured in float64, is never
above c: in float32 by a factor that is two roundings too small, in 16 bits by rounding every entry
towards zero. Either costs less than 4 ulp of the norm. A leaf that grows to c is rounded alike. Inside the
bound the factor is exactly 1, and a product with 1 is the leaf, bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.maxima import larger, smaller
from clipjax._core.norms import in_float64, is_wide, strong, weakly_typed_as, wide
from clipjax._core.platforms import NORM_ERROR, once
from clipjax._core.rounding import exactly, rounded, smallest, widened
from clipjax._core.xla_cpu import is_large

# The factor and its product with an entry are rounded to float32 once each, by 2**-24 at the most; the
# rest covers what the norm may be off by.
_SLACK = 2.0**-23 + 2 * NORM_ERROR
_SLACK_FLOAT64 = 2.0**-50


class Scale(NamedTuple):
    """What brings a leaf of known norms to its bound: float64 scalars, or one of each for each unit.

    Both are exactly 1 inside the bound. The factor alone would do, but from 1e38 down to 1e-3 it leaves
    the range of a float32. The two reach from 3e38 down to 1e-36, and from 1e-38 up to 3e38.
    """

    power: jax.Array  # a power of two, which is 1 but where the factor alone is out of range
    factor: jax.Array  # bound / norm / power; NaN for a norm that is not finite


@in_float64
@jax.jit
def to_bound(norm: jax.Array, bound: jax.Array) -> Scale:
    """Compare norms with a bound, and divide: what every clip and most projections rest on."""
    inside = (norm <= bound) & (norm < jnp.inf)
    target, norm = jnp.where(inside, 1.0, bound), jnp.where(inside, 1.0, _or_nan(norm))
    # The factor stays a float32 with room to spare, and so does an entry times the power, whose sum is the
    # derivative of the factor: hence the first step, where the factor alone would do.
    return _quotient(target, norm, (norm > 2.0**64 * target, 64), (norm > 2.0**180 * target, 123))


def _or_nan(norm: jax.Array) -> jax.Array:
    return jnp.where(norm < jnp.inf, norm, jnp.nan)


def _quotient(target: jax.Array, norm: jax.Array, *steps: tuple[jax.Array, int]) -> Scale:
    """Target / norm, of which the power takes 2**-exponent for the last step that applies."""
    power, inverse = jnp.ones(()), jnp.ones(())
    for applies, exponent in steps:
        power = jnp.where(applies, 2.0**-exponent, power)
        inverse = jnp.where(applies, 2.0**exponent, inverse)
    return Scale(power, inverse * target / norm)  # nobody divides by 0, derivatives included


class Precision(NamedTuple):
    """What rounding does to the units of a leaf, as float64 numbers."""

    slack: Any  # the share by which a factor is made smaller, since rounding may add to a norm
    lost: Any  # the share of a norm that rescaling may lose
    flushed: Any  # what it may lose besides
    smallest: Any  # the norm below which there is nothing but what was flushed to 0
    largest: Any  # the largest number


@in_float64
def root_of(entries: Any) -> Any:
    """The root of a number of entries, in float64; `jax.export` may leave the number open."""
    return np.sqrt(np.float64(entries)) if isinstance(entries, int) else jnp.sqrt(wide(entries))


def precision_of(dtype: Any, entries: Any = 0) -> Precision:
    """What rounding does to units of `entries` entries.

    Rescaling loses the factor's slack twice, a unit of the last place in 16 bits, and for each entry the
    smallest number.
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
    """Compare norms with two limits, and go `rate` of the way to the one they miss.

    A norm that ended a little below `low` by rounding is inside, and so is 0, which has no direction to
    grow in. If `low` is above `high`, `high` holds.
    """
    low = smaller(smaller(low, high), precision.largest)
    inside = (norm <= high) & (norm >= low_enough(norm, low, precision))
    inside = (inside | (rate == 0)) & (norm < jnp.inf)
    too_large = norm > high
    outside, limit = jnp.where(inside, 1.0, norm), jnp.where(inside, 1.0, jnp.where(too_large, high, low))
    target = rate * limit + (1 - rate) * outside
    # What grows by less than the factor's slack would become smaller.
    least = larger(target, outside * (1 + 2 * precision.slack))
    target = jnp.where(inside, 1.0, jnp.where(too_large, target, least))
    norm = jnp.where(inside, 1.0, _or_nan(outside))
    down = (norm > 2.0**64 * target, 64), (norm > 2.0**180 * target, 123)
    up = (target > 2.0**64 * norm, -64), (target > 2.0**180 * norm, -126)
    far_up = (target > 2.0**300 * norm, -400), (target > 2.0**1000 * norm, -900)  # of float64 alone
    return _quotient(target, norm, *down, *up, *far_up)


@in_float64
def low_enough(norm: jax.Array, low: jax.Array, precision: Precision) -> jax.Array:
    """The norm from which on a unit is not below `low`, as far as its dtype can tell.

    A norm of 0 is not below anything: what flushing made 0 on one device must not grow on another.
    """
    floor = low * (1 - precision.lost) - precision.flushed
    return jnp.where(norm < precision.smallest, 0.0, floor)


@in_float64
def factor_of(scale: Scale) -> jax.Array:
    """What the entries are multiplied by in all."""
    return scale.power * scale.factor


@in_float64
def is_changed(scale: Scale) -> jax.Array:
    """Whether a scale changes anything."""
    return (scale.factor != 1) | (scale.power != 1)


@in_float64
@jax.jit
def rounded_down(scale: Scale, slack: Any) -> Scale:
    """The scale, where it is not 1, made smaller by more than rounding may add to a norm."""
    return scale._replace(factor=jnp.where(is_changed(scale), scale.factor * (1 - slack), scale.factor))


@in_float64
@jax.jit
def rescale(leaf: Any, scale: Scale) -> jax.Array:
    """Multiply a leaf by a scale that is rounded down for its dtype: the one line that rescales."""

    def product(x: jax.Array) -> jax.Array:
        entries = widened(x)
        both = lax.convert_element_type(jnp.stack(scale), entries.dtype)
        power, factor = once(both) if is_large(x) else both
        # The power first, as derivatives need it: what it flushes to 0, the product would be, too.
        return exactly(rounded(entries * power * factor, x.dtype, toward_zero=True), x.dtype)

    x = strong(leaf)
    parts = lax.complex(product(x.real), product(x.imag)) if jnp.iscomplexobj(x) else product(x)
    return weakly_typed_as(leaf, parts)


def rescaled(leaf: Any, scale: Scale) -> jax.Array:
    """Bring a leaf to its bound."""
    return rescale(leaf, rounded_down(scale, precision_of(leaf.dtype).slack))


def scale_by(factor: jax.Array) -> Scale:
    """The scale of a factor in (0, 1], or 0."""
    return Scale(jnp.ones_like(wide(factor)), wide(factor))
