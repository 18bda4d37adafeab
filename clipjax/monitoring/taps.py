"""Taps: statistics from inside a model, as the gradient of a small array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.aliases import Tree
from clipjax._core.bounds import check_count, check_flag, is_real
from clipjax._core.leaves import flatten, short_repr
from clipjax._core.norms import (
    mesh_axes,
    on_all,
    sum_dtype,
    warn_if_local,
)

T = TypeVar("T")

# The tap of a clip has four numbers: the number of norms, the number of norms that were
# clipped, the number that were not finite, and the sum of the finite norms.
_OF_CLIP = (4,)

# The tap of a probe has three numbers for the forward pass, and then three for the
# backward pass: the number of elements, the number that were not finite, and the sum of
# squares of the others.
_OF_PROBE = (6,)

# Norms, and whether each is above its threshold.
Seen: TypeAlias = tuple[jax.Array, jax.Array]


def tap(*layers: SupportsIndex, probe: bool = False) -> jax.Array:
    """Make a tap: zeros whose gradient carries statistics from a model.

    Use it to see what happens inside a model in its backward pass. Pass the array to
    :func:`probe`, or to a clip such as :func:`clip_gradient_by_norm`, and also take the
    gradient of the loss with respect to this array. The statistics in this gradient are
    sums over the steps of a `scan`, over the examples of a `vmap`, and over all places
    and devices that share the tap. :func:`tapped` reads them.

    Args:
      *layers: the shape of a stack of taps. `tap(12)` has one tap for each of 12
        layers; pass it to `scan` together with the weights of the layers. Without
        numbers, the result is one tap.
      probe: whether the tap is for :func:`probe`, which has more statistics than a
        clip; False by default.

    Returns:
      Zeros, float32 `(*layers, 4)`, or `(*layers, 6)` for a probe. No value of the
      model depends on them.

    Raises:
      TypeError: a number of layers is traced, or not an int; `probe` is not a bool.
      ValueError: a number of layers is below 0.

    See Also:
      :func:`tapped` reads the gradient; :func:`probe` and :func:`clip_gradient_by_norm`
      take a tap.

    Example:
      >>> import clipjax, jax, jax.numpy as jnp
      >>> def loss(x, t):
      ...     return 3.0 * jnp.sum(clipjax.clip_gradient_by_norm(x, 1.0, tap=t))
      >>> grads = jax.grad(loss, argnums=(0, 1))(jnp.ones(()), clipjax.tap())
      >>> print(clipjax.tapped(grads[1])["mean_norm"])
      3.0
    """
    check_flag("probe", probe)
    shape = tuple(check_count("layers", n, 0, static=True) for n in layers)
    return jnp.zeros(shape + (_OF_PROBE if probe else _OF_CLIP), np.float32)


def tapped(gradient: jax.Array) -> dict[str, jax.Array]:
    """Read the gradient with respect to a tap, for a logger.

    Use it on what `jax.grad` returns for the argument that is a tap.

    Args:
      gradient: float32 `(..., 4)`, or `(..., 6)` for a probe, as JAX returns it for a
        :func:`tap`.

    Returns:
      A dict of float32 scalars, or of arrays of shape `(...)`. A clip has `count`, the
      number of norms, `clipped_fraction`, the fraction of the norms that were above the
      threshold, `nonfinite_count`, the number of norms that were not finite, and
      `mean_norm`, the mean of the finite norms. A norm that is not finite does not
      count as clipped. Fraction and mean are 0 if there were no norms. A probe has
      `forward_norm` and `backward_norm`, the norms of the finite elements of the
      probe's `x` and of its gradient, `forward_nonfinite_count` and
      `backward_nonfinite_count`, and `count`, the number of all elements.

    Raises:
      ValueError: `gradient` does not have the shape of a tap.

    See Also:
      :func:`tap` makes the array; :func:`record_norms` keeps what probes saw at bad
      steps.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> seen = clipjax.tapped(jnp.array([8.0, 2.0, 0.0, 4.0]))
      >>> print(seen["count"], seen["clipped_fraction"], seen["mean_norm"])
      8.0 0.25 0.5
    """
    shape = np.shape(gradient)[-1:]
    if shape not in (_OF_CLIP, _OF_PROBE) or not is_real(gradient):
        raise ValueError(
            "gradient must be the gradient with respect to clipjax.tap(), of shape "
            "(..., 4), or to clipjax.tap(probe=True), of shape (..., 6); got "
            f"{short_repr(gradient)}"
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
    """Return `x`, and record statistics of `x` and of its gradient in a tap.

    Use it to find the layer in which a step breaks. The gradient with respect to the
    tap has the sum of squares, the number of elements, and the number of elements that
    are not finite, of `x` and of its gradient. To cover a layer in both passes, call
    two probes with the same tap, one at the start and one at the end of the layer. The
    forward pass leaves the layer at its end, and the backward pass at its start.

    Args:
      x: a pytree of arrays, such as the activations between two layers.
      tap: `clipjax.tap(probe=True)`; in a `scan` over 12 layers, one of the 12 in
        `clipjax.tap(12, probe=True)`.

    Returns:
      `x`, bit for bit; its gradient does not change.

    Raises:
      TypeError: `tap` is not the tap of a probe. JAX raises a TypeError in forward
        mode.

    See Also:
      :func:`tapped` reads the statistics; the argument `probes` of :func:`record_norms`
      keeps them for bad steps.

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
        raise TypeError(
            "tap must be clipjax.tap(probe=True), or one of a stack of taps, as a scan "
            f"over the layers has it, got {short_repr(tap)}"
        )
    warn_if_local()
    leaves = flatten(x)
    return _probed(leaves.rebuild(leaves.values), tap)


