"""Rescaling to a bound: the one division by a norm, and the rounding that keeps the bound.

A leaf of norm n > c becomes `leaf * c/n`, rounded so that its norm, measured in float64, is never
above c: in float32 by a factor that is two roundings too small, in 16 bits by rounding every entry
towards zero. Either costs less than 4 ulp of the norm.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core.primitives import convert_element_type_p

from clipjax._norms import in_float64, strong, wide

# The factor and its product with an entry are rounded to float32 once each, by 2**-24 at the most;
# the rest covers the float64 arithmetic behind the factor.
_SLACK = 2.0**-23 + 2.0**-40
_SLACK_FLOAT64 = 2.0**-50


class Shrink(NamedTuple):
    """How to bring something of a known norm inside a bound; scalars, or one value for each unit.

    The factor c/n may be out of float32's range (from 1e38 down to 1e-3, say), so it comes in two
    parts: an exact division by a power of two near n, then `factor`, which is near c.
    """

    inside: jax.Array  # bool: nothing to do
    power: jax.Array  # float32: a power of two
    factor: jax.Array  # float64: bound * power / norm, NaN where the norm is not finite


@in_float64
def shrink_to(norm: jax.Array, bound: jax.Array) -> Shrink:
    """Compare a float64 norm with a bound: the two lines that every clip and projection rests on."""
    inside = (norm <= bound) & (norm < jnp.inf)
    outside = jnp.where(inside, 1.0, norm)  # so that nobody divides by 0, derivatives included
    near = lax.convert_element_type(lax.stop_gradient(outside), np.float32)
    power = lax.reduce_precision(jnp.clip(near, 2.0**-100, 2.0**100), 8, 0)
    factor = bound * (wide(power) / outside)
    return Shrink(inside, power, jnp.where(outside < jnp.inf, factor, jnp.nan))


@in_float64
def scale_of(norm: jax.Array, bound: jax.Array) -> jax.Array:
    """The scale min(1, bound/norm) that :func:`shrink_to` amounts to, for the metrics."""
    how = shrink_to(norm, bound)
    return jnp.where(how.inside, 1.0, how.factor / wide(how.power))


@in_float64
def rescale(leaf: Any, how: Shrink) -> jax.Array:
    """Bring `leaf` inside its bound. What is inside comes back bit for bit, in its dtype."""
    weak, leaf = leaf, strong(leaf)
    if leaf.dtype in (np.float64, np.complex128):
        power, factor = wide(how.power), how.factor * (1 - _SLACK_FLOAT64)
    else:
        power, factor = how.power, lax.convert_element_type(how.factor * (1 - _SLACK), np.float32)
    shrunk = _per_part(lambda x: toward_zero(_widened(x) * (1 / power) * factor, x.dtype), leaf)
    return weakly_typed_as(weak, jnp.where(how.inside, leaf, shrunk))


def _per_part(function: Any, leaf: jax.Array) -> jax.Array:
    """Apply a function of real arrays to the real and the imaginary part."""
    if jnp.iscomplexobj(leaf):
        return lax.complex(function(leaf.real), function(leaf.imag))
    return function(leaf)


def _widened(x: jax.Array) -> jax.Array:
    """X in the dtype it is multiplied in: float32 for narrower ones."""
    return lax.convert_element_type(x, x.dtype if x.dtype == np.float64 else np.float32)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def toward_zero(x: jax.Array, dtype: Any) -> jax.Array:
    """Round to a narrower dtype without growing: its rounding never breaks a bound."""
    if x.dtype == dtype:
        return x
    nearest = lax.convert_element_type(x, dtype)
    grown = jnp.abs(lax.convert_element_type(nearest, x.dtype)) > jnp.abs(x)
    return jnp.where(grown, lax.nextafter(nearest, jnp.zeros_like(nearest)), nearest)


@toward_zero.defjvp
def _toward_zero_jvp(dtype: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return toward_zero(primals[0], dtype), lax.convert_element_type(tangents[0], dtype)


def weakly_typed_as(like: Any, x: jax.Array) -> jax.Array:
    """Give x the weak type of `like`, which arithmetic with a strong bound takes away."""
    if not getattr(like, "weak_type", False) or x.weak_type:
        return x
    return convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)


@in_float64
def limits_in(low: jax.Array, high: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Float64 limits in a leaf's dtype, rounded inwards, so that clipped entries obey them."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"a complex leaf of dtype {dtype} has no order to clip by value")

    def inward(limit: jax.Array, direction: float) -> jax.Array:
        nearest = lax.convert_element_type(limit, dtype)
        beyond = (wide(nearest) - limit) * direction < 0
        return jnp.where(beyond, lax.nextafter(nearest, jnp.full_like(nearest, direction)), nearest)

    return inward(low, jnp.inf), inward(high, -jnp.inf)
