"""The last values of a norm or a loss, and their quantiles."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.aliases import DType
from clipjax._core.bounds import traced_error
from clipjax._core.states import check_same


class Window(NamedTuple):
    """The last values of a norm, or of a norm and a loss: `(2, size)` and `(2,)`."""

    # float (size,), in the order of time, the newest last; infinite where there is no
    # value
    values: jax.Array
    held: jax.Array  # int32: the number of values


def empty_window(size: Any, dtype: DType, rows: tuple[int, ...] = ()) -> Window:
    """Return a window without values."""
    if isinstance(size, jax.core.Tracer):
        raise traced_error("window", size)
    values = jnp.full((*rows, int(size)), jnp.inf, dtype)
    return Window(values, jnp.zeros(rows, np.int32))


def enter(window: Window, value: jax.Array, enters: jax.Array) -> Window:
    """Return a window in which a value has replaced the oldest one, where `enters`."""
    values = jnp.asarray(window.values)  # NumPy's, if it was restored
    new = value.astype(values.dtype)[..., None]
    moved = jnp.concatenate([values[..., 1:], new], axis=-1)
    more = jnp.minimum(window.held + 1, values.shape[-1])
    return Window(
        jnp.where(enters[..., None], moved, values),
        jnp.where(enters, more, window.held),
    )


def age(values: jax.Array) -> jax.Array:
    """Return for each place how many values ago its value entered: 1 for the newest."""
    places = lax.broadcasted_iota(np.int32, values.shape, values.ndim - 1)
    return values.shape[-1] - places


def quantile(values: jax.Array, counted: jax.Array, share: Any) -> jax.Array:
    """Return a quantile along the last axis, as `numpy.quantile` does.

    Only the values that are `counted` count. If none is, the result is the largest
    float, since infinity would make NaN in derivatives.
    """
    ascending = jnp.sort(jnp.where(counted, values, jnp.finfo(values.dtype).max))
    count = jnp.sum(counted, axis=-1, dtype=np.int32)
    last = jnp.maximum(count, 1) - 1
    rank = share * last.astype(ascending.dtype)
    below = jnp.floor(rank).astype(np.int32)
    above = jnp.minimum(below + 1, last)
    low = at(ascending, below)
    return low + (at(ascending, above) - low) * (rank - jnp.floor(rank))


def at(values: jax.Array, place: jax.Array) -> jax.Array:
    """Return the values at one place of each row, or at several places.

    The index is flat, since an index with two parts is a kernel of its own.
    """
    rows = np.arange(values.size // values.shape[-1], dtype=np.int32)
    start = values.shape[-1] * rows.reshape(values.shape[:-1])
    start = start.reshape(start.shape + (1,) * (place.ndim - start.ndim))
    return values.ravel()[start + place]


def check_size(window: Window, size: Any) -> None:
    """Raise if a state was made with a window of another size."""
    if not isinstance(size, jax.core.Tracer):
        check_same("window", window.values.shape[-1], size)
