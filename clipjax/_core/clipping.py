"""A norm and a bound become a factor, and the factor meets the entries; limits of single entries."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core import bounds, norms, trees, units

Metrics = dict[str, jax.Array]


def margin(dtype: Any) -> float:
    """Return the share by which a factor is made smaller: more than the rounding of norms and products adds.

    In 16 bits each entry is rounded once more, by at most half an ulp.
    """
    info = jnp.finfo(dtype)
    of_norms = 2.0**-48 if norms.sum_dtype(dtype) == np.float64 else 2.0**-20
    return of_norms + (float(info.eps) / 2 if info.bits < 32 else 0)


@functools.partial(jax.jit, static_argnames="dtype")
def factor_to(bound: Any, norm: jax.Array, dtype: Any = None) -> jax.Array:
    """Return 1 inside the bound, else a little less than bound / norm, by the margin of a leaf's dtype."""
    bound = jnp.asarray(bound, norm.dtype)
    return quotient_or_1(
        norm <= bound,
        bound * (1 - margin(norm.dtype if dtype is None else dtype)),
        norm,
    )


def quotient_or_1(inside: jax.Array, target: jax.Array, norm: jax.Array) -> jax.Array:
    """Return 1 inside, else target / norm; NaN for a norm that is not finite.

    The division comes last: XLA computes a division once, but what follows it once for
    each entry that reads it, which would triple the time it takes to compile hundreds
    of leaves.
    """
    inside &= norm < jnp.inf
    return jnp.where(inside, 1, target + 0 * norm) / jnp.where(inside, 1, norm)


@jax.jit
def rescale(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Return x * factor, rounded once: the one product of all clips and projections of norms.

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
    """Return y with the weak type of x, which Python scalars have and products with arrays lose."""
    return x.at[...].set(y) if x.weak_type else y


def clip_tree(
    tree: Any, bound: Any, ord: float = 2, norm: jax.Array | None = None
) -> tuple[Any, Metrics]:
    """Clip the norm of all leaves together: every leaf is multiplied by the same factor."""
    leaves, rebuild = trees.leaves_of(tree)
    values = [leaf.value for leaf in leaves]
    floats = [x for x in values if trees.is_float(x)]
    norm = norms.tree_norm(floats, ord) if norm is None else norm
    factors = {
        dtype: factor_to(bound, norm, dtype)
        for dtype in dict.fromkeys(x.dtype for x in floats)
    }
    clipped = [rescale(x, factors[x.dtype]) if trees.is_float(x) else x for x in values]
    return rebuild(clipped), metrics_of(norm, factor_to(bound, norm))


def clip_units(
    tree: Any,
    found: Sequence[units.LeafUnits],
    sizes: Sequence[jax.Array],
    bound: Any,
    name: str = "max_norm",
) -> tuple[Any, Metrics]:
    """Clip the norms of units, `sizes` for those `found` in a tree, to a bound.

    Where the bound is one number, the largest norm decides the metrics, so that they
    cost one reduction a leaf.
    """
    factors = [
        factor_to(
            bounds.fit_bound(name, bound, size, each.leaf), size, each.leaf.value.dtype
        )
        for each, size in zip(found, sizes, strict=True)
    ]
    clipped, most = rescaled(tree, found, factors), norms.largest(sizes)
    if jnp.ndim(bound) == 0:
        return clipped, metrics_of(most, factor_to(bound, most))
    after = norms.largest(
        size * factor for size, factor in zip(sizes, factors, strict=True)
    )
    return clipped, metrics_of(most, smallest(factors), after)


def rescaled(tree: Any, found: Sequence[Any], factors: Sequence[jax.Array]) -> Any:
    """Return a tree whose leaves, at the `place` of those found, are multiplied by factors."""
    leaves, rebuild = trees.leaves_of(tree)
    values = [leaf.value for leaf in leaves]
    for each, factor in zip(found, factors, strict=True):
        values[each.place] = rescale(each.leaf.value, factor)
    return rebuild(values)


def clip_entries(leaf: trees.Leaf, low: Any, high: Any) -> jax.Array:
    """Clip each entry of a leaf of floats to `[low, high]`; `low=None` means -high. NaN stays NaN."""
    x = leaf.value
    if not trees.is_float(x):
        return x
    if jnp.iscomplexobj(x):
        if low is not None:
            raise TypeError(
                f"low, high: {leaf} is complex, of dtype {x.dtype}, and has no order; "
                "one bound, as in clip_by_value(1.0), clips |z|"
            )
        sizes = norms.norm(x, axes=())  # each entry is a unit
        return rescale(
            x, factor_to(bounds.fit_bound("bound", high, x, leaf), sizes, x.dtype)
        )
    top = _inward(
        bounds.fit_bound("bound" if low is None else "high", high, x, leaf),
        x.dtype,
        -np.inf,
    )
    bottom = (
        -top
        if low is None
        else _inward(bounds.fit_bound("low", low, x, leaf), x.dtype, np.inf)
    )
    return _between(x, bottom, top)


@jax.jit
def _between(x: jax.Array, low: Any, high: Any) -> jax.Array:
    """Return x clipped. XLA on a CPU flushes subnormal numbers in a maximum, but not in a choice."""
    return weak_like(x, jnp.where((low < x) & (x < high), x, jnp.clip(x, low, high)))


def _inward(limit: Any, dtype: Any, toward: float) -> Any:
    """Return a limit in a leaf's dtype, rounded `toward` -inf or inf, so that no entry is beyond what the user wrote.

    A limit that is known is compared in float64, since 0.1 is not a float32.
    """
    known = not isinstance(limit, jax.Array)
    xp, exact = (np, np.asarray(limit, np.float64)) if known else (jnp, limit)
    if np.isnan(
        np.asarray(np.inf).astype(dtype)
    ):  # 8 bits without an infinity, which would become NaN
        most = float(jnp.finfo(dtype).max)
        toward, exact = (
            np.copysign(most, toward),
            xp.clip(exact.astype(float), -most, most),
        )
    with np.errstate(over="ignore"):
        near = exact.astype(dtype)
    beyond = (
        near.astype(exact.dtype) > exact
        if toward < 0
        else near.astype(exact.dtype) < exact
    )
    return xp.where(
        beyond,
        (np.nextafter if known else _nextafter)(near, xp.asarray(toward, dtype)),
        near,
    )


@jax.custom_jvp
def _nextafter(x: jax.Array, toward: jax.Array) -> jax.Array:
    """Return the next number of a dtype, whose derivative is 1: JAX before 0.12 has none."""
    return jnp.nextafter(x, toward)


_nextafter.defjvps(lambda tangent, *_: tangent, None)


def metrics_of(
    norm: jax.Array, scale: jax.Array, after: jax.Array | None = None
) -> Metrics:
    """Return the metrics of a clip from the norm before and the factor; after it, if that is not their product."""
    after = norm * scale if after is None else norms.nan_unless(norm < jnp.inf, after)
    return {"norm": norm, "norm_after": after, "scale": scale, "clipped": scale < 1}


def smallest(factors: list[jax.Array]) -> jax.Array:
    """Return the smallest of factors from 0 to 1; NaN if one is NaN."""
    least = -norms.largest([-factor for factor in factors], empty=-1)
    return norms.nan_unless(least > -jnp.inf, least)
