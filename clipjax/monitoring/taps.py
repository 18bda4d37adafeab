"""Taps: what clips in the backward pass saw, as the gradient of a small array."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.bounds import is_real
from clipjax._core.messages import short_repr
from clipjax._core.norms import mesh_axes

# What a tap holds of norms: how many there were, how many were clipped, how many were
# not finite, and the sum of the finite ones.
_SHAPE = (4,)

# Norms, and whether they are above the bound.
Seen: TypeAlias = tuple[jax.Array, jax.Array]


def tap() -> jax.Array:
    """Make a tap: the gradient with respect to it is what a clip in the model saw.

    Pass it to :func:`clip_gradient_by_norm` or its like, and take the gradient of the
    loss with respect to it, too. The clip then returns sums there, which add up over
    the steps of a `scan`, over the examples of a `vmap`, over devices, and over all
    clips that share the tap. :func:`tapped` reads them.

    Returns:
      Zeros, float32 `(4,)`, on which no value depends.

    Example:
      >>> import clipjax, jax, jax.numpy as jnp
      >>> def loss(x, t):
      ...     return 3.0 * jnp.sum(clipjax.clip_gradient_by_norm(x, 1.0, tap=t))
      >>> grads = jax.grad(loss, argnums=(0, 1))(jnp.ones(()), clipjax.tap())
      >>> print(clipjax.tapped(grads[1])["mean_norm"])
      3.0
    """
    return jnp.zeros(_SHAPE, np.float32)


def tapped(gradient: jax.Array) -> dict[str, jax.Array]:
    """Read the gradient with respect to a tap, for a logger.

    Args:
      gradient: float32 `(..., 4)`, as JAX returns it for a :func:`tap`.

    Returns:
      A dict of float32 scalars, or of shape `(...)`: `count`, of norms; and of these
      `clipped_fraction`, `nonfinite_count` and `mean_norm`, that of the finite ones. A
      norm that is not finite is not clipped. The fraction and the mean are 0 if there
      were none.

    Raises:
      ValueError: `gradient` does not have the shape of a tap.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> seen = clipjax.tapped(jnp.array([8.0, 2.0, 0.0, 4.0]))
      >>> print(seen["count"], seen["clipped_fraction"], seen["mean_norm"])
      8.0 0.25 0.5
    """
    if np.shape(gradient)[-1:] != _SHAPE or not is_real(gradient):
        raise ValueError(
            "gradient must be that with respect to clipjax.tap(), of shape "
            f"{_SHAPE}, got {short_repr(gradient)}"
        )
    count, clipped, nonfinite, total = jnp.moveaxis(jnp.asarray(gradient), -1, 0)
    return {
        "count": count,
        "clipped_fraction": clipped / jnp.maximum(count, 1),
        "nonfinite_count": nonfinite,
        "mean_norm": total / jnp.maximum(count - nonfinite, 1),
    }


def check_tap(tap: Any) -> None:
    """Raise an error if a value is neither a tap nor None."""
    if tap is not None and (not is_real(tap) or np.shape(tap) != _SHAPE):
        raise TypeError(f"tap must be clipjax.tap(), got {short_repr(tap)}")


def sums_of(seen: Sequence[Seen], tap: jax.Array) -> jax.Array:
    """Return the gradient of a tap."""
    sums = jnp.zeros(_SHAPE, np.float32)
    for norm, is_above in seen:
        finite = jnp.isfinite(norm)
        kinds = (jnp.ones_like(finite), finite & is_above, ~finite)
        numbers = [*kinds, jnp.where(finite, norm, 0)]
        sums += jnp.stack([jnp.sum(x, dtype=np.float32) for x in numbers])
    sums = lax.stop_gradient(sums)
    # Norms are those of all devices. If the tap is another on each, one has the sums,
    # so that they count once.
    for name in mesh_axes(tap):
        sums = jnp.where(lax.axis_index(name) == 0, sums, 0)
    return sums.astype(tap.dtype)
