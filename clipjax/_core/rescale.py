"""Rescaling to a bound: the one division by a norm, and the one product with what it gives.

A leaf of norm n > c becomes `leaf * c/n`, rounded so that its norm, measured in float64, is never
above c: in float32 by a factor that is two roundings too small, in 16 bits by rounding every entry
towards zero. Either costs less than 4 ulp of the norm. A leaf that grows to c is rounded alike.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.norms import in_float64, strong, weakly_typed_as, wide
from clipjax._core.rounding import exactly, rounded, smallest, widened
from clipjax._core.turns import is_large, is_small

# The factor and its product with an entry are rounded to float32 once each, by 2**-24 at the most;
# the rest covers the float64 arithmetic behind the factor.
_SLACK = 2.0**-23 + 2.0**-40
_SLACK_FLOAT64 = 2.0**-50

# Leaves of fewer entries are multiplied in float64 on a CPU: that takes fewer operations, and to compile
# hundreds of leaves takes as long as they have operations. Larger ones it would slow down. The bits are the
# same, but from norms of 3e38 to bounds below 1e-36, where the two float32 factors end at 0.
_TINY = 2**12


class Shrink(NamedTuple):
    """How to bring something of a known norm inside a bound; scalars, or one factor for each unit.

    A leaf times `power` times `factor` has the norm of the bound. The factor alone would do, but from
    1e38 down to 1e-3 it leaves the range of a float32. The two reach from 3e38 down to 1e-36. Tiny leaves
    that are multiplied in float64 need none.
    """

    power: jax.Array | None  # float64: 1, or a power of two if a factor needs it; broadcasts to the factors
    factor: jax.Array  # float64: bound / norm / power; -1 inside the bound; NaN for a non-finite norm


def shrink_leaf_to(leaf: Any, norm: jax.Array, bound: jax.Array) -> Shrink:
    """Compare the float64 norms of a leaf's units with their bounds, and divide."""
    tiny = jnp.size(leaf) < _TINY and jax.default_backend() == "cpu" and not _is_wide(leaf.dtype)
    return _shrink_in_float64(norm, bound) if tiny else shrink_to(norm, bound)


@in_float64
@jax.jit
def _shrink_in_float64(norm: jax.Array, bound: jax.Array) -> Shrink:
    """As :func:`shrink_to`, for entries that are multiplied in float64."""
    return Shrink(None, _quotient(norm, bound, bound))


@in_float64
@jax.jit
def shrink_to(norm: jax.Array, bound: jax.Array) -> Shrink:
    """Compare a float64 norm with a bound, and divide: what every clip and projection rests on."""
    # The factor stays a float32 with room below, and so does an entry times the power, whose sum is the
    # derivative of the factor: hence the first step, where the factor alone would do.
    far, farther = norm > 2.0**64 * bound, norm > 2.0**180 * bound
    power = jnp.where(farther, 2.0**-123, jnp.where(far, 2.0**-64, 1.0))
    inverse = jnp.where(farther, 2.0**123, jnp.where(far, 2.0**64, 1.0))
    return Shrink(power, _quotient(norm, bound, inverse * bound))


def _quotient(norm: jax.Array, bound: jax.Array, dividend: jax.Array) -> jax.Array:
    """Divide by the norm: -1 inside the bound, NaN for a non-finite norm."""
    inside = norm <= jnp.minimum(bound, float(jnp.finfo(np.float64).max))
    # One quotient, of what is known before it: XLA makes an operation of its own of a division, and of
    # what is read from it. (Nobody divides by 0, derivatives included.)
    return jnp.where(inside, 1.0, dividend) / jnp.where(inside, -1.0, _or_nan(norm))


def _or_nan(norm: jax.Array) -> jax.Array:
    return jnp.where(norm < jnp.inf, norm, jnp.nan)


@in_float64
def bring_between(
    norm: jax.Array, low: jax.Array, high: jax.Array, rate: jax.Array, dtype: Any, entries: int
) -> Shrink:
    """Compare the norms of a leaf's units with two limits, and go `rate` of the way to the one they miss.

    A norm that ended a little below `low` by rounding is inside, and so is 0, which has no direction to
    grow in. If `low` is above `high`, `high` holds.
    """
    low = jnp.minimum(jnp.minimum(low, high), float(jnp.finfo(dtype).max))
    inside = (norm <= high) & (norm >= low_enough(norm, low, dtype, entries))
    inside = (inside | (rate == 0)) & (norm < jnp.inf)
    shrinks = norm > high
    outside, limit = jnp.where(inside, 1.0, norm), jnp.where(inside, 1.0, jnp.where(shrinks, high, low))
    target = rate * limit + (1 - rate) * outside
    # What grows by less than the factor's slack would shrink.
    target = jnp.where(shrinks, target, jnp.maximum(target, outside * (1 + 2 * _slack(dtype))))
    # Half of the way each: then neither factor leaves the range of a float32.
    half = jnp.sqrt(lax.stop_gradient(target)) * lax.rsqrt(lax.stop_gradient(outside))
    power = jnp.where(half > 0, lax.reduce_precision(half, 11, 0), 1.0)
    return Shrink(power, jnp.where(inside, -1.0, target / _or_nan(outside * power)))


