"""The largest singular value of a matrix: proving a bound on it, and bringing it down to one.

Everything here takes one matrix and runs in float64; stacks of matrices go through `jax.vmap`. Loops
stand where branches are meant: under `vmap` both sides of a `lax.cond` run, but a loop that no matrix of
the stack needs takes no turn.

The proof of a bound. Let X = W / bound, k its shorter and l its longer side, G the computed X Xᴴ (k, k). A
Cholesky factorisation of A = (1 - d) I - G that runs to its end proves that no eigenvalue of A is below
-g tr(A), where g = (k + 1) u / (1 - 2 (k + 1) u) with u = 2**-53, in any order of summation (Rump, 2006).
As the diagonal of A is positive, tr(A) <= k and |X|_F² <= k (1 + 2 l u); so G differs from the exact product
by less than (l + 2) u k, and |X|² < 1 - d + (k + l + 4) u k; rounding X adds 2 u k. With d twice as large as
this sum, |W| < bound, with room for complex arithmetic, and for whoever measures |W| by an SVD.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.norms import in_float64, wide
from clipjax._core.rounding import rounded

Cap = Callable[[jax.Array, jax.Array], jax.Array]  # (matrix, bound) -> about the capped matrix, in float64

# How far below the bound the products aim, so that what they leave above their aim is inside.
AIM = 2.0**-11
# Singular values this many times the bound, by an upper bound on them, are left to the SVD: the Gram matrix
# loses the square of it in digits.
_FARTHEST = 1e4


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def gram(x: jax.Array) -> jax.Array:
    """The product of a matrix with its adjoint, on the shorter side."""
    adjoint = jnp.conj(x.T)
    return _matmul(x, adjoint) if x.shape[0] <= x.shape[1] else _matmul(adjoint, x)


def _on_diagonal(size: int) -> jax.Array:
    # In int32: JAX lowers loops and jitted functions in its own mode, where int64 is not to be had.
    rows, columns = (lax.broadcasted_iota(np.int32, (size, size), axis) for axis in (0, 1))
    return rows == columns


def _eye(size: int, dtype: Any) -> jax.Array:
    return lax.convert_element_type(_on_diagonal(size), dtype)


def _size(x: jax.Array) -> jax.Array:
    """The Frobenius norm."""
    return jnp.sqrt(jnp.sum(jnp.square(x.real) + (jnp.square(x.imag) if jnp.iscomplexobj(x) else 0)))


def allowance(shape: tuple[int, ...]) -> float:
    """By how much less than 1 the square of a norm has to be, to be proven less than 1."""
    short, long = min(shape), max(shape)
    # TPUs emulate float64 by pairs of float32.
    unit = 2.0**-44 if jax.default_backend() == "tpu" else 2.0**-53
    return 2 * (short + long + 8) * short * unit


@in_float64
@functools.partial(jax.jit, static_argnums=2)
def is_proven(w: jax.Array, bound: jax.Array, spare: int = 1) -> jax.Array:
    """Whether |w| <= bound is proven; with room for `spare` times the rounding errors of the proof."""
    x = wide(w) / bound
    eye = _eye(min(w.shape), x.dtype)
    factor = lax.linalg.cholesky(eye * (1 - spare * allowance(w.shape)) - gram(x), symmetrize_input=False)
    proven = jnp.all(jnp.isfinite(factor))
    # One entry in each row and column, as of the identity: they are the singular values, without rounding.
    entries = w != 0
    alone = jnp.all(_count(entries, 0) <= 1) & jnp.all(_count(entries, 1) <= 1)
    sizes = jnp.abs(wide(w)) * (1 + 2.0**-50 if jnp.iscomplexobj(w) else 1)
    return proven | (alone & jnp.all(sizes <= bound))


def _count(entries: jax.Array, axis: int) -> jax.Array:
    return jnp.sum(entries, axis=axis, dtype=np.int32)


@in_float64
def least_shrink(end: Callable[[jax.Array], jax.Array], bound: jax.Array, eps: float) -> jax.Array:
    """The least s of 0, eps/4, eps/2, …, 1 for which the matrix `end(s)`, smaller for a larger s, is inside.

    0 for what is not finite.
    """

    def is_wrong(s: jax.Array) -> jax.Array:
        matrix = end(s)
        return ~is_proven(matrix, bound, 2) & jnp.all(jnp.isfinite(matrix)) & (s < 1)

    def harder(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        s = jnp.where(state[0] == 0, eps / 4, jnp.minimum(2 * state[0], 1.0))
        return s, is_wrong(s)

    nothing = jnp.zeros_like(bound)
    return lax.while_loop(lambda state: state[1], harder, (nothing, is_wrong(nothing)))[0]


def narrowed(x: jax.Array, dtype: Any) -> jax.Array:
    """Round a float64 matrix to a leaf's dtype, once and to the nearest."""
    if jnp.iscomplexobj(x):
        parts = (narrowed(part, np.finfo(dtype).dtype) for part in (x.real, x.imag))
        return lax.complex(*parts)
    return lax.convert_element_type(rounded(x, dtype), dtype)


