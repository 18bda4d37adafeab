"""Prove bounds on the largest singular value of a matrix, and shrink a matrix until it is inside.

All functions take one matrix; stacks go through `jax.vmap`. Loops are used instead of branches: under `vmap`
both sides of a `lax.cond` run, but a loop that no matrix needs makes no iteration.

Let X = W / bound, k its shorter and l its longer side, G = X Xᴴ (k, k), and d the `allowance`.

In float64: a Cholesky factorization of A = (1 - d) I - G that completes proves that no eigenvalue of A is
below -g tr(A), where g = (k + 1) u / (1 - 2 (k + 1) u) with u = 2**-53, in any order of summation (Rump,
2006). As the diagonal of A is positive, tr(A) <= k and |X|_F² <= k (1 + 2 l u); so the computed G differs
from the exact G by less than (l + 2) u k, and |X|² < 1 - d + (k + l + 4) u k; rounding X adds 2 u k. With d
twice this sum, |W| < bound, with room for complex arithmetic, and for the error of an SVD that measures |W|.

On a TPU: float64 is emulated, but in long products the digits are added in float32, so u = 2**-53 does not
hold. The proof uses integers instead. For any L, |X|² <= |X Xᵀ + L Lᵀ| <= 1 - d + |R| with
R = (1 - d) I - X Xᵀ - L Lᵀ. The float32 Cholesky factor of A makes R small. X and L are rounded to multiples
of 2**-30, and from there R is exact: products of 8 bits, sums of 32 and of 64 bits. |R| is at most its
largest row sum; if that is below d/2, |X| < 1 - d/4. The error of the division W / bound is at most four
units in the last place of float32, that of the rounding 2**-31: together 2**-21 sqrt(k) + 2**-31 sqrt(k l),
which is below d/4 = 2**-20 sqrt(k) up to l = 2**19. An inaccurate factorization can only prevent a proof; up
to k = 1024 the row sums were below d/16.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.dtypes import in_float64, wide

# On a TPU, a bound below this is treated as 0, because float32 underflow could hide relevant entries.
_SMALLEST_IN_FLOAT32 = 2.0**-80
_UNIT = 2**30  # the integers count multiples of 1 / _UNIT
_COLUMNS = 2**16  # the sum of this many products of two 8-bit integers is below 2**31


def by_platform(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give `function(*static, real, …)` the dtype to compute in: float32 on a TPU, else float64.

    The choice is made when the program is lowered. A TPU has neither an SVD nor reliable products in float64.
    """

    @in_float64
    @functools.partial(jax.jit, static_argnames="static")
    def call(*args: Any, static: tuple[Any, ...] = ()) -> Any:
        tpu, default = (functools.partial(function, *static, np.dtype(x)) for x in (np.float32, np.float64))
        return lax.platform_dependent(*args, tpu=tpu, default=default)

    return call


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the product, in the full precision of its dtype."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def gram(x: jax.Array) -> jax.Array:
    """Return the product of a matrix with its adjoint, of the size of the shorter side."""
    adjoint = jnp.conj(x.T)
    return matmul(x, adjoint) if x.shape[0] <= x.shape[1] else matmul(adjoint, x)


def identity(size: int, dtype: Any) -> jax.Array:
    """Return the identity matrix; with dtype bool, a mask of its diagonal."""
    # In int32, as JAX lowers loops and jitted functions in the user's mode, where int64 may be disabled.
    rows, columns = (lax.broadcasted_iota(np.int32, (size, size), axis) for axis in (0, 1))
    return lax.convert_element_type(rows == columns, dtype)


def to_width(x: jax.Array, real: Any) -> jax.Array:
    """Convert to a real dtype, or for complex x to the complex dtype of the same precision."""
    return lax.convert_element_type(x, np.result_type(real, np.complex64) if jnp.iscomplexobj(x) else real)


def limit_in(real: Any, bound: jax.Array) -> jax.Array:
    """Convert a bound to the dtype to compute in."""
    limit = lax.convert_element_type(bound, real)
    return limit if real == np.float64 else jnp.where(limit < _SMALLEST_IN_FLOAT32, 0.0, limit)


def allowance(shape: tuple[int, ...], real: Any) -> float:
    """Return by how much the square of a norm must be below 1 for a proof that the norm is below 1."""
    short, long = min(shape), max(shape)
    if real == np.float64:
        return 2 * (short + long + 8) * short * 2.0**-53
    return 2.0**-18 * math.sqrt(short)


