"""The factor that brings a norm to a threshold, and its product with the leaf."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.aliases import DType, Metrics, Scalar
from clipjax._core.leaves import Leaves, is_inexact
from clipjax._core.norms import (
    largest,
    nan_unless,
    smallest,
    split_as,
    sum_dtype,
    tree_norm,
)
from clipjax._core.units import map_units, present


def clip(
    leaves: Leaves, of: Sequence[Any], bounds: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Clip the norms `of` leaves to thresholds; None stands for a leaf without a norm.

    Leaves that share a norm have the same array in `of` and the same threshold, so that
    leaves of one dtype have one factor.

    Returns:
      The new values, and the factor of each leaf.
    """
    made: dict[Any, jax.Array] = {}

    def factor(norm: jax.Array, bound: Any, x: jax.Array) -> jax.Array:
        key = id(norm), x.dtype
        if key not in made:
            made[key] = factor_to(bound, norm, x.dtype)
        return made[key]

    factors = map_units(factor, of, bounds, leaves.values)
    return rescaled(leaves.values, factors), factors


def clip_by_tree_norm(
    leaves: Leaves, bound: Any, ord: float = 2, norm: Scalar | None = None
) -> tuple[list[Any], Metrics]:
    """Clip the norm of all leaves together: one factor for the leaves of each dtype."""
    norm = tree_norm(leaves.inexact, ord) if norm is None else norm
    shared = [norm if is_inexact(x) else None for x in leaves.values]
    values, _ = clip(leaves, shared, [bound] * len(shared))
    return values, metrics_of(norm, factor_to(bound, norm))


def clip_by_unit_norms(
    leaves: Leaves,
    of: Sequence[Any],
    bound: Any,
    fit: Callable[[Any, jax.Array, Any], Any],
) -> tuple[list[Any], Metrics]:
    """Clip the norms of units, one entry a leaf, to a threshold that all leaves share.

    If the threshold is one number, the largest norm decides the metrics, so that they
    cost one reduction a leaf.
    """
    fitted = map_units(lambda norm, leaf: fit(bound, norm, leaf), of, leaves.each)
    values, factors = clip(leaves, of, fitted)
    most = largest(present(of))
    if jnp.ndim(bound) == 0:
        return values, metrics_of(most, factor_to(bound, most))
    after = largest(present(map_units(jnp.multiply, of, factors)))
    return values, metrics_of(most, smallest_scale(present(factors)), after)


def margin(dtype: DType) -> float:
    """Return the fraction by which a factor is made smaller.

    It is larger than the error that the rounding of norms and products adds. In 16 bits
    each element is rounded once more, by at most half an ulp.
    """
    of_norms = 2.0**-48 if sum_dtype(dtype) == np.float64 else 2.0**-20
    return of_norms + rounding(dtype)


def rounding(dtype: DType) -> float:
    """Return how much the last cast changes an element of 16 bits, 0 for more bits."""
    info = jnp.finfo(dtype)
    return float(info.eps) / 2 if info.bits < 32 else 0.0


def least_inside(bound: Any, dtype: DType) -> Any:
    """Return the smallest norm of a unit that was brought to a bound before.

    Such a unit ends a margin or two below the bound.
    """
    return bound * (1 - 4 * margin(dtype))


@functools.partial(jax.jit, static_argnames="dtype")
def factor_to(bound: Any, norm: jax.Array, dtype: DType = None) -> jax.Array:
    """Return 1 within the bound, else bound / norm, less the margin of a dtype."""
    bound = jnp.asarray(bound, norm.dtype)
    target = bound * (1 - margin(norm.dtype if dtype is None else dtype))
    return quotient_or_1(norm <= bound, target, norm)


def quotient_or_1(inside: jax.Array, target: jax.Array, norm: jax.Array) -> jax.Array:
    """Return 1 where `inside`, else target / norm; NaN for a norm that is not finite.

    The division comes last, since XLA computes a division once, but computes what
    follows it once for each element that reads it. That would triple the time to
    compile hundreds of leaves (JAX 0.10).
    """
    inside &= norm < jnp.inf
    return jnp.where(inside, 1, target + 0 * norm) / jnp.where(inside, 1, norm)


@jax.jit
def factor_onto(wanted: jax.Array, norm: jax.Array, rate: Any = 1) -> jax.Array:
    """Return what takes a norm `rate` of the way to `wanted`; 1 where one of them is 0.

    It has no margin, which would shrink a norm that is kept at every step. It has no
    band around `wanted` in which it is 1 either: a tangential step of a fraction r of
    the norm lets the norm grow by r² / 2, which would stay within such a band.

    Near 1, it is 1 plus a small quotient, since the division of a GPU has a bias: with
    quotients near 1, kept norms grow by 0.3% over 100,000 steps (H200, JAX 0.11).
    """
    wanted = jnp.asarray(wanted, norm.dtype)
    rate = jnp.minimum(jnp.asarray(rate, norm.dtype), 1)
    there = (norm == 0) | (wanted == 0)
    # What is not finite is not `there`, so that the factor becomes NaN.
    there &= jnp.maximum(wanted, norm) < jnp.inf
    change = rate * (wanted - norm)
    is_near = there | (jnp.abs(change) <= norm / 2)
    target = rate * (wanted + 0 * wanted) + (1 - rate) * norm
    part = jnp.where(is_near, change, target) + 0 * norm
    quotient = jnp.where(there, 0, part) / jnp.where(there, 1, norm)
    return jnp.where(is_near, 1 + quotient, quotient)


@jax.custom_jvp
@jax.jit
def rescale(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Return x * factor, rounded once: the product of all clips and projections.

    Where the factor is 1, the result is x, bit for bit: in a product, XLA on a CPU
    would make subnormal numbers 0. The derivative is that of the product there, too,
    since the factor of a kept norm may be 1 at one point only.
    """
    factor = split_as(factor, x)
    return weak_like(x, jnp.where(factor == 1, x, _product(x, factor)))


@rescale.defjvp
def _rescale_jvp(primals: Any, tangents: Any) -> Any:
    return rescale(*primals), jax.jvp(_product, primals, tangents)[1]


def _product(x: jax.Array, factor: jax.Array) -> jax.Array:
    real = factor.astype(sum_dtype(x.dtype))
    if jnp.iscomplexobj(x):
        return lax.complex(x.real * real, x.imag * real)
    return (x.astype(real.dtype) * real).astype(x.dtype)


def rescaled(values: Sequence[Any], factors: Sequence[Any]) -> list[Any]:
    """Return leaves times their factors; a leaf whose factor is None stays as it is."""
    pairs = zip(values, factors, strict=True)
    return [x if factor is None else rescale(x, factor) for x, factor in pairs]


def weak_like(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return y with the weak type of x, as of Python scalars; products lose it."""
    return x.at[...].set(y) if x.weak_type else y


def metrics_of(norm: Scalar, scale: Scalar, after: Scalar | None = None) -> Metrics:
    """Return the metrics of a clip from the norm before it and its factor.

    `after` is the norm after the clip, if that is not the product of the two.
    """
    metrics = {"norm": norm, "scale": scale, "clipped": scale < 1}
    if after is not None:
        metrics["norm_after"] = nan_unless(norm < jnp.inf, after)
    return metrics


def smallest_scale(scales: Sequence[jax.Array]) -> Scalar:
    """Return the smallest of factors from 0 to 1; NaN if a factor is NaN."""
    least = smallest(scales, empty=1)
    return nan_unless(least > -jnp.inf, least)
