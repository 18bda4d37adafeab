"""Thresholds and bounds of single elements."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.aliases import DType, Metrics
from clipjax._core.bounds import check_order, fit_bound
from clipjax._core.clip import factor_to, metrics_of, rescale, weak_like
from clipjax._core.leaves import Leaf, is_inexact
from clipjax._core.messages import short_repr
from clipjax._core.norms import (
    largest,
    maximum,
    nan_unless,
    norm_of,
    split_as,
    sum_dtype,
    tree_norm,
)


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
