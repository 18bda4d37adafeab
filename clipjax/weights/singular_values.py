"""Matrices whose singular values are capped, by matrix products, which TPUs compile and meshes keep split."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core import norms

_RATIO = 2.5  # by which one pass divides the largest singular value at most


@functools.partial(jax.jit, static_argnames="rounding")
def cap(w: jax.Array, bound: jax.Array, rounding: float) -> jax.Array:
    """Cap the singular values of matrices; in 16 bits, where some are above, the share `rounding` below the bound."""
    return _cap(w, bound, rounding)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _cap(w: jax.Array, bound: jax.Array, rounding: float) -> jax.Array:
    """Cap them by passes.

    WᴴW in floating point knows only of singular values near the largest, so one pass
    divides that by at most 2.5.
    """
    finite, positive = (
        jnp.all(jnp.isfinite(w), axis=(-2, -1)),
        bound >= jnp.finfo(bound.dtype).tiny,
    )
    blocks = _blocks(jnp.where(_of_each(finite, w), w, 0))
    most = _at_least_norm(blocks)
    finite &= (most < jnp.inf) & ~jnp.isnan(bound)

    def target(changed: jax.Array) -> jax.Array:
        return jnp.where(changed, bound * (1 - rounding), bound)

    def todo(level: jax.Array, changed: jax.Array) -> jax.Array:
        return finite & positive & (level > target(changed))

    def one_pass(carry: Any) -> Any:
        w, level, changed = carry
        now = todo(level, changed)
        goal = jnp.where(now, jnp.maximum(level / _RATIO, target(changed)), 1)
        gram = _gram(jnp.where(_of_each(now, w), w / _of_each(goal, w), 0))
        root, above = _inverse_root(gram, jnp.where(now, level, 1) / goal)
        capped = lax.map(lambda rows: _product(rows, root), w)
        return (
            jnp.where(_of_each(above, w), capped, w),
            jnp.where(now, goal, level),
            changed | above,
        )

    carry = blocks, most, jnp.zeros_like(finite)
    capped, *_ = lax.while_loop(
        lambda carry: jnp.any(todo(*carry[1:])), one_pass, carry
    )
    joined = jnp.moveaxis(capped, 0, -2).reshape(*w.shape[:-2], -1, w.shape[-1])[
        ..., : w.shape[-2], :
    ]
    return norms.nan_unless(
        _of_each(finite, w), jnp.where(_of_each(positive, w), joined, 0)
    )


def _at_least_norm(w: jax.Array) -> jax.Array:
    """Return a number from the largest singular value to n^(1/16) times it: by the Frobenius norm of (WᴴW)⁴."""
    entry = jnp.max(jnp.abs(w), axis=(0, -2, -1))
    gram = _gram(w / _of_each(jnp.where(entry > 0, entry, 1), w))
    trace = jnp.where(entry > 0, jnp.trace(gram, axis1=-2, axis2=-1).real, 1)
    power, _ = lax.scan(
        lambda x, _: (_product(x, x), None),
        gram / _of_each(trace, gram),
        None,
        length=2,
    )
    return (
        (1 + 1e-5)
        * entry
        * jnp.sqrt(trace)
        * jnp.sum(jnp.square(jnp.abs(power)), axis=(-2, -1)) ** (1 / 16)
    )


def _inverse_root(gram: jax.Array, most: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return max(G / limit², I)^(-1/2), for a limit just below 1, and whether a singular value is above 1.

    What is above is told by the sign of G - I. Eigenvalues that are too near to 1 for
    that end between both sides. `most`, up to 2.5, is that of singular values.
    """
    room, one = _room(gram.dtype), jnp.eye(gram.shape[-1], dtype=gram.dtype)

    def toward_sign(x: jax.Array, c: jax.Array) -> tuple[jax.Array, None]:
        return c[0] * x + c[1] * _product(x, _product(x, x)), None

    start = (gram - (1 - room / 8) ** 2 * one) / _of_each(
        jnp.maximum(most * most - 1, 1), gram
    )
    sign, _ = lax.scan(toward_sign, start, _steps_to_1(room, gram.dtype))
    above = jnp.sum(1 + jnp.diagonal(sign, axis1=-2, axis2=-1).real, axis=-1) >= 1

    half = _product(gram / (1 - room) ** 2 - one, one + sign) / 4
    outer = one + half + _adjoint(half)

    def toward_root(z: jax.Array, c: jax.Array) -> tuple[jax.Array, None]:
        return c[0] * z + c[1] * _product(z, _product(outer, _product(z, z))), None

    first, *others = _steps_to_1(1 / _RATIO, gram.dtype)
    root, _ = lax.scan(
        toward_root,
        first[0] / _RATIO * one + first[1] / _RATIO**3 * outer,
        jnp.stack(others),
    )
    return root, above