@jax.custom_vjp
def _probed(x: T, tap: jax.Array) -> T:
    return x


def _forward(x: T, tap: jax.Array) -> tuple[T, Any]:
    return x, (_statistics(x, tap), tap)


def _backward(kept: Any, gradient: T) -> tuple[T, jax.Array]:
    of_forward, tap = kept
    both = jnp.concatenate([of_forward, _statistics(gradient, tap)])
    return gradient, both.astype(tap.dtype)


_probed.defvjp(_forward, _backward)


def _statistics(tree: Tree, tap: jax.Array) -> jax.Array:
    """Count elements, count those not finite, and sum the squares of the others.

    Devices with a tap of their own, as the stages of a pipeline have it, stay apart.
    """
    each = [jnp.zeros(3, np.float32)]
    for x in flatten(lax.stop_gradient(tree)).inexact:
        finite = jnp.isfinite(x)
        size = jnp.abs(jnp.where(finite, x, 0)).astype(sum_dtype(x.dtype))
        numbers = [jnp.ones_like(size), ~finite, size * size]
        each.append(_sums(numbers))
    sums = lax.stop_gradient(on_all(each, ord=1, but=mesh_axes(tap)))
    more = {*mesh_axes(tap)} - {*mesh_axes(sums)}
    return lax.pcast(sums, tuple(more), to="varying") if more else sums


def check_tap(tap: Any) -> None:
    """Raise if a value is neither the tap of a clip nor None."""
    if tap is not None and (not is_real(tap) or np.shape(tap) != _OF_CLIP):
        raise TypeError(f"tap must be clipjax.tap(), got {short_repr(tap)}")


def sums_of(seen: Sequence[Seen], tap: jax.Array) -> jax.Array:
    """Return the gradient of the tap of a clip."""
    sums = jnp.zeros(_OF_CLIP, np.float32)
    for norm, is_above in seen:
        finite = jnp.isfinite(norm)
        kinds = (jnp.ones_like(finite), finite & is_above, ~finite)
        numbers = [*kinds, jnp.where(finite, norm, 0)]
        sums += _sums(numbers)
    # The norm is of all devices: if each has a tap of its own, one counts it.
    for name in mesh_axes(tap):
        sums = jnp.where(lax.axis_index(name) == 0, sums, 0)
    return lax.stop_gradient(sums).astype(tap.dtype)


def _sums(numbers: Sequence[jax.Array]) -> jax.Array:
    """Return the sum of each array, in one array."""
    return jnp.stack([jnp.sum(x, dtype=np.float32) for x in numbers])