def where_needed(need: jax.Array, compute: Callable[[], jax.Array], otherwise: jax.Array) -> jax.Array:
    """`compute()` if it is needed, else `otherwise`."""
    return lax.while_loop(
        lambda state: state[0], lambda state: (state[0] & False, compute()), (need, otherwise)
    )[1]


def factors(w: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The thin singular value decomposition, of a matrix of any scale."""
    largest = jnp.max(jnp.abs(w))
    unit = jnp.where(largest > 0, largest, 1.0)
    u, s, vh = jnp.linalg.svd(w / unit, full_matrices=False)
    return u, s * lax.convert_element_type(unit, s.dtype), vh


def by_svd(w: jax.Array, bound: jax.Array) -> jax.Array:
    """Cap by U min(S, bound) Vᴴ."""
    u, s, vh = factors(w)
    return _matmul(u * jnp.minimum(s, bound)[None, :], vh)


def by_products(w: jax.Array, bound: jax.Array) -> jax.Array:
    """Cap by matrix products, at `bound` times 1 - AIM.

    With X = W / aim and G = X Xᴴ, the capped X is P^(-1/2) X, where P = max(G, I) = I + (G - I)(I + S) / 2
    and S is the sign of G - I: two Newton-Schulz iterations. Where an eigenvalue of G - I is so
    small that its sign has not converged, P is too small by an eighth of what is left open:
    by less than AIM.
    """
    aim = bound * (1 - AIM)
    x = w / aim
    g = gram(x)
    g2 = _matmul(g, g)
    # |G| <= |G⁴|_F^(1/4), which is at most k^(1/8) times too large.
    top = jnp.minimum(jnp.sqrt(jnp.sqrt(_size(_matmul(g2, g2)))), _size(x) ** 2) * (1 + 1e-9)
    near = top < _FARTHEST**2

    def capped() -> jax.Array:
        eye = _eye(len(g), g.dtype)
        width = jnp.maximum(top - 1, 1.0)
        sign = _sign((g - eye) / width, 4 * AIM / width)
        p = eye + _matmul(g - eye, eye + sign) / 2
        largest = jnp.minimum(top, 1 + _size(p - eye)) * (1 + AIM)
        root = _inverse_root(p / largest, 0.999 * lax.rsqrt(largest)) * lax.rsqrt(largest)
        return (_matmul(root, x) if x.shape[0] <= x.shape[1] else _matmul(x, root)) * aim

    found = where_needed(near, capped, jnp.zeros_like(w))
    return where_needed(~near, lambda: by_svd(w, bound), found)


def _newton_schulz(low: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step x -> x (a - b x²) on [low, 1], which it maps onto [new low, 1]: a, b and the new low.

    The scaled Newton-Schulz step of Chen and Chow, 2014: it never leaves [0, 1], and no sign flips.
    """
    square = 3 / (1 + low + low * low)
    a = 1.5 * jnp.sqrt(square)
    b = a * square / 3
    return a, b, low * (a - b * low * low)


_CONVERGED = 1e-9


def _sign(y: jax.Array, low: jax.Array) -> jax.Array:
    """The sign of a Hermitian matrix whose eigenvalues are in [-1, 1], converged for those beyond `low`."""

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y, low = state
        a, b, low = _newton_schulz(low)
        return a * y - b * _matmul(y, _matmul(y, y)), low

    return lax.while_loop(lambda state: 1 - state[1] > _CONVERGED, step, (y, low))[0]


def _inverse_root(p: jax.Array, low: jax.Array) -> jax.Array:
    """The inverse square root of a Hermitian matrix whose eigenvalues are in [low², 1]."""
    eye = _eye(len(p), p.dtype)

    def step(state: Any) -> Any:
        y, z, low = state
        a, b, low = _newton_schulz(low)
        t = a * eye - b * _matmul(z, y)
        return _matmul(y, t), _matmul(t, z), low

    return lax.while_loop(lambda state: 1 - state[2] > _CONVERGED, step, (p, eye, low))[1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
@in_float64
@functools.partial(jax.jit, static_argnums=2)
def capped(w: jax.Array, bound: jax.Array, cap: Cap) -> jax.Array:
    """Bring a matrix inside `bound`; one that is proven to be inside comes back bit for bit.

    NaN if anything in it is not finite.
    """
    finite = jnp.all(jnp.isfinite(w)) & ~jnp.isnan(bound)
    eps = float(jnp.finfo(w.dtype).eps)

    def project() -> jax.Array:
        about = cap(wide(w), bound)

        def end(s: jax.Array) -> jax.Array:
            return narrowed(about * (1 - s), w.dtype)

        return end(least_shrink(end, bound, eps))

    result = where_needed(finite & ~is_proven(w, bound), project, w)
    return jnp.where(finite, result, jnp.full_like(w, jnp.nan))


@capped.defjvp
def _capped_jvp(cap: Cap, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (w, bound), (dw, dbound) = primals, tangents
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
    odd, even, ratio = (lax.convert_element_type(x, dtype) for x in (odd, even, ratio))

    dw = lax.convert_element_type(dw, dtype)
    uh, v = jnp.conj(u.T), jnp.conj(vh.T)
    inner = _matmul(_matmul(uh, dw), v)
    mirrored = jnp.conj(inner.T)
    result = _matmul(_matmul(u, odd * (inner + mirrored) + even * (inner - mirrored)), vh) / 2
    if (
        w.shape[0] > w.shape[1]
    ):  # what leads out of the columns' span is scaled as the rows are, and vice versa
        result += _matmul(_matmul(dw - _matmul(u, _matmul(uh, dw)), v) * ratio, vh)
    elif w.shape[0] < w.shape[1]:
        result += _matmul(u * ratio, _matmul(uh, dw - _matmul(_matmul(dw, v), vh)))
    result += _matmul(u * lax.convert_element_type(outside, dtype)[None, :], vh) * lax.convert_element_type(
        dbound, dtype
    )
    result = jnp.where(finite, result, jnp.full_like(result, jnp.nan))
    return capped(w, bound, cap), lax.convert_element_type(result, w.dtype)


@in_float64
@jax.jit
def largest_singular_value(w: jax.Array, bound: jax.Array) -> jax.Array:
    """An estimate from below, by 32 power iterations, on the side of `bound` that is proven."""
    finite = jnp.all(jnp.isfinite(w))
    w = wide(w)
    unit = jnp.max(jnp.abs(w))
    unit = jnp.where((unit > 0) & finite, unit, 1.0)
    g = gram(jnp.where(finite, w / unit, 0.0))
    on_diagonal = _on_diagonal(len(g))
    diagonal = jnp.sum(jnp.where(on_diagonal, g.real, 0.0), axis=0)
    place = lax.broadcasted_iota(np.int32, diagonal.shape, 0)
    first = jnp.min(jnp.where(diagonal == jnp.max(diagonal), place, np.int32(len(g))))
    start = jnp.sum(jnp.where(place == first, g, 0.0), axis=1)  # the column of the longest row

    def turn(_: Any, v: jax.Array) -> jax.Array:
        v = _matmul(g, v)
        norm = _size(v)
        return v / jnp.where(norm > 0, norm, 1.0)

    v = lax.fori_loop(0, 32, turn, start)
    estimate = unit * jnp.sqrt(jnp.maximum(jnp.vdot(v, _matmul(g, v)).real, 0.0))
    above = jnp.maximum(estimate, bound * (1 + 2.0**-24))
    estimate = jnp.where(is_proven(w, bound), jnp.minimum(estimate, bound), above)
    return jnp.where(finite, estimate, jnp.nan)
