"""A bound becomes a factor, and the factor meets the entries."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.norms import nan_unless, wide


def margin(dtype: Any) -> float:
    """Return the share by which a factor is made smaller: more than the rounding of norms and products adds.

    In 16 bits each entry is rounded once more, by at most half an ulp.
    """
    info = jnp.finfo(dtype)
    return (2.0**-48 if wide(dtype) == np.float64 else 2.0**-20) + (float(info.eps) / 2 if info.bits < 32 else 0)


def factor_to(bound: Any, norm: jax.Array, dtype: Any = None) -> jax.Array:
    """Return 1 inside the bound, else a little less than bound / norm; NaN for a norm that is not finite.

    How much less depends on the dtype of the leaf; None is that of the norm.
    """
    bound, dtype = jnp.asarray(bound, norm.dtype), norm.dtype if dtype is None else dtype
    inside = (norm <= bound) & (norm < jnp.inf)
    return _quotient(inside, bound * (1 - margin(dtype)), norm)


def factor_between(low: Any, high: Any, rate: Any, norm: jax.Array, dtype: Any) -> jax.Array:
    """Return 1 inside the two bounds, else the factor that takes a norm `rate` of the way to the nearer one.

    A unit that was brought up to `low` ends a margin or two below it, so up to 4 margins below count as inside. 0 has
    no direction to grow.
    """
    low, high, rate = (jnp.asarray(x, norm.dtype) for x in (low, high, rate))
    low, rate, small = jnp.minimum(low, high), jnp.minimum(rate, 1), margin(dtype)
    inside = (norm <= high) & ((norm >= low * (1 - 4 * small)) | (norm == 0)) & (norm < jnp.inf)
    target = rate * (1 - small) * jnp.clip(norm, low, high) + (1 - rate) * norm
    return _quotient(inside, target, norm)


def _quotient(inside: jax.Array, target: jax.Array, norm: jax.Array) -> jax.Array:
    """Return 1 inside, else target / norm; NaN for a norm that is not finite.

    The division comes last: XLA computes a division once, but what follows it once for each entry that reads
    it, which would triple the time it takes to compile hundreds of leaves.
    """
    outside = nan_unless(norm < jnp.inf, norm)
    return jnp.where(inside, 1, target) / jnp.where(inside, 1, outside)


def rescale(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Return x * factor, rounded once: the one product of all clips and projections of norms.

    Where the factor is 1 that is x, bit for bit; XLA on a CPU would flush subnormal numbers in the product.
    """
    real = factor.astype(wide(x.dtype))
    if jnp.iscomplexobj(x):
        scaled = lax.complex(x.real * real, x.imag * real)
    else:
        scaled = (x.astype(real.dtype) * real).astype(x.dtype)
    return weak_like(x, jnp.where(factor == 1, x, scaled))


def weak_like(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return y with the weak type of x, which Python scalars have and products with arrays lose."""
    return x.at[...].set(y) if x.weak_type else y
