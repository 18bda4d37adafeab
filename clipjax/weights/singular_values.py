"""Matrices whose singular values are capped, by matrix products.

A TPU compiles products in a minute, and a mesh keeps them split.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core import norms
from clipjax._core.aliases import DType

_RATIO = 2.5  # by which one pass divides the largest singular value at most


@functools.partial(jax.jit, static_argnames="rounding")
def cap(w: jax.Array, bound: jax.Array, rounding: float) -> jax.Array:
    """Return matrices whose singular values are capped at a bound.

    A matrix with singular values above the bound ends the fraction `rounding` below it.
    """
    return _cap(w, bound, rounding)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _cap(w: jax.Array, bound: jax.Array, rounding: float) -> jax.Array:
    """Cap singular values in several passes.

    In floating point WᴴW has only information about singular values near the largest
    one, so a pass divides the largest by at most 2.5.
    """
    positive = bound >= float(jnp.finfo(bound.dtype).tiny)
    finite = jnp.all(jnp.isfinite(w), axis=(-2, -1))
    blocks = _blocks(jnp.where(_of_each(finite, w), w, 0))
    most = _at_least_norm(blocks)
    finite &= (most < jnp.inf) & ~jnp.isnan(bound)

    def target(changed: jax.Array) -> jax.Array:
        return jnp.where(changed, bound * (1 - rounding), bound)

    def todo(level: jax.Array, changed: jax.Array) -> jax.Array:
        return finite & positive & (level > target(changed))

    def any_todo(carry: Any) -> jax.Array:
        return jnp.any(todo(*carry[1:]))

    def one_pass(carry: Any) -> Any:
        w, level, changed = carry
        now = todo(level, changed)
        goal = jnp.where(now, jnp.maximum(level / _RATIO, target(changed)), 1)
        gram = _gram(jnp.where(_of_each(now, w), w / _of_each(goal, w), 0))
        root, above = _inverse_root(gram, jnp.where(now, level, 1) / goal)
        capped = lax.map(lambda rows: _product(rows, root), w)
        w = jnp.where(_of_each(above, w), capped, w)
        return w, jnp.where(now, goal, level), changed | above

    carry = blocks, most, jnp.zeros_like(finite)
    capped, *_ = lax.while_loop(any_todo, one_pass, carry)
    padded = jnp.moveaxis(capped, 0, -2).reshape(*w.shape[:-2], -1, w.shape[-1])
    joined = padded[..., : w.shape[-2], :]
    wanted = jnp.where(_of_each(positive, w), joined, 0)
    return norms.nan_unless(_of_each(finite, w), wanted)


def _at_least_norm(w: jax.Array) -> jax.Array:
    """Return a number from the largest singular value to n^(1/16) times it.

    It is computed from the Frobenius norm of (WᴴW)⁴.
    """
    entry = jnp.max(jnp.abs(w), axis=(0, -2, -1))
    gram = _gram(w / _of_each(jnp.where(entry > 0, entry, 1), w))
    trace = jnp.where(entry > 0, jnp.trace(gram, axis1=-2, axis2=-1).real, 1)
    start = gram / _of_each(trace, gram)
    power, _ = lax.scan(lambda x, _: (_product(x, x), None), start, None, length=2)
    squares = jnp.sum(jnp.square(jnp.abs(power)), axis=(-2, -1))
    return (1 + 1e-5) * entry * jnp.sqrt(trace) * squares ** (1 / 16)


def _inverse_root(gram: jax.Array, most: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return max(G / limit², I)^(-1/2), and whether a singular value is above 1.

    The limit is just below 1. The sign of G - I tells which eigenvalues are above.
    Eigenvalues that are too near to 1 for a sign end between both sides. `most`, up to
    2.5, is the largest singular value.
    """
    room = _room(gram.dtype)
    one = lax.broadcast_to_rank(jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.ndim)

    def toward_sign(x: jax.Array, c: jax.Array) -> tuple[jax.Array, None]:
        return c[0] * x + c[1] * _product(x, _product(x, x)), None

    widest = jnp.maximum(most * most - 1, 1)
    start = (gram - (1 - room / 8) ** 2 * one) / _of_each(widest, gram)
    sign, _ = lax.scan(toward_sign, start, _steps_to_1(room, gram.dtype))
    above = jnp.sum(1 + jnp.diagonal(sign, axis1=-2, axis2=-1).real, axis=-1) >= 1

    half = _product(gram / (1 - room) ** 2 - one, one + sign) / 4
    outer = one + half + _adjoint(half)

    def toward_root(z: jax.Array, c: jax.Array) -> tuple[jax.Array, None]:
        return c[0] * z + c[1] * _product(z, _product(outer, _product(z, z))), None

    first, *others = _steps_to_1(1 / _RATIO, gram.dtype)
    start = first[0] / _RATIO * one + first[1] / _RATIO**3 * outer
    root, _ = lax.scan(toward_root, start, jnp.stack(others))
    return root, above