def is_proven(real: Any, w: jax.Array, bound: jax.Array, spare: int = 1) -> jax.Array:
    """Return whether |w| <= bound is proven, with room for `spare` times the errors of the proof."""
    x = to_width(w, real) / limit_in(real, bound)
    if real == np.float64:
        proven = jnp.all(jnp.isfinite(_factor(x, spare * allowance(x.shape, real))))
    else:
        proven = _is_proven_in_integers(_as_real(x), spare)
    # With at most one nonzero entry in each row and column, the entries are the singular values, exactly.
    entries = w != 0
    alone = jnp.all(_count(entries, 0) <= 1) & jnp.all(_count(entries, 1) <= 1)
    sizes = wide(jnp.abs(w)) * (1 + 8 * float(jnp.finfo(w.dtype).eps) if jnp.iscomplexobj(w) else 1)
    return proven | (alone & jnp.all(sizes <= bound))


is_inside: Callable[..., jax.Array] = by_platform(is_proven)


def _factor(x: jax.Array, room: float) -> jax.Array:
    """Return the Cholesky factor of (1 - room) I - X Xᴴ, NaN if there is none."""
    g = gram(x)
    return lax.linalg.cholesky(identity(len(g), g.dtype) * (1 - room) - g, symmetrize_input=False)


def _is_proven_in_integers(x: jax.Array, spare: int) -> jax.Array:
    x = x if x.shape[0] <= x.shape[1] else x.T
    room = spare * allowance(x.shape, np.float32)
    rows = jnp.concatenate([x, _factor(x, room)], axis=1)
    fits = jnp.max(jnp.sum(rows * rows, axis=1)) < 2  # False for NaN; if True, sums fit into 64 bits
    whole = lax.convert_element_type(jnp.round(jnp.where(fits, rows, 0.0) * _UNIT), np.int32)
    one = np.int64(round((1 - room) * _UNIT**2))
    rest = jnp.where(identity(len(x), bool) & fits, one, np.int64(0))
    for start in range(0, whole.shape[1], _COLUMNS):
        rest = _without_gram(rest, whole[:, start : start + _COLUMNS])
    sums = jnp.sum(jnp.abs(lax.convert_element_type(rest, np.float32)), axis=0)
    return fits & (jnp.max(sums) <= room / 2 * _UNIT**2)


def _without_gram(rest: jax.Array, whole: jax.Array) -> jax.Array:
    """Subtract the product of an integer matrix with its transpose exactly, using digits in base 256."""
    digits = []
    for _ in range(3):
        digit = ((whole + 128) & 255) - 128
        digits.append(digit)
        whole = (whole - digit) >> 8
    stack = lax.convert_element_type(jnp.stack([*digits, whole]), np.int8)

    def subtract(i: jax.Array, rest: jax.Array) -> jax.Array:  # one product in a loop compiles fastest
        a, b = (lax.dynamic_index_in_dim(stack, place, keepdims=False) for place in (i // 4, i % 4))
        product = lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=np.int32)
        shift = lax.convert_element_type(8 * (i // 4 + i % 4), np.int64)
        return rest - (lax.convert_element_type(product, np.int64) << shift)

    return lax.fori_loop(np.int32(0), np.int32(16), subtract, rest)


def _as_real(x: jax.Array) -> jax.Array:
    """Return a real matrix with the singular values of x, each twice if x is complex."""
    return jnp.block([[x.real, -x.imag], [x.imag, x.real]]) if jnp.iscomplexobj(x) else x


def _count(entries: jax.Array, axis: int) -> jax.Array:
    return jnp.sum(entries, axis=axis, dtype=np.int32)


def first_inside(
    real: Any,
    need: jax.Array,
    make: Callable[[jax.Array], jax.Array],
    end: Callable[[jax.Array], jax.Array],
    otherwise: jax.Array,
    bound: jax.Array,
) -> jax.Array:
    """Return `make(s)` for the least s of 0, f, 2f, 4f, …, 1 for which `end(make(s))` is proven to be inside.

    `end(make(s))` must get smaller as s grows. f is a quarter of the eps of its dtype, or the allowance if
    that is larger. The loop stops at a matrix that is not finite. Without `need`, returns `otherwise`.
    """
    like = jax.eval_shape(end, otherwise)
    first = max(float(jnp.finfo(like.dtype).eps) / 4, allowance(like.shape, real))

    def attempt(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        s = state[1]
        made = make(s)
        matrix = end(made)
        again = ~is_proven(real, matrix, bound, 2) & jnp.all(jnp.isfinite(matrix)) & (s < 1)
        return again, jnp.where(s == 0, first, jnp.minimum(2 * s, 1.0)), made

    start = (need, jnp.zeros_like(lax.convert_element_type(bound, real)), otherwise)
    return lax.while_loop(lambda state: state[0], attempt, start)[2]
