"""Clips: a factor that brings a norm to a threshold, and bounds of single elements."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.aliases import DType, Metrics, Scalar, Tree
from clipjax._core.bounds import check_order, fit_bound
from clipjax._core.leaves import Leaf, Leaves, is_inexact, short_repr
from clipjax._core.norms import (
    largest,
    map_units,
    maximum,
    nan_unless,
    norm_of,
    present,
    smallest,
    split_as,
    sum_dtype,
    tree_norm,
)


def clip(
    leaves: Leaves, of: Sequence[Any], bounds: Sequence[Any], name: str = "max_norm"
) -> tuple[list[Any], list[Any]]:
    """Clip the norms `of` leaves to thresholds; None stands for a leaf without a norm.

    Leaves that share a norm have the same array in `of` and the same threshold, so that
    leaves of one dtype have one factor. Thresholds broadcast to the norms; errors call
    them `name`.

    Returns:
      The new values, and the factor of each leaf.
    """
    made: dict[Any, jax.Array] = {}

    def factor(norm: jax.Array, bound: Any, leaf: Leaf) -> jax.Array:
        key = id(norm), leaf.value.dtype
        if key not in made:
            fitting = fit_bound(name, bound, norm, leaf)
            made[key] = factor_to(fitting, norm, leaf.value.dtype)
        return made[key]

    factors = map_units(factor, of, bounds, leaves.each)
    return rescaled(leaves.values, factors), factors


def clip_by_tree_norm(
    leaves: Leaves, bound: Any, ord: float = 2, norm: Scalar | None = None
) -> tuple[Tree, Metrics]:
    """Clip the norm of all leaves together: one factor for the leaves of each dtype."""
    norm = tree_norm(leaves.inexact, ord) if norm is None else norm
    shared = [norm if is_inexact(x) else None for x in leaves.values]
    values, _ = clip(leaves, shared, [bound] * len(shared))
    return leaves.rebuild(values), metrics_of(norm, factor_to(bound, norm))


def clip_by_unit_norms(
    leaves: Leaves, of: Sequence[Any], bound: Any, name: str
) -> tuple[Tree, Metrics]:
    """Clip the norms of units, one entry a leaf, to a threshold that all leaves share.

    If the threshold is one number, the largest norm decides the metrics, so that they
    cost one reduction a leaf.
    """
    values, factors = clip(leaves, of, [bound] * len(of), name)
    clipped = leaves.rebuild(values)
    most = largest(present(of))
    if jnp.ndim(bound) == 0:
        return clipped, metrics_of(most, factor_to(bound, most))
    after = largest(present(map_units(jnp.multiply, of, factors)))
    return clipped, metrics_of(most, smallest_scale(present(factors)), after)


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


def check_limits(
    bound: Any, high: Any, low: Any, check: Callable[..., Any]
) -> tuple[Any, Any]:
    """Return `low` and `high`, as `check` returns each.

    `low` is None if one bound is for absolute values. Of `bound` and `high`, as in two
    positional arguments, `bound` is `low`.
    """
    given = {"bound": bound, "high": high, "low": low}
    if low is None and high is not None:
        bound, low = None, bound
    missing = [value is None for value in (bound, low, high)]
    if missing not in ([False, True, True], [True, False, False]):
        listed = [f"{key}={short_repr(x)}" for key, x in given.items() if x is not None]
        raise TypeError(
            "bound, low, high: pass one bound for absolute values, or low and high, "
            f"where infinity means none; got {', '.join(listed) or 'nothing'}"
        )
    if low is None:
        return None, check("bound", bound, "[0, inf]")
    both = check("low", low, "[-inf, inf]"), check("high", high, "[-inf, inf]")
    check_order(low, high)
    return both


def clip_entries(leaf: Leaf, low: Any, high: Any) -> jax.Array:
    """Clip each element of a leaf to `[low, high]`; NaN, and what has no norm, stays.

    `low=None` means -high.
    """
    x = leaf.value
    if not is_inexact(x):
        return x
    name = "bound" if low is None else "high"
    above = fit_bound(name, high, x, leaf)
    if jnp.iscomplexobj(x):
        if low is not None:
            raise TypeError(
                f"{leaf} is complex, of dtype {x.dtype}, and has no order, which a "
                "bound from below or above needs"
            )
        absolute = norm_of(x, axes=())  # each element is a unit
        return rescale(x, factor_to(above, absolute, x.dtype))
    top = inward(above, x.dtype, -np.inf)
    if low is None:
        return _between(x, -top, top)
    below = fit_bound("low", low, x, leaf)
    return _between(x, inward(below, x.dtype, np.inf), top)


@jax.jit
def _between(x: jax.Array, low: Any, high: Any) -> jax.Array:
    """Return x clipped to an interval; NaN stays, and a bound of NaN makes NaN."""
    low, high = (split_as(jnp.asarray(limit), x) for limit in (low, high))
    least = jnp.where(low > high, high, low)
    stays = ((least <= x) & (x <= high)) | jnp.isnan(x)
    clipped = jnp.where(stays, x, jnp.where(x < least, least, high))
    for limit in (low, high):
        clipped = jnp.where(jnp.isnan(limit), limit, clipped)
    return weak_like(x, clipped)


def inward(limit: Any, dtype: DType, toward: float) -> Any:
    """Return a bound in the dtype of a leaf, rounded `toward` -inf or inf.

    No element is then beyond what the user wrote. A bound that is known is compared in
    float64, since 0.1 is not a float32.
    """
    known = not isinstance(limit, jax.Array)
    xp: Any = np if known else jnp
    exact = np.asarray(limit, np.float64) if known else limit
    with np.errstate(over="ignore"):
        near = exact.astype(dtype)
    back = near.astype(exact.dtype)
    beyond = back > exact if toward < 0 else back < exact
    following = np.nextafter if known else _nextafter
    return xp.where(beyond, following(near, xp.asarray(toward, dtype)), near)


@jax.custom_jvp
def _nextafter(x: jax.Array, toward: jax.Array) -> jax.Array:
    """Return the next number, with a derivative of 1, which JAX has from 0.12 on."""
    return jnp.nextafter(x, toward)


_nextafter.defjvps(lambda tangent, *_: tangent, None)


def metrics_of_entries(
    before: Sequence[jax.Array], after: Sequence[jax.Array], low: Any, high: Any
) -> Metrics:
    """Return the metrics of clipped elements, whose norm is the largest absolute value.

    If the bounds are numbers, the largest and the smallest element decide the rest.
    """
    # A maximum over devices has no derivative.
    before, after = lax.stop_gradient((before, after))
    if np.ndim(high) or (low is not None and np.ndim(low)):
        norm = tree_norm(before, jnp.inf)
        norm_after = tree_norm(after, jnp.inf)
        pairs = zip(before, after, strict=True)
        changes = (jnp.any((x != y) & (x == x)) for x, y in pairs)
        clipped = largest(each.astype(np.float32) for each in changes) > 0
    elif low is None:
        norm = tree_norm(before, jnp.inf)
        norm_after = jnp.minimum(norm, inward(high, norm.dtype, -np.inf))
        clipped = norm > norm_after
    else:
        wide = [(x.astype(sum_dtype(x.dtype)), jnp.isnan(x)) for x in before]
        most = _largest_entry(wide)
        least = -_largest_entry((-x, is_nan) for x, is_nan in wide)
        low, high = inward(low, most.dtype, np.inf), inward(high, most.dtype, -np.inf)
        clipped = (most > high) | (least < low)
        norm = jnp.maximum(jnp.maximum(most, -least), 0)
        ends = [jnp.abs(jnp.clip(end, low, high)) for end in (most, least)]
        norm_after = jnp.where(clipped, jnp.maximum(*ends), norm)
    smaller = norm_after < norm
    scale = jnp.where(smaller, norm_after, 1) / jnp.where(smaller, norm, 1)
    finite = norm < jnp.inf
    metrics = metrics_of(norm, nan_unless(finite, scale), norm_after)
    return metrics | {"clipped": clipped & finite}


def _largest_entry(pairs: Iterable[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Return the largest element of leaves, each given with a mask of its NaNs."""
    each = (maximum(x, is_nan, empty=-jnp.inf) for x, is_nan in pairs)
    return largest(each, -jnp.inf)
