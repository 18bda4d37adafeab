"""Rounding to the dtypes of leaves: to nearest, toward zero, or inward; and the neighbor of a number."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.dtypes import in_float64, wide


def widened(x: jax.Array) -> jax.Array:
    """Widen to the dtype to compute in: float32 for narrower dtypes."""
    return lax.convert_element_type(x, x.dtype if x.dtype == np.float64 else np.float32)


def exactly(x: jax.Array, dtype: Any) -> jax.Array:
    """Convert to a dtype that represents every entry exactly, after :func:`rounded`.

    For bfloat16 this takes the upper bits. XLA on a CPU would store the result of a conversion, instead of
    recomputing it for each operation that reads it.
    """
    by_bits = dtype == jnp.bfloat16 and x.dtype == np.float32
    return _upper_half(x) if by_bits else lax.convert_element_type(x, dtype)


@jax.custom_jvp
def _upper_half(x: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(x, np.uint32) >> np.uint32(16)
    return lax.bitcast_convert_type(lax.convert_element_type(bits, np.uint16), jnp.bfloat16)


@_upper_half.defjvp
def _upper_half_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _upper_half(primals[0]), lax.convert_element_type(tangents[0], jnp.bfloat16)


def rounded(x: jax.Array, dtype: Any, toward_zero: bool = False) -> jax.Array:
    """Round x to values of a narrower dtype, but keep x's dtype: to nearest, or toward zero.

    Converting to 16 bits and back would not do: XLA removes such a pair of conversions
    (`xla_allow_excess_precision`), and with it the rounding.
    """
    return _rounded(x, dtype, toward_zero) if jnp.finfo(dtype).nmant < jnp.finfo(x.dtype).nmant else x


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _rounded(x: jax.Array, dtype: Any, toward_zero: bool) -> jax.Array:
    narrow, own = jnp.finfo(dtype), jnp.finfo(x.dtype)
    drop = own.nmant - narrow.nmant
    bits = lax.bitcast_convert_type(x, np.dtype(f"uint{own.bits}"))
    one = np.ones((), bits.dtype)
    half = 0 if toward_zero else (one << (drop - 1)) - one + ((bits >> drop) & one)
    normal = lax.bitcast_convert_type((bits + half) & ~((one << drop) - one), x.dtype)
    if narrow.minexp > own.minexp:  # the narrower dtype has subnormals and infinities of its own
        unit = float(narrow.smallest_subnormal)
        whole = jnp.trunc(x / unit) if toward_zero else jnp.round(x / unit)
        normal = jnp.where(jnp.abs(x) < float(narrow.tiny), whole * unit, normal)
        normal = jnp.where(jnp.abs(normal) > float(narrow.max), jnp.copysign(jnp.inf, x), normal)
    return jnp.where(jnp.isnan(x), x, normal)


@_rounded.defjvp
def _rounded_jvp(dtype: Any, toward_zero: bool, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _rounded(primals[0], dtype, toward_zero), tangents[0]


@jax.custom_jvp
def neighbor(x: jax.Array, outward: jax.Array) -> jax.Array:
    """Return the next value of x's dtype, away from 0 where `outward`, else toward 0.

    x must be neither 0 nor NaN: the cases that `lax.nextafter` handles in addition cost more than a pass.
    """
    bits = lax.bitcast_convert_type(x, np.dtype(f"int{8 * x.dtype.itemsize}"))
    one = np.ones((), bits.dtype)
    return lax.bitcast_convert_type(bits + jnp.where(outward, one, -one), x.dtype)


@neighbor.defjvp
def _neighbor_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return neighbor(*primals), tangents[0]


@in_float64
def limits_in(low: jax.Array, high: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Convert float64 limits to a leaf's dtype, rounded inward, so that clipped entries are within them."""
    return _inward(low, dtype, jnp.inf), _inward(high, dtype, -jnp.inf)


@in_float64
def round_up(x: jax.Array, dtype: Any) -> jax.Array:
    """Round a float64 number up to the dtype of a state.

    A norm as large as all past norms is then not above them, and is not clipped; and no clipped norm was
    above the threshold in the state.
    """
    return _inward(x, dtype, jnp.inf)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
@in_float64
@functools.partial(jax.jit, static_argnums=(1, 2))
def _inward(limit: jax.Array, dtype: Any, direction: float) -> jax.Array:
    nearest = lax.convert_element_type(limit, dtype)
    beyond = wide(nearest) < limit if direction > 0 else wide(nearest) > limit
    return jnp.where(beyond, lax.nextafter(nearest, jnp.full_like(nearest, direction)), nearest)


@_inward.defjvp
@in_float64
def _inward_jvp(dtype: Any, direction: float, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _inward(primals[0], dtype, direction), lax.convert_element_type(tangents[0], dtype)


def smallest(dtype: Any) -> float:
    """Return the smallest positive number that XLA does not flush to 0; float16 is computed in float32."""
    info = jnp.finfo(dtype)
    return float(info.smallest_subnormal if dtype == np.float16 else info.tiny)
