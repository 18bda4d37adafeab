"""Clips of the gradient in the backward pass, at a place in a model.

`axes` are literal here, as in NumPy: an int or a tuple applies to leaves of every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from clipjax._core.aliases import Axes
from clipjax._core.bounds import number
from clipjax._core.clip import check_limits, clip, clip_by_tree_norm, clip_entries
from clipjax._core.leaves import Leaves, flatten, is_inexact
from clipjax._core.norms import (
    axes_of,
    check_axes,
    norm_of,
    norms_of,
    over_devices,
    warn_if_local,
)
from clipjax.monitoring import taps

T = TypeVar("T")


def clip_gradient_by_value(
    x: T,
    bound: ArrayLike | None = None,
    high: ArrayLike | None = None,
    *,
    low: ArrayLike | None = None,
    tap: jax.Array | None = None,
) -> T:
    """Return `x`, and clip each element of its gradient.

        backward:  min(max(g, low), high)

    Use it in a model where single elements of a gradient become extreme, as in the
    cells of an LSTM.

    Args:
      x: a pytree of arrays.
      bound: the threshold for absolute values, a number or an array that broadcasts to
        every leaf. If you also pass `high`, and no `low`, this argument is `low`.
      high: the upper threshold, a number or an array. Infinity means no upper
        threshold.
      low: the lower threshold, a number or an array. Minus infinity means no lower
        threshold.
      tap: a :func:`tap`, whose gradient will hold the statistics of the clip. The norm
        of a leaf is its largest absolute element. None, the default, means no tap.

    Returns:
      `x`, bit for bit.

    Raises:
      TypeError: `low` is given without `high`, or no threshold is given; a threshold is
        not a number, or is a schedule; a leaf is complex and there are two
        thresholds. JAX raises a TypeError in forward mode, since a clipped gradient
        is not a linear function of the gradient.
      ValueError: a threshold is NaN, or does not fit a leaf; `low` is above `high`.

    References:
      Graves, 2013, Generating sequences with recurrent neural networks,
      arXiv:1308.0850.

    See Also:
      :func:`clip_gradient_by_norm` clips norms; :func:`clip_by_value` clips the
      gradients of weights.

    Example:
      >>> import clipjax, jax
      >>> def loss(x):
      ...     return 5.0 * clipjax.clip_gradient_by_value(x, 1.0)
      >>> float(jax.grad(loss)(2.0))
      1.0
    """
    warn_if_local()
    limits = check_limits(bound, high, low, functools.partial(number, scalar=False))

    def clip_values(gradient: Leaves, low: Any, high: Any) -> Any:
        values = [clip_entries(leaf, low, high) for leaf in gradient.each]
        pairs = zip(gradient.values, values, strict=True)
        seen = [_seen(g, new) for g, new in pairs if is_inexact(g) and g.size]
        return gradient.rebuild(values), seen

    return _with_gradient(clip_values, tap, x, *limits)


def _seen(g: jax.Array, clipped: jax.Array) -> taps.Seen:
    """Return the largest absolute element, and whether an element was clipped."""
    changed = jnp.any((g != clipped) & (g == g)).astype(np.uint8)
    return norm_of(g, None, jnp.inf), over_devices(lax.pmax, changed) > 0


def clip_gradient_by_norm(
    x: T,
    max_norm: ArrayLike,
    *,
    axes: Axes = None,
    tap: jax.Array | None = None,
) -> T:
    """Return `x`, and clip the norm of its gradient, for each leaf or unit.

        backward:  g * min(1, max_norm / |g|)

    Use it where a gradient grows on its way back through a model. In a recurrent
    network it clips at every time step, and under `vmap` it clips each example alone.

    Args:
      x: a pytree of arrays.
      max_norm: the threshold for each norm, a number or an array that broadcasts to the
        norms. Its own gradient is 0.
      axes: the axes that are reduced, as `Axes`, in leaves of every rank, biases
        included. None, the default, gives each leaf one norm.
      tap: a :func:`tap`, whose gradient will hold the statistics of the clip. None, the
        default, means no tap.

    Returns:
      `x`, bit for bit.

    Raises:
      TypeError: `max_norm` is not a number, or is a schedule. JAX raises a TypeError in
        forward mode, since a clipped gradient is not a linear function of the gradient.
      ValueError: `max_norm` is negative or NaN, or does not fit the norms; `axes` do
        not fit a leaf, or apply to no leaf.

    For finite gradients, equals a `tf.custom_gradient` that applies `tf.clip_by_norm`
    to the gradient.

    See Also:
      :func:`clip_gradient_by_global_norm` clips the leaves of a tree together;
      :func:`clip_by_norm` clips the gradients of weights.

    Example:
      >>> import clipjax, jax, jax.numpy as jnp
      >>> def loss(x):
      ...     x = clipjax.clip_gradient_by_norm(x, 1.0)
      ...     return jnp.sum(jnp.array([3.0, 4.0]) * x)
      >>> print(jax.grad(loss)(jnp.ones(2)).round(3))
      [0.6 0.8]
    """
    warn_if_local()
    bound = number("max_norm", max_norm, "[0, inf]", scalar=False)
    axes = check_axes(axes)

    def clip_units(gradient: Leaves, bound: Any) -> Any:
        of = norms_of(gradient.values, axes_of(gradient, axes, least_rank=0))
        values, factors = clip(gradient, of, [bound] * len(of))
        rows = zip(of, factors, gradient.values, strict=True)
        seen = [(norm, by < 1) for norm, by, g in rows if by is not None and g.size]
        return gradient.rebuild(values), seen

    return _with_gradient(clip_units, tap, x, bound)


def clip_gradient_by_global_norm(
    tree: T, max_norm: ArrayLike, *, tap: jax.Array | None = None
) -> T:
    """Return `tree`, and clip the norm of its gradient over all leaves together.

        backward:  g * min(1, max_norm / norm)

    Use it for a state that consists of several arrays, such as the two arrays of an
    LSTM, if the gradient of the whole state should keep its direction.

    Args:
      tree: a pytree of arrays.
      max_norm: the threshold for the norm, a number or a scalar array. Its own gradient
        is 0.
      tap: a :func:`tap`, whose gradient will hold the statistics of the clip. None, the
        default, means no tap.

    Returns:
      `tree`, bit for bit.

    Raises:
      TypeError: `max_norm` is not a scalar, or is a schedule. JAX raises a TypeError in
        forward mode, since a clipped gradient is not a linear function of the gradient.
      ValueError: `max_norm` is negative or NaN.

    See Also:
      :func:`clip_gradient_by_norm` clips each leaf; :func:`clip_by_global_norm` clips
      the gradients of weights.

    Example:
      >>> import clipjax, jax, jax.numpy as jnp
      >>> def loss(tree):
      ...     tree = clipjax.clip_gradient_by_global_norm(tree, 1.0)
      ...     return 3.0 * tree["a"] + 4.0 * tree["b"]
      >>> gradient = jax.grad(loss)({"a": jnp.ones(()), "b": jnp.ones(())})
      >>> print(gradient["a"].round(3), gradient["b"].round(3))
      0.6 0.8
    """
    warn_if_local()
    bound = number("max_norm", max_norm, "[0, inf]")

    def clip_tree(gradient: Leaves, bound: Any) -> Any:
        clipped, metrics = clip_by_tree_norm(gradient, bound)
        return clipped, [(metrics["norm"], metrics["clipped"])]

    return _with_gradient(clip_tree, tap, tree, bound)


def _with_gradient(
    change: Callable[..., tuple[Any, list[taps.Seen]]],
    tap: jax.Array | None,
    tree: T,
    *limits: Any,
) -> T:
    """Return a tree whose gradient is changed by `change(gradient, *limits)`.

    `change` returns the new gradient and the norms that it saw, whose sums become the
    gradient of the tap. Leaves without a gradient have float0.
    """
    taps.check_tap(tap)
    leaves = flatten(tree)
    # Arrays are arguments, since a custom derivative must not close over tracers.
    # Numbers are closed over, so that they stay exact.
    arrays = [
        lax.stop_gradient(limit) if isinstance(limit, jax.Array) else None
        for limit in limits
    ]

    def changed(arrays: list[Any], gradient: Any) -> Any:
        pairs = zip(limits, arrays, strict=True)
        given = [a if b is None else b for a, b in pairs]
        return change(flatten(gradient), *given)

    def backward(kept: Any, gradient: Any) -> tuple[Any, None, Any]:
        arrays, tap = kept
        gradient, seen = changed(arrays, gradient)
        return gradient, None, None if tap is None else taps.sums_of(seen, tap)

    @jax.custom_vjp
    def identity(tree: T, arrays: list[Any], tap: Any) -> T:
        return tree

    identity.defvjp(lambda tree, arrays, tap: (tree, (arrays, tap)), backward)
    tree = leaves.rebuild(leaves.values)
    jax.eval_shape(changed, arrays, tree)  # raises its errors now
    passed = flatten(identity(tree, arrays, tap)).values
    pairs = zip(leaves.values, passed, strict=True)
    return leaves.rebuild([new if is_inexact(old) else old for old, new in pairs])