def _steps_to_1(low: float, dtype: Any) -> jax.Array:
    """Return rows (a, b) of cubics a x + b x³ that take [low, 1] to 1, one after the other.

    Each is nearest to 1 on the interval that the one before left: as far below at its
    ends as above at the maximum. The interval is up to 2% larger, so that roundings do
    not diverge.
    """
    high, steps = 1.0, []
    while 1 - low > _room(dtype) / 16:
        top = high + 0.02 * (1 - low)
        total, ends = low**2 + low * top + top**2, low * top * (low + top)
        b = 2 / (2 * (total / 3) ** 1.5 + ends)
        steps.append((b * total, -b))
        low, high = b * ends, 2 - b * ends
    return jnp.asarray(steps, dtype)


def _room(dtype: Any) -> float:
    """Return how far below the bound singular values end, as a share of it: more than roundings add."""
    return 2.0**-44 if norms.sum_dtype(dtype) == np.float64 else 2.0**-16


def _blocks(w: jax.Array) -> jax.Array:
    """Return matrices as (blocks, *stack, rows, n), with at most n rows, or 16 blocks.

    Where a mesh splits the short side, XLA gathers what it multiplies: so only one
    block at a time.
    """
    *stack, rows, n = w.shape
    count = min(-(-rows // n), 16)
    padded = jnp.pad(w, [(0, 0)] * len(stack) + [(0, -rows % count), (0, 0)])
    return jnp.moveaxis(padded.reshape(*stack, -1, count, n), -2, 0)


def _gram(w: jax.Array) -> jax.Array:
    """Return WᴴW of matrices in blocks."""
    zeros = jnp.zeros((*w.shape[1:-2], w.shape[-1], w.shape[-1]), w.dtype)
    return lax.scan(
        lambda total, rows: (total + _product(_adjoint(rows), rows), None), zeros, w
    )[0]


def _of_each(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return what there is one of for each matrix so that it broadcasts to their entries."""
    shape = (*(1,) * (w.ndim - x.ndim - 2), *x.shape, 1, 1)
    return x.reshape(shape).astype(x.dtype if x.dtype == bool else w.dtype)


@_cap.defjvp
def _cap_jvp(
    rounding: float, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    """Differentiate U f(S) Vᴴ by divided differences of f, which are finite where singular values are equal.

    In the bases U and V the Hermitian part of dw is multiplied by (f(s) - f(t)) / (s -
    t), the other part by (f(s) + f(t)) / (s + t), and what is outside the span of U by
    f(s) / s: Bhatia, 1997, Matrix analysis.
    """
    (w, bound), (dw, dbound) = primals, tangents
    result, share = cap(w, bound, rounding), 1 - _room(w.dtype) - rounding
    finite = jnp.all(jnp.isfinite(result), axis=(-2, -1), keepdims=True)
    outside = jnp.any(result != w, axis=(-2, -1), keepdims=True)
    u, s, vh = jnp.linalg.svd(jnp.where(finite, w, 0), full_matrices=False)
    limit = (bound * share)[..., None]
    new, above = jnp.minimum(s, limit), s > limit
    row, column = (lambda x: x[..., :, None]), (lambda x: x[..., None, :])
    same, total = row(above) == column(above), row(s) + column(s)
    slope = jnp.where(row(above), 0.0, 1.0)
    odd = jnp.where(
        same, slope, (row(new) - column(new)) / jnp.where(same, 1, row(s) - column(s))
    )
    even = jnp.where(total > 0, row(new) + column(new), 1) / jnp.where(
        total > 0, total, 1
    )
    ratio = jnp.where(s > 0, new, 1) / jnp.where(s > 0, s, 1)
    by_bound = jnp.where(above, share, 0.0) * dbound[..., None]
    odd, even, ratio, by_bound = (
        x.astype(u.dtype) for x in (odd, even, ratio, by_bound)
    )  # complex where w is

    uh, v = _adjoint(u), _adjoint(vh)
    inner = _product(_product(uh, dw), v)
    inside = odd * (inner + _adjoint(inner)) / 2 + even * (inner - _adjoint(inner)) / 2
    rest = _product(dw, v) - _product(u, inner)
    tangent = _product(
        _product(u, inside) + u * column(by_bound) + rest * column(ratio), vh
    )
    return result, norms.nan_unless(finite, jnp.where(outside, tangent, dw))


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the matrix product in full float32, which accelerators do not use by default."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(jnp.swapaxes(x, -1, -2))