def _steps_to_1(low: float, dtype: DType) -> jax.Array:
    """Return rows (a, b) of cubics a x + b x³ that together take [low, 1] to 1.

    Each cubic is the nearest to 1 on the interval that the cubic before it left: as far
    below 1 at the ends of the interval as above 1 at its maximum. The interval is made
    up to 2% larger, so that roundings do not diverge.
    """
    high = 1.0
    steps = []
    while 1 - low > _room(dtype) / 16:
        top = high + 0.02 * (1 - low)
        total = low**2 + low * top + top**2
        ends = low * top * (low + top)
        b = 2 / (2 * (total / 3) ** 1.5 + ends)
        steps.append((b * total, -b))
        low = b * ends
        high = 2 - low
    return jnp.asarray(steps, dtype)


def _room(dtype: DType) -> float:
    """Return the fraction of the bound by which values end below it."""
    return 2.0**-44 if norms.sum_dtype(dtype) == np.float64 else 2.0**-16


def _blocks(w: jax.Array) -> jax.Array:
    """Return matrices as (blocks, *stack, rows, n), with at most n rows, or 16 blocks.

    Where a mesh splits the short side, XLA gathers the blocks that it multiplies, so
    that only one block is gathered at a time.
    """
    *stack, rows, n = w.shape
    count = min(-(-rows // n), 16)
    padded = jnp.pad(w, [(0, 0)] * len(stack) + [(0, -rows % count), (0, 0)])
    return jnp.moveaxis(padded.reshape(*stack, -1, count, n), -2, 0)


def _gram(w: jax.Array) -> jax.Array:
    """Return WᴴW of matrices in blocks."""
    zeros = jnp.zeros((*w.shape[1:-2], w.shape[-1], w.shape[-1]), w.dtype)

    def add(total: jax.Array, rows: jax.Array) -> tuple[jax.Array, None]:
        return total + _product(_adjoint(rows), rows), None

    return lax.scan(add, zeros, w)[0]


def _of_each(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return one number for each matrix, in a shape that broadcasts to its elements."""
    shape = (*(1,) * (w.ndim - x.ndim - 2), *x.shape, 1, 1)
    return x.reshape(shape).astype(x.dtype if x.dtype == bool else w.dtype)


@_cap.defjvp
def _cap_jvp(
    rounding: float, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    """Differentiate U f(S) Vᴴ by divided differences of f.

    In the bases U and V the Hermitian part of dw is multiplied by (f(s) - f(t)) / (s -
    t), the other part by (f(s) + f(t)) / (s + t), and the part outside the span of U by
    f(s) / s: Bhatia, 1997, Matrix analysis. These quotients are finite where singular
    values are equal.
    """
    w, bound = primals
    dw, dbound = tangents
    result = cap(w, bound, rounding)
    share = 1 - _room(w.dtype) - rounding
    finite = jnp.all(jnp.isfinite(result), axis=(-2, -1), keepdims=True)
    outside = jnp.any(result != w, axis=(-2, -1), keepdims=True)
    u, s, vh = jnp.linalg.svd(jnp.where(finite, w, 0), full_matrices=False)
    limit = (bound * share)[..., None]
    new = jnp.minimum(s, limit)
    above = s > limit

    def pairs(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x[..., :, None], x[..., None, :]

    row_above, column_above = pairs(above)
    (row, column), (new_row, new_column) = pairs(s), pairs(new)
    same = row_above == column_above
    slope = jnp.where(row_above, 0.0, 1.0)
    difference = jnp.where(same, 1, row - column)
    odd = jnp.where(same, slope, (new_row - new_column) / difference)
    total = row + column
    even = _quotient(new_row + new_column, total)
    ratio = _quotient(new, s)
    by_bound = jnp.where(above, share, 0.0) * dbound[..., None]

    uh = _adjoint(u)
    v = _adjoint(vh)
    inner = _product(_product(uh, dw), v)
    symmetric = (inner + _adjoint(inner)) / 2
    inside = odd * symmetric + even * (inner - symmetric)
    rest = _product(dw, v) - _product(u, inner)
    columns = u * by_bound[..., None, :] + rest * ratio[..., None, :]
    tangent = _product(_product(u, inside) + columns, vh)
    return result, norms.nan_unless(finite, jnp.where(outside, tangent, dw))


def _quotient(x: jax.Array, size: jax.Array) -> jax.Array:
    """Return x / size, or 1 where the size is 0."""
    return jnp.where(size > 0, x, 1) / jnp.where(size > 0, size, 1)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the matrix product in full float32, which TPUs do not use by default."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))
