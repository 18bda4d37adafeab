"""The last values of a norm or a loss, and their quantiles."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.messages import traced_error
from clipjax._core.states import check_same


class Ring(NamedTuple):
    """The last values of a norm, or of a norm and a loss: `(2, window)` and `(2,)`."""

    # float (window,): the newest is in place of the oldest; infinite where there is
    # none yet
    values: jax.Array
    # int32: how many have entered; it wraps from 2 * window to window, so that it never
    # overflows and still says that the ring is full
    entered: jax.Array


def empty_ring(size: Any, dtype: Any, each: tuple[int, ...] = ()) -> Ring:
    """Return a ring without values."""
    if isinstance(size, jax.core.Tracer):
        raise traced_error("window", size)
    values = jnp.full((*each, int(size)), jnp.inf, dtype)
    return Ring(values, jnp.zeros(each, np.int32))


def enter(ring: Ring, value: jax.Array, enters: jax.Array) -> Ring:
    """Return a ring with a value in place of the oldest, if it enters."""
    values = jnp.asarray(ring.values)  # NumPy's, if it was restored
    size = values.shape[-1]
    here = is_next(size, ring.entered) & enters[..., None]
    new = jnp.where(here, value.astype(values.dtype)[..., None], values)
    return Ring(new, one_more(size, ring.entered, enters))


def is_next(size: int, entered: jax.Array) -> jax.Array:
    """Return which of `size` places the next value takes, bool `(size,)`.

    A choice of entries, since a scatter is a kernel of its own.
    """
    places = lax.broadcasted_iota(np.int32, (*entered.shape, size), entered.ndim)
    return places == (entered % size)[..., None]


def one_more(size: int, entered: jax.Array, enters: jax.Array) -> jax.Array:
    """Increment the count; wrap to `size`, so that it still says "full"."""
    more = jnp.where(entered >= 2 * size - 1, size, entered + 1)
    return jnp.where(enters, more, entered)


def held(ring: Ring) -> jax.Array:
    """Return how many values there are in a ring: in its first places."""
    return jnp.minimum(ring.entered, ring.values.shape[-1])


def quantile(values: jax.Array, count: jax.Array, share: Any) -> jax.Array:
    """Return a quantile along the last axis, as `numpy.quantile` does.

    Only the first `count` values are held. If none is, it is the largest float.
    """
    return quantile_of(in_order(values, count), count, share)


def in_order(values: jax.Array, count: jax.Array) -> jax.Array:
    """Return values in ascending order; behind those that are held, the largest float.

    Infinite ones would make NaN in derivatives.
    """
    places = lax.broadcasted_iota(np.int32, values.shape, values.ndim - 1)
    most = jnp.finfo(values.dtype).max
    return jnp.sort(jnp.where(places < jnp.expand_dims(count, -1), values, most))


def quantile_of(ascending: jax.Array, count: jax.Array, share: Any) -> jax.Array:
    """Return a quantile of values that are in order."""
    last = jnp.maximum(count, 1) - 1
    rank = share * last.astype(ascending.dtype)
    below = jnp.floor(rank).astype(np.int32)
    above = jnp.minimum(below + 1, last)
    # Flat, since an index with two parts is a kernel of its own.
    flat = ascending.ravel()
    rows = jnp.arange(count.size, dtype=np.int32).reshape(count.shape)
    row = ascending.shape[-1] * rows
    low = flat[row + below]
    return low + (flat[row + above] - low) * (rank - jnp.floor(rank))


def check_size(ring: Ring, window: Any) -> None:
    """Raise if a state was made with a window of another size."""
    if not isinstance(window, jax.core.Tracer):
        check_same("window", ring.values.shape[-1], window)
