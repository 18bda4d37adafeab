"""Bounds on the singular values of one matrix, with derivatives, and the largest singular value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.dtypes import wide
from clipjax._core.rounding import rounded
from clipjax._matrices.caps import frobenius_norm, largest_entry
from clipjax._matrices.proof import by_platform, first_inside, gram, identity, limit_in, matmul, to_width

# (matrix, bound) -> approximately the capped matrix, in the precision of both
Cap = Callable[[jax.Array, jax.Array], jax.Array]


def factors(w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the thin singular value decomposition of a matrix of any scale."""
    unit = largest_entry(w)
    u, s, vh = jnp.linalg.svd(w / unit, full_matrices=False)
    return u, s * unit, vh


def narrowed(x: jax.Array, dtype: Any) -> jax.Array:
    """Round a matrix to a leaf's dtype, once, to nearest."""
    if jnp.iscomplexobj(x):
        return lax.complex(*(narrowed(part, np.finfo(dtype).dtype) for part in (x.real, x.imag)))
    return lax.convert_element_type(rounded(x, dtype), dtype)


@functools.partial(jax.custom_jvp[jax.Array], nondiff_argnums=(3,))
def capped(w: jax.Array, bound: jax.Array, proven: jax.Array, cap: Cap) -> jax.Array:
    """Bring a matrix inside `bound`; one that is proven to be inside is unchanged, bit for bit.

    The result is NaN if any entry is not finite.
    """
    return _inside_by_platform(w, bound, ~proven, static=(cap,))


@functools.partial(jax.custom_jvp[jax.Array], nondiff_argnums=(2,))
def softened(w: jax.Array, bound: jax.Array, cap: Cap) -> jax.Array:
    """Bring each singular value s of a matrix to s / sqrt(1 + s² / bound²), and the matrix inside `bound`.

    The result is NaN if any entry is not finite. With an infinite bound, the matrix is unchanged, bit for
    bit.
    """
    return _inside_by_platform(w, bound, bound < jnp.inf, static=(cap,))


