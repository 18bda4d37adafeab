"""Limits of single entries."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.bounds import broadcastable
from clipjax._core.norms import is_float, largest, nan_unless, norm, warn_if_local
from clipjax._core.paths import Leaf
from clipjax._core.rescale import factor_to, rescale, weak_like
from clipjax._core.units import metrics_of


def inward(limit: Any, dtype: Any, toward: float) -> Any:
    """Return a limit in a leaf's dtype, rounded `toward` -inf or inf, so that no entry is beyond what the user wrote.

    A limit that is known is compared in float64, since 0.1 is not a float32.
    """
    known = not isinstance(limit, jax.Array)
    xp, exact = (np, np.asarray(limit, np.float64)) if known else (jnp, limit)
    if np.isnan(np.asarray(np.inf).astype(dtype)):  # 8 bits without an infinity, which would become NaN
        most = float(jnp.finfo(dtype).max)
        toward, exact = np.copysign(most, toward), xp.clip(exact, -most, most)
    with np.errstate(over="ignore"):
        near = exact.astype(dtype)
    beyond = near.astype(exact.dtype) > exact if toward < 0 else near.astype(exact.dtype) < exact
    return xp.where(beyond, xp.nextafter(near, xp.asarray(toward, dtype)), near)


def clip_entries(leaf: Leaf, low: Any, high: Any) -> jax.Array:
    """Clip each entry of a leaf of floats to `[low, high]`; `low=None` means -high. NaN stays NaN."""
    x = leaf.value
    if not is_float(x):
        return x
    if jnp.iscomplexobj(x):
        if low is not None:
            raise TypeError(
                f"low, high: {leaf} is complex, of dtype {x.dtype}, and has no order; one bound, as in "
                "clip_by_value(1.0), clips |z|"
            )
        sizes = norm(x, axes=())  # each entry is a unit
        return rescale(x, factor_to(broadcastable("bound", high, x, leaf), sizes, x.dtype))
    top = inward(broadcastable("bound" if low is None else "high", high, x, leaf), x.dtype, -np.inf)
    bottom = -top if low is None else inward(broadcastable("low", low, x, leaf), x.dtype, np.inf)
    # XLA on a CPU flushes subnormal numbers in a maximum, but not in a choice.
    return weak_like(x, jnp.where((bottom < x) & (x < top), x, jnp.clip(x, bottom, top)))


def metrics_of_entries(before: list[jax.Array], after: list[jax.Array], bound: Any) -> dict[str, jax.Array]:
    """Return the metrics of clipped entries, whose norm is the largest absolute value.

    Where one number bounds absolute values, that norm decides the rest.
    """
    warn_if_local()
    before, after = lax.stop_gradient((before, after))  # a maximum over devices has no derivative
    size = largest(norm(x, None, jnp.inf) for x in before)
    if bound is not None and np.ndim(bound) == 0:
        rest = jnp.minimum(size, jnp.asarray(bound, size.dtype))
        clipped = size > rest
    else:
        rest = largest(norm(x, None, jnp.inf) for x in after)
        changes = (jnp.any((x != y) & (x == x)) for x, y in zip(before, after, strict=True))
        clipped = largest(change.astype(np.float32) for change in changes) > 0
    scale, finite = jnp.where(rest < size, rest, 1) / jnp.where(rest < size, size, 1), size < jnp.inf
    return metrics_of(size, nan_unless(finite, scale), rest) | {"clipped": clipped & finite}
