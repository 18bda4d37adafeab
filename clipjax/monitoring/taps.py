"""Taps: statistics from inside a model, as the gradient of a small array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.aliases import Tree
from clipjax._core.bounds import is_real
from clipjax._core.checks import check_count
from clipjax._core.leaves import flatten
from clipjax._core.messages import short_repr
from clipjax._core.norms import mesh_axes, on_all, sum_dtype

T = TypeVar("T")

# What the tap of a clip holds: how many norms there were, how many were clipped, how
# many were not finite, and the sum of the finite ones.
_OF_CLIP = (4,)

# What the tap of a probe holds, of the forward pass and then of the backward pass: how
# many elements there were, how many were not finite, and the squares of the others.
_OF_PROBE = (6,)

# Norms, and whether they are above the bound.
Seen: TypeAlias = tuple[jax.Array, jax.Array]


def tap(*layers: SupportsIndex, probe: bool = False) -> jax.Array:
    """Make a tap: zeros whose gradient carries statistics from inside a model.

    Pass it to :func:`clip_gradient_by_norm` or its like, or to :func:`probe`, and take
    the gradient of the loss with respect to it, too. The sums there add up over the
    steps of a `scan`, over the examples of a `vmap`, over devices, and over all places
    that share the tap. :func:`tapped` reads them.

    Args:
      *layers: how many taps, for a stack of layers: `tap(12)` has one for each of 12,
        to be scanned along its first axis beside their weights.
      probe: whether it is for :func:`probe`, which has more statistics than a clip.

    Returns:
      Zeros, float32 `(*layers, 4)`, or `(*layers, 6)` for a probe. No value of the
      model depends on them.

    Example:
      >>> import clipjax, jax, jax.numpy as jnp
      >>> def loss(x, t):
      ...     return 3.0 * jnp.sum(clipjax.clip_gradient_by_norm(x, 1.0, tap=t))
      >>> grads = jax.grad(loss, argnums=(0, 1))(jnp.ones(()), clipjax.tap())
      >>> print(clipjax.tapped(grads[1])["mean_norm"])
      3.0
    """
    shape = tuple(check_count("layers", n, 0, static=True) for n in layers)
    return jnp.zeros(shape + (_OF_PROBE if probe else _OF_CLIP), np.float32)


def tapped(gradient: jax.Array) -> dict[str, jax.Array]:
    """Read the gradient with respect to a tap, for a logger.

    Args:
      gradient: float32 `(..., 4)` or `(..., 6)`, as JAX returns it for a :func:`tap`.

    Returns:
      A dict of float32 scalars, or of arrays of shape `(...)`.

      Of a clip: `count`, of norms; and of these `clipped_fraction`, `nonfinite_count`
      and `mean_norm`, that of the finite ones. A norm that is not finite is not
      clipped. The fraction and the mean are 0 if there were none.

      Of a probe: `forward_norm` and `backward_norm`, of the finite elements of what it
      saw and of its gradient, and `forward_nonfinite_count`, `backward_nonfinite_count`
      and `count`, of all elements.

    Raises:
      ValueError: `gradient` does not have the shape of a tap.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> seen = clipjax.tapped(jnp.array([8.0, 2.0, 0.0, 4.0]))
      >>> print(seen["count"], seen["clipped_fraction"], seen["mean_norm"])
      8.0 0.25 0.5
    """
    shape = np.shape(gradient)[-1:]
    if shape not in (_OF_CLIP, _OF_PROBE) or not is_real(gradient):
        raise ValueError(
            "gradient must be that with respect to clipjax.tap(), of shape (..., 4), "
            f"or of one for a probe, (..., 6); got {short_repr(gradient)}"
        )
    numbers = jnp.moveaxis(jnp.asarray(gradient), -1, 0)
    if shape == _OF_PROBE:
        count, bad_forward, forward, _, bad_backward, backward = numbers
        return {
            "count": count,
            "forward_norm": jnp.sqrt(forward),
            "forward_nonfinite_count": bad_forward,
            "backward_norm": jnp.sqrt(backward),
            "backward_nonfinite_count": bad_backward,
        }
    count, clipped, nonfinite, total = numbers
    return {
        "count": count,
        "clipped_fraction": clipped / jnp.maximum(count, 1),
        "nonfinite_count": nonfinite,
        "mean_norm": total / jnp.maximum(count - nonfinite, 1),
    }


def probe(x: T, tap: jax.Array) -> T:
    """Return `x`, and show a tap what passes here, forward and backward.

    The gradient with respect to the tap has the sum of squares, the number of elements,
    and the number of elements that are not finite, of `x` and of its gradient. Use it
    to find the layer in which a step breaks. At the start and at the end of a layer,
    with the same tap, it tells the layer of both passes.

    Args:
      x: a pytree of arrays, such as the activations between two layers.
      tap: `clipjax.tap(probe=True)`; in a `scan` over 12 layers one of
        `clipjax.tap(12, probe=True)`.

    Returns:
      `x`, bit for bit; its gradient does not change.

    Raises:
      TypeError: `tap` is not the tap of a probe; in forward mode, as JAX says.

    See also :func:`tapped`, which reads the gradient of the tap, and the argument
    `probes` of :func:`record_norms`, which keeps it for bad steps.

    Example:
      >>> import clipjax, jax, jax.numpy as jnp
      >>> def loss(x, taps):
      ...     def layer(x, tap):
      ...         return clipjax.probe(2.0 * x, tap), None
      ...     return jnp.sum(jax.lax.scan(layer, x, taps)[0])
      >>> taps = clipjax.tap(3, probe=True)
      >>> _, grads = jax.grad(loss, argnums=(0, 1))(jnp.ones(()), taps)
      >>> print(clipjax.tapped(grads)["forward_norm"])
      [2. 4. 8.]
    """
    if not is_real(tap) or np.shape(tap) != _OF_PROBE:
        raise TypeError(f"tap must be clipjax.tap(probe=True), got {short_repr(tap)}")
    leaves = flatten(x)
    return _probed(leaves.rebuild(leaves.values), tap)


@jax.custom_vjp
def _probed(x: T, tap: jax.Array) -> T:
    return x


def _forward(x: T, tap: jax.Array) -> tuple[T, Any]:
    return x, (_statistics(x), tap)


def _backward(kept: Any, gradient: T) -> tuple[T, jax.Array]:
    of_forward, tap = kept
    both = jnp.concatenate([of_forward, _statistics(gradient)])
    return gradient, _for_tap(both, tap)


_probed.defvjp(_forward, _backward)


def _statistics(tree: Tree) -> jax.Array:
    """Count elements, count those that are not finite, and sum squares of the rest."""
    each = [jnp.zeros(3, np.float32)]
    for x in flatten(lax.stop_gradient(tree)).floats:
        finite = jnp.isfinite(x)
        size = jnp.abs(jnp.where(finite, x, 0)).astype(sum_dtype(x.dtype))
        numbers = [jnp.ones_like(size), ~finite, size * size]
        each.append(jnp.stack([jnp.sum(n, dtype=np.float32) for n in numbers]))
    return on_all(each, ord=1)


def check_tap(tap: Any) -> None:
    """Raise an error if a value is neither a tap nor None."""
    if tap is not None and (not is_real(tap) or np.shape(tap) != _OF_CLIP):
        raise TypeError(f"tap must be clipjax.tap(), got {short_repr(tap)}")


def sums_of(seen: Sequence[Seen], tap: jax.Array) -> jax.Array:
    """Return the gradient of a tap."""
    sums = jnp.zeros(_OF_CLIP, np.float32)
    for norm, is_above in seen:
        finite = jnp.isfinite(norm)
        kinds = (jnp.ones_like(finite), finite & is_above, ~finite)
        numbers = [*kinds, jnp.where(finite, norm, 0)]
        sums += jnp.stack([jnp.sum(x, dtype=np.float32) for x in numbers])
    return _for_tap(sums, tap)


def _for_tap(sums: jax.Array, tap: jax.Array) -> jax.Array:
    """Return sums over all devices as the gradient of a tap.

    If the tap is another on each device, one has the sums, so that they count once.
    """
    sums = lax.stop_gradient(sums)
    for name in mesh_axes(tap):
        sums = jnp.where(lax.axis_index(name) == 0, sums, 0)
    return sums.astype(tap.dtype)