def _inside(cap: Cap, real: Any, w: jax.Array, bound: jax.Array, outside: jax.Array) -> jax.Array:
    finite = jnp.all(jnp.isfinite(w)) & ~jnp.isnan(bound)
    need = finite & outside

    def project(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        about = cap(to_width(w, real), limit_in(real, bound))

        def smaller(s: jax.Array) -> jax.Array:
            return narrowed(about * (1 - s), w.dtype)

        return state[0] & False, first_inside(real, state[0], smaller, lambda x: x, w, bound)

    result = lax.while_loop(lambda state: state[0], project, (need, w))[1]
    return jnp.where(finite, result, jnp.full_like(w, jnp.nan))


_inside_by_platform = by_platform(_inside)


class _Differences(NamedTuple):
    """For a function f of singular values s: odd and even divided differences, f / s, and df / dbound."""

    odd: jax.Array  # (f(s) - f(t)) / (s - t)
    even: jax.Array  # (f(s) + f(t)) / (s + t)
    ratio: jax.Array
    by_bound: jax.Array


def _of_cap(s: jax.Array, limit: jax.Array) -> _Differences:
    """Return the differences of min(s, limit); if s equals the limit, with the derivative from below."""
    outside = s > limit
    new = jnp.where(outside, limit, s)
    same = outside[:, None] == outside[None, :]
    apart = jnp.where(same, 1, s[:, None] - s[None, :])
    slope = lax.convert_element_type(~outside, s.dtype)
    odd = jnp.where(same, slope[:, None], (new[:, None] - new[None, :]) / apart)
    ratio = jnp.where(s > 0, new / jnp.where(s > 0, s, 1), 1)
    return _Differences(odd, _even(s, new, 1), ratio, lax.convert_element_type(outside, s.dtype))


def _of_soft_cap(s: jax.Array, limit: jax.Array) -> _Differences:
    """Return those of f = s / sqrt(1 + s² / limit²), where f(s)² - f(t)² = (f / s)² (f / t)² (s² - t²)."""
    x = jnp.where(limit > 0, s / jnp.where(limit > 0, limit, 1), jnp.inf)
    inverse = 1 / jnp.maximum(x, 1)
    ratio = inverse * lax.rsqrt(1 + jnp.square(jnp.minimum(x, inverse)))
    even = _even(s, s * ratio, ratio)
    odd = jnp.where(even > 0, jnp.square(ratio[:, None] * ratio[None, :]) / jnp.where(even > 0, even, 1), 0)
    share = jnp.where(x < jnp.inf, jnp.where(x < jnp.inf, x, 0) * ratio, 1)  # f / limit
    return _Differences(odd, even, ratio, share**3)


def _even(s: jax.Array, new: jax.Array, at_zero: Any) -> jax.Array:
    total = s[:, None] + s[None, :]
    return jnp.where(total > 0, (new[:, None] + new[None, :]) / jnp.where(total > 0, total, 1), at_zero)


def _derivative(
    differences_of: Callable[[jax.Array, jax.Array], _Differences],
    w: jax.Array,
    bound: jax.Array,
    dw: jax.Array,
    dbound: jax.Array,
) -> jax.Array:
    """Return the derivative of U f(S) Vᴴ, where f depends on the bound."""
    # In the leaf's own precision, as JAX transposes in the precision of the user's mode.
    dtype = w.dtype if w.dtype.itemsize >= 4 else np.dtype(np.float32)
    limit = lax.convert_element_type(bound, np.finfo(dtype).dtype)
    finite = jnp.all(jnp.isfinite(w))
    u, s, vh = factors(jnp.where(finite, w, jnp.zeros_like(w)).astype(dtype))
    odd, even, ratio, by_bound = (lax.convert_element_type(x, dtype) for x in differences_of(s, limit))

    dw, dbound = (lax.convert_element_type(x, dtype) for x in (dw, dbound))
    uh, v = jnp.conj(u.T), jnp.conj(vh.T)
    inner = matmul(matmul(uh, dw), v)
    mirrored = jnp.conj(inner.T)
    result = matmul(matmul(u, odd * (inner + mirrored) + even * (inner - mirrored)), vh) / 2
    # The part outside the span of the columns is scaled like the rows, and vice versa.
    if w.shape[0] > w.shape[1]:
        result += matmul(matmul(dw - matmul(u, matmul(uh, dw)), v) * ratio, vh)
    elif w.shape[0] < w.shape[1]:
        result += matmul(u * ratio, matmul(uh, dw - matmul(matmul(dw, v), vh)))
    result += matmul(u * by_bound, vh) * dbound
    # NaN is computed only if an entry is not finite; `jax.debug_nans` would report a NaN constant.
    result *= jnp.sqrt(jnp.where(finite, 1.0, -1.0))
    return lax.convert_element_type(result, w.dtype)


@capped.defjvp
def _capped_jvp(cap: Cap, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (w, bound, proven), (dw, dbound, _) = primals, tangents
    return capped(w, bound, proven, cap), _derivative(_of_cap, w, bound, dw, dbound)


@softened.defjvp
def _softened_jvp(cap: Cap, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return softened(*primals, cap), _derivative(_of_soft_cap, *primals, *tangents)


@by_platform
def largest_singular_value(real: Any, w: jax.Array, bound: jax.Array, proven: jax.Array) -> jax.Array:
    """Estimate it from below by 32 power iterations; at most `bound` if proven inside, else above it."""
    estimate = _largest(real, w)
    above = jnp.maximum(estimate, bound * (1 + 2.0**-24))
    inside = jnp.where(proven, jnp.minimum(estimate, bound), above)
    return jnp.where(jnp.isnan(estimate), estimate, inside)


@by_platform
def about_largest_singular_value(real: Any, w: jax.Array) -> jax.Array:
    """Estimate the largest singular value from below, by 32 power iterations."""
    return _largest(real, w)


def _largest(real: Any, w: jax.Array) -> jax.Array:
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
    return jnp.where(finite, estimate, jnp.nan)