@in_float64
def low_enough(norm: jax.Array, low: jax.Array, dtype: Any, entries: int) -> jax.Array:
    """The norm from which on a unit of `entries` entries is not below `low`, as far as its dtype can tell.

    It is `low` less what rescaling may lose of it: the factor's slack twice, a unit of the last place in
    16 bits, and for each entry the smallest number. A norm of 0 is not below anything: what flushing made
    0 on one device must not grow on another.
    """
    lost = 2.0**-46 if _is_wide(dtype) else 2 * _SLACK
    if jnp.finfo(dtype).bits < 32:
        lost += float(jnp.finfo(dtype).eps)
    floor = low * (1 - lost) - math.sqrt(entries) * smallest(dtype)
    flushed = norm < float(jnp.finfo(np.float64 if _is_wide(dtype) else np.float32).tiny)
    return jnp.where(flushed, 0.0, floor)


def _is_wide(dtype: Any) -> bool:
    return dtype in (np.float64, np.complex128)


def _slack(dtype: Any) -> float:
    return _SLACK_FLOAT64 if _is_wide(dtype) else _SLACK


@in_float64
def scale_of(how: Shrink) -> jax.Array:
    """The scale min(1, bound/norm), for the metrics."""
    return jnp.where(how.factor < 0, 1.0, how.factor if how.power is None else how.factor * how.power)


class Factors(NamedTuple):
    """What the entries of a leaf are multiplied by, in the dtype in which that is computed."""

    power: jax.Array | None
    factor: jax.Array  # rounded down by more than a product is rounded up; negative: stay as you are


def rescale(leaf: Any, how: Shrink) -> jax.Array:
    """Bring `leaf` inside its bound. What is inside comes back bit for bit, in its dtype."""
    return multiply(leaf, factors_of(how, leaf.dtype, many=not is_small(leaf)))


@in_float64
@functools.partial(jax.jit, static_argnames=("dtype", "many"))
def factors_of(how: Shrink, dtype: Any, *, many: bool) -> Factors:
    """The factors for leaves of a dtype.

    If `many` entries read each power, it is computed once, in an operation of its own.
    """
    factor = how.factor * (1 - _slack(dtype))
    if _is_wide(dtype):
        return Factors(how.power, factor)
    if how.power is None:
        return Factors(None, lax.reduce_precision(factor, 11, 23))  # as a float32 has
    power = lax.convert_element_type(how.power, np.float32)
    return Factors(stored(power) if many else power, stored(lax.convert_element_type(factor, np.float32)))


@in_float64
@jax.jit
def multiply(leaf: Any, by: Factors) -> jax.Array:
    """Rescale: the one line that does. What is inside its bound comes back bit for bit, in its dtype."""

    def shrunk(x: jax.Array) -> jax.Array:
        entries = widened(x)
        if by.power is None:
            product = _product_in_float64(entries, by.factor)
        else:  # the power first, as derivatives need it: what it flushes to 0, the product would be, too
            product = entries * by.power * by.factor
        product = jnp.where(by.factor < 0, entries, product)
        if is_large(x) and by.power is not None and by.power.ndim:
            product = _stored_whole(product, by.power)
        return exactly(rounded(product, x.dtype, True), x.dtype)

    return weakly_typed_as(leaf, _per_part(shrunk, strong(leaf)))


def _product_in_float64(entries: jax.Array, factor: jax.Array) -> jax.Array:
    """The product of float32 entries with factors of 24 bits: exact in float64, and rounded once, to float32.

    A product in float32, power first, is rounded once, too: hence the same bits.
    """
    # This rounding rounds nothing. Without it XLA would share the conversion with that for the norms, and
    # store it where, under `vmap`, many small leaves are a large one.
    alone = lax.reduce_precision(entries, 8, 23)
    return lax.convert_element_type(wide(alone) * factor, np.float32)


@jax.custom_jvp
def _stored_whole(x: jax.Array, power: jax.Array) -> jax.Array:
    """The values, bit for bit; `power` holds powers of two, which end in a zero bit.

    LLVM makes a masked store of a choice between what memory holds already and something else: on AMD's
    processors that takes twice as long as to read and write all of it. It cannot know that bit.
    """
    bits = np.dtype(f"uint{8 * x.dtype.itemsize}")
    zero = lax.bitcast_convert_type(power, bits) & np.ones((), bits)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, bits) ^ zero, x.dtype)


@_stored_whole.defjvp
def _stored_whole_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _stored_whole(*primals), tangents[0]


def stored(x: jax.Array) -> jax.Array:
    """The values, bit for bit, none of which is -inf: but to XLA a division.

    What is that expensive is computed once; conversions it would repeat for each entry that reads them.
    """
    return x / jnp.where(x == -jnp.inf, x, np.ones((), x.dtype)) if x.ndim else x


def _per_part(function: Any, leaf: jax.Array) -> jax.Array:
    """Apply a function of real arrays to the real and the imaginary part."""
    if jnp.iscomplexobj(leaf):
        return lax.complex(function(leaf.real), function(leaf.imag))
    return function(leaf)
