"""A norm and a bound become a factor, and the factor meets the entries."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core import bounds, norms, trees, units
from clipjax._core.aliases import Metrics, Scalar, Tree


def margin(dtype: Any) -> float:
    """Return the share by which a factor is made smaller.

    It is more than the rounding of norms and products adds. In 16 bits each entry is
    rounded once more, by at most half an ulp.
    """
    info = jnp.finfo(dtype)
    of_norms = 2.0**-48 if norms.sum_dtype(dtype) == np.float64 else 2.0**-20
    return of_norms + (float(info.eps) / 2 if info.bits < 32 else 0)


def least_inside(bound: Any, dtype: Any) -> Any:
    """Return the norm from which on a unit may have been clipped or brought to a bound.

    Such a unit ends a margin or two below it.
    """
    return bound * (1 - 4 * margin(dtype))


@functools.partial(jax.jit, static_argnames="dtype")
def factor_to(bound: Any, norm: jax.Array, dtype: Any = None) -> jax.Array:
    """Return 1 inside the bound, else bound / norm, less the margin of a dtype."""
    bound = jnp.asarray(bound, norm.dtype)
    target = bound * (1 - margin(norm.dtype if dtype is None else dtype))
    return quotient_or_1(norm <= bound, target, norm)


def quotient_or_1(inside: jax.Array, target: jax.Array, norm: jax.Array) -> jax.Array:
    """Return 1 inside, else target / norm; NaN for a norm that is not finite.

    The division comes last: XLA computes a division once, but what follows it once for
    each entry that reads it, which would triple the time it takes to compile hundreds
    of leaves (JAX 0.10).
    """
    inside &= norm < jnp.inf
    return jnp.where(inside, 1, target + 0 * norm) / jnp.where(inside, 1, norm)


@jax.jit
def factor_onto(wanted: jax.Array, norm: jax.Array, rate: Any = 1) -> jax.Array:
    """Return what takes a norm `rate` of the way to another; 1 where one of them is 0.

    It has no margin, by which a norm that is kept would shrink at every step, and no
    band in which it is 1: a tangential step of rate r grows a norm by r² / 2, which
    would stay in it.
    """
    wanted = jnp.asarray(wanted, norm.dtype)
    rate = jnp.minimum(jnp.asarray(rate, norm.dtype), 1)
    there = (norm == wanted) | (norm == 0) | (wanted == 0)
    # An infinite norm becomes NaN.
    there &= wanted < jnp.inf
    return quotient_or_1(there, rate * (wanted + 0 * wanted) + (1 - rate) * norm, norm)


@jax.jit
def rescale(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Return x * factor, rounded once: the one product of all clips and projections.

    Where the factor is 1 that is x, bit for bit; XLA on a CPU would flush subnormal
    numbers in the product.
    """
    real = factor.astype(norms.sum_dtype(x.dtype))
    if jnp.iscomplexobj(x):
        scaled = lax.complex(x.real * real, x.imag * real)
    else:
        scaled = (x.astype(real.dtype) * real).astype(x.dtype)
    return weak_like(x, jnp.where(factor == 1, x, scaled))


def weak_like(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return y with the weak type of x, as of Python scalars, which products lose."""
    return x.at[...].set(y) if x.weak_type else y


def clip_tree(
    tree: Tree, bound: Any, ord: float = 2, norm: Scalar | None = None
) -> tuple[Tree, Metrics]:
    """Clip the norm of all leaves together: one factor multiplies every leaf."""
    leaves, rebuild = trees.leaves_of(tree)
    values = [leaf.value for leaf in leaves]
    floats = [x for x in values if trees.is_float(x)]
    norm = norms.tree_norm(floats, ord) if norm is None else norm
    # In the order of the tree, as in every process.
    dtypes = dict.fromkeys(x.dtype for x in floats)
    factors = {dtype: factor_to(bound, norm, dtype) for dtype in dtypes}
    clipped = [rescale(x, factors[x.dtype]) if trees.is_float(x) else x for x in values]
    return rebuild(clipped), metrics_of(norm, factor_to(bound, norm))


def clip_units(
    tree: Tree,
    found: Sequence[units.LeafUnits],
    unit_norms: Sequence[jax.Array],
    bound: Any,
    name: str = "max_norm",
) -> tuple[Tree, Metrics]:
    """Clip the norms of units, `unit_norms` for those `found` in a tree, to a bound.

    Where the bound is one number, the largest norm decides the metrics, so that they
    cost one reduction a leaf.
    """
    factors = []
    for each, norm in zip(found, unit_norms, strict=True):
        fitted = bounds.fit_bound(name, bound, norm, each.leaf)
        factors.append(factor_to(fitted, norm, each.leaf.value.dtype))
    clipped = rescaled(tree, found, factors)
    largest = norms.largest(unit_norms)
    if jnp.ndim(bound) == 0:
        return clipped, metrics_of(largest, factor_to(bound, largest))
    pairs = zip(unit_norms, factors, strict=True)
    after = norms.largest(norm * factor for norm, factor in pairs)
    return clipped, metrics_of(largest, smallest_scale(factors), after)


def rescaled(tree: Tree, found: Sequence[Any], factors: Sequence[jax.Array]) -> Tree:
    """Return a tree whose leaves, at the `place` of those found, met factors."""
    values = jax.tree.leaves(tree)
    for each, factor in zip(found, factors, strict=True):
        values[each.place] = rescale(each.leaf.value, factor)
    return jax.tree.unflatten(jax.tree.structure(tree), values)


def metrics_of(norm: Scalar, scale: Scalar, after: Scalar | None = None) -> Metrics:
    """Return the metrics of a clip from the norm before it and its factor.

    `after` is the norm after it, if that is not their product.
    """
    after = norm * scale if after is None else norms.nan_unless(norm < jnp.inf, after)
    return {"norm": norm, "norm_after": after, "scale": scale, "clipped": scale < 1}


def smallest_scale(scales: Sequence[jax.Array]) -> Scalar:
    """Return the smallest of scales from 0 to 1; NaN if one is NaN."""
    least = norms.smallest(scales, empty=1)
    return norms.nan_unless(least > -jnp.inf, least)
