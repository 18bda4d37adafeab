"""Bringing the singular values of one matrix down to a bound, its derivative, and the largest of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.norms import wide
from clipjax._core.rounding import rounded
from clipjax.weights.caps import frobenius_norm, largest_entry
from clipjax.weights.proof import by_platform, first_inside, gram, identity, limit_in, matmul, to_width

# (matrix, bound) -> about the capped matrix, in the width of both
Cap = Callable[[jax.Array, jax.Array], jax.Array]


def factors(w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The thin singular value decomposition, of a matrix of any scale."""
    unit = largest_entry(w)
    u, s, vh = jnp.linalg.svd(w / unit, full_matrices=False)
    return u, s * unit, vh


def narrowed(x: jax.Array, dtype: Any) -> jax.Array:
    """Round a matrix to a leaf's dtype, once and to the nearest."""
    if jnp.iscomplexobj(x):
        return lax.complex(*(narrowed(part, np.finfo(dtype).dtype) for part in (x.real, x.imag)))
    return lax.convert_element_type(rounded(x, dtype), dtype)


@functools.partial(jax.custom_jvp[jax.Array], nondiff_argnums=(3,))
def capped(w: jax.Array, bound: jax.Array, proven: jax.Array, cap: Cap) -> jax.Array:
    """Bring a matrix inside `bound`; one that is proven to be inside comes back bit for bit.

    NaN if anything in it is not finite.
    """
    return _capped_by_platform(w, bound, proven, static=(cap,))


def _capped(cap: Cap, real: Any, w: jax.Array, bound: jax.Array, proven: jax.Array) -> jax.Array:
    finite = jnp.all(jnp.isfinite(w)) & ~jnp.isnan(bound)
    need = finite & ~proven

    def project(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        about = cap(to_width(w, real), limit_in(real, bound))

        def smaller(s: jax.Array) -> jax.Array:
            return narrowed(about * (1 - s), w.dtype)

        return state[0] & False, first_inside(real, state[0], smaller, lambda x: x, w, bound)

    result = lax.while_loop(lambda state: state[0], project, (need, w))[1]
    return jnp.where(finite, result, jnp.full_like(w, jnp.nan))


_capped_by_platform = by_platform(_capped)


@capped.defjvp
def _capped_jvp(cap: Cap, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (w, bound, proven), (dw, dbound, _) = primals, tangents
    # In the leaf's own width, as JAX transposes in the width of its own mode.
    dtype = w.dtype if w.dtype.itemsize >= 4 else np.dtype(np.float32)
    real = np.finfo(dtype).dtype
    limit = lax.convert_element_type(bound, real)
    finite = jnp.all(jnp.isfinite(w))
    u, s, vh = factors(jnp.where(finite, w, jnp.zeros_like(w)).astype(dtype))
    outside = s > limit
    new = jnp.where(outside, limit, s)
    # Divided differences of s -> min(s, bound), odd and even; a tie has the derivative of its side.
    same = outside[:, None] == outside[None, :]
    apart, total = s[:, None] - s[None, :], s[:, None] + s[None, :]
    slope = lax.convert_element_type(~outside, real)
    odd = jnp.where(same, slope[:, None], (new[:, None] - new[None, :]) / jnp.where(same, 1, apart))
    even = jnp.where(total > 0, (new[:, None] + new[None, :]) / jnp.where(total > 0, total, 1), 1)
    ratio = jnp.where(s > 0, new / jnp.where(s > 0, s, 1), 1)[None, :]
    odd, even, ratio, outer = (
        lax.convert_element_type(x, dtype) for x in (odd, even, ratio, outside[None, :])
    )

    dw, dbound = (lax.convert_element_type(x, dtype) for x in (dw, dbound))
    uh, v = jnp.conj(u.T), jnp.conj(vh.T)
    inner = matmul(matmul(uh, dw), v)
    mirrored = jnp.conj(inner.T)
    result = matmul(matmul(u, odd * (inner + mirrored) + even * (inner - mirrored)), vh) / 2
    # What leads out of the columns' span is scaled as the rows are, and vice versa.
    if w.shape[0] > w.shape[1]:
        result += matmul(matmul(dw - matmul(u, matmul(uh, dw)), v) * ratio, vh)
    elif w.shape[0] < w.shape[1]:
        result += matmul(u * ratio, matmul(uh, dw - matmul(matmul(dw, v), vh)))
    result += matmul(u * outer, vh) * dbound
    # NaN comes from what is not finite, and is no constant, which `jax.debug_nans` would see.
    result *= jnp.sqrt(jnp.where(finite, 1.0, -1.0))
    return capped(w, bound, proven, cap), lax.convert_element_type(result, w.dtype)


@by_platform
def largest_singular_value(real: Any, w: jax.Array, bound: jax.Array, proven: jax.Array) -> jax.Array:
    """An estimate from below, by 32 power iterations, on the side of `bound` that is proven."""
    finite = jnp.all(jnp.isfinite(w))
    w = jnp.where(finite, to_width(w, real), 0.0)
    unit = largest_entry(w)
    g = gram(w / unit)
    diagonal = jnp.sum(jnp.where(identity(len(g), bool), g.real, 0.0), axis=0)
    place = lax.broadcasted_iota(np.int32, diagonal.shape, 0)
    first = jnp.min(jnp.where(diagonal == jnp.max(diagonal), place, np.int32(len(g))))
    start = jnp.sum(jnp.where(place == first, g, 0.0), axis=1)  # the column of the longest row

    def turn(_: Any, v: jax.Array) -> jax.Array:
        v = matmul(g, v)
        norm = frobenius_norm(v)
        return v / jnp.where(norm > 0, norm, 1.0)

    v = lax.fori_loop(0, 32, turn, start)
    estimate = wide(unit) * wide(jnp.sqrt(jnp.maximum(jnp.vdot(v, matmul(g, v)).real, 0.0)))
    above = jnp.maximum(estimate, bound * (1 + 2.0**-24))
    estimate = jnp.where(proven, jnp.minimum(estimate, bound), above)
    return jnp.where(finite, estimate, jnp.nan)
