"""A window: the last values of a norm or a loss, and their quantiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipjax._core import bounds


class Ring(NamedTuple):
    """The last values of a norm or a loss."""

    # float (window,): the newest is in place of the oldest; infinite where there is
    # none yet
    values: jax.Array
    # int32: how many have entered; from 2 * window it goes back to window, so never
    # overflows
    entered: jax.Array


def empty_ring(size: int, dtype: Any) -> Ring:
    """Return a ring without values."""
    return Ring(jnp.full(size, jnp.inf, dtype), jnp.zeros((), np.int32))


def enter(ring: Ring, value: jax.Array, enters: jax.Array) -> Ring:
    """Return a ring with a value in place of the oldest, if it enters."""
    values = jnp.asarray(ring.values)  # NumPy's, if it was restored
    entered = ring.entered
    more = jnp.where(entered >= 2 * len(values) - 1, len(values), entered + 1)
    new = values.at[entered % len(values)].set(value.astype(values.dtype))
    return Ring(jnp.where(enters, new, values), jnp.where(enters, more, entered))


def is_held(ring: Ring) -> jax.Array:
    """Return which places of a ring have a value, bool `(window,)`."""
    return jnp.arange(ring.values.size, dtype=np.int32) < ring.entered


def quantile(values: jax.Array, held: jax.Array, share: Any) -> jax.Array:
    """Return a quantile of the values that are held, as `numpy.quantile` does.

    If none is held, it is the largest float.
    """
    # The others come last. Infinite ones would make NaN in derivatives.
    ascending = jnp.sort(jnp.where(held, values, jnp.finfo(values.dtype).max))
    last = jnp.maximum(jnp.sum(held, dtype=np.int32), 1) - 1
    rank = share * last.astype(values.dtype)
    below = jnp.floor(rank).astype(np.int32)
    above = jnp.minimum(below + 1, last)
    step = ascending[above] - ascending[below]
    return ascending[below] + step * (rank - jnp.floor(rank))


def check_size(ring: Ring, window: Any) -> None:
    """Raise an error if a state was made with a window of another size."""
    if not isinstance(window, jax.core.Tracer) and ring.values.size != window:
        raise ValueError(
            f"window: the state was made with {ring.values.size}, got "
            f"{bounds.short_repr(window)}"
        )
