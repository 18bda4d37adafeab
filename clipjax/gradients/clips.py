"""Clips whose bounds depend neither on the weights nor on past steps."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax import _checks
from clipjax._core import bounds, clipping, norms, transformation, trees, units


def clip_by_global_norm(
    max_norm: bounds.Bound, *, ord: bounds.Ord = None
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of all leaves together: each is multiplied by min(1, max_norm / norm).

    Args:
      max_norm: the bound: a number, a scalar array or a schedule `step -> bound`.
      ord: the order of the norm: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.

    Returns:
      A transformation with the metrics of a clip; `norm` is that of the whole tree.

    Equals `tf.clip_by_global_norm`, `optax.clip_by_global_norm`, Keras'
    `global_clipnorm` and torch's `clip_grad_norm_`.

    References:
      Pascanu et al., 2013, On the difficulty of training recurrent neural networks,
      arXiv:1211.5063.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_global_norm(1.0)
      >>> grads = {"w": jnp.array([3.0]), "b": jnp.array([4.0])}
      >>> clipped, state = tx.update(grads, tx.init(grads))
      >>> metrics = clipjax.metrics(state)
      >>> print(clipped["w"].round(3), metrics["clip_by_global_norm/norm"])
      [0.6] 5.0
    """
    bound, order = (
        bounds.as_schedule("max_norm", max_norm, scalar=True),
        _checks.check_ord(ord),
    )

    def act(updates: Any, params: Any, step: Any, memory: Any) -> Any:
        return *clipping.clip_tree(updates, bound(step), order), memory

    return transformation.with_metrics("clip_by_global_norm", act)


def clip_by_norm(
    max_norm: bounds.Bound, *, axes: units.Axes = None, ord: bounds.Ord = None
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of each leaf, or of each unit along `axes`: x * min(1, max_norm / |x|).

    Args:
      max_norm: the bound: a number, an array that broadcasts to the norms, whose
        reduced axes have size 1, or a schedule.
      axes: the axes that are reduced, where ints are for leaves of rank 2 and more.
        None: each leaf has one norm.
      ord: the order of the norm: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.

    Returns:
      A transformation with the metrics of a clip; `norm` is the largest of the norms.

    Equals `tf.clip_by_norm` with its `axes` for matrices, and Keras' `clipnorm`.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_norm(1.0, axes=0)
      >>> grads = jnp.array([[3.0, 0.3], [4.0, 0.4]])
      >>> print(tx.update(grads, tx.init(grads))[0].round(3))
      [[0.6 0.3]
       [0.8 0.4]]
    """
    bound, order, axes = (
        bounds.as_schedule("max_norm", max_norm),
        _checks.check_ord(ord),
        units.check_axes(axes),
    )

    def act(updates: Any, params: Any, step: Any, memory: Any) -> Any:
        found = units.of_tree(updates, axes)
        return *clipping.clip_units(
            updates, found, units.norms_of(found, order), bound(step)
        ), memory

    return transformation.with_metrics("clip_by_norm", act)


def clip_by_rms(
    threshold: bounds.Bound, *, axes: units.Axes = None
) -> optax.GradientTransformationExtraArgs:
    """Clip the root mean square of each leaf, or of each unit along `axes`: x * min(1, threshold / rms(x)).

    Args:
      threshold: the bound on the RMS: a number, an array that broadcasts to the units,
        or a schedule.
      axes: the axes that are reduced, as in :func:`clip_by_norm`. None: each leaf has
        one RMS.

    Returns:
      A transformation with the metrics of a clip; `norm` is the largest RMS.

    Equals `optax.clip_by_block_rms` and Adafactor's update clipping, which is in front
    of the learning rate: `optax.chain(optax.scale_by_adam(), clipjax.clip_by_rms(1.0),
    optax.scale_by_learning_rate(1e-3))`. Behind it, updates are too small to be
    clipped.

    References:
      Shazeer and Stern, 2018, Adafactor: adaptive learning rates with sublinear memory
      cost, arXiv:1804.04235.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_rms(1.0)
      >>> grads = jnp.array([2.0, 2.0, 2.0, 2.0])
      >>> print(tx.update(grads, tx.init(grads))[0].round(3))
      [1. 1. 1. 1.]
    """
    bound, axes = bounds.as_schedule("threshold", threshold), units.check_axes(axes)

    def act(updates: Any, params: Any, step: Any, memory: Any) -> Any:
        found = units.of_tree(updates, axes)
        each = zip(found, units.norms_of(found), strict=True)
        sizes = [norm / max(_entries_per_unit(of), 1) ** 0.5 for of, norm in each]
        return *clipping.clip_units(
            updates, found, sizes, bound(step), "threshold"
        ), memory

    return transformation.with_metrics("clip_by_rms", act)


def _entries_per_unit(each: units.LeafUnits) -> int:
    """Return how many entries share a norm, of which this device may hold a part."""
    shape = each.leaf.value.shape
    local = shape if each.axes is None else [shape[axis] for axis in each.axes]
    return math.prod([*local, *map(lax.axis_size, norms.mesh_axes(each.leaf.value))])


def clip_by_value(
    bound: bounds.Bound | None = None,
    high: bounds.Bound | None = None,
    *,
    low: bounds.Bound | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip each entry to `[-bound, bound]`, or to `[low, high]`: min(max(x, low), high).

    Args:
      bound: the bound on absolute values. Two positional arguments are `low` and
        `high`.
      high: the upper limit: a number, an array that broadcasts to every leaf, or a
        schedule; infinity for none.
      low: the lower limit, likewise.

    Returns:
      A transformation with the metrics of a clip; `norm` is the largest absolute entry.

    Raises:
      TypeError, ValueError: `low` is above `high`; one of the two is missing. In
        `update`: a leaf is complex, and there are two limits.

    An infinite entry becomes the limit, and NaN stays NaN, as in TensorFlow. A limit
    that a leaf's dtype cannot represent is rounded inward.

    Equals `tf.clip_by_value`, `optax.clip`, Keras' `clipvalue` and torch's
    `clip_grad_value_`.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_value(1.0)
      >>> grads = jnp.array([-3.0, 0.5, 3.0])
      >>> print(tx.update(grads, tx.init(grads))[0])
      [-1.   0.5  1. ]
    """
    given = {"bound": bound, "high": high, "low": low}
    if low is None and high is not None:
        bound, low = None, bound  # clip_by_value(low, high)
    if (bound is None) == (low is None) or (low is None) != (high is None):
        listed = ", ".join(
            f"{name}={bounds.short_repr(value)}"
            for name, value in given.items()
            if value is not None
        )
        raise TypeError(
            "clip_by_value takes one bound, as in clip_by_value(1.0), or low and "
            f"high, where infinity means no limit; got {listed or 'nothing'}"
        )
    if bound is None:
        lower, upper = (
            bounds.as_schedule("low", low, -np.inf),
            bounds.as_schedule("high", high, -np.inf),
        )
        _checks.check_order(low, high)
    else:
        lower, upper = (lambda _: None), bounds.as_schedule("bound", bound)

    def act(updates: Any, params: Any, step: Any, memory: Any) -> Any:
        leaves, rebuild = trees.leaves_of(updates)
        bottom, top = lower(step), upper(step)
        clipped = [clipping.clip_entries(leaf, bottom, top) for leaf in leaves]
        metrics = _metrics_of_entries(
            trees.floats_of(updates), trees.floats_of(clipped), bottom, top
        )
        return rebuild(clipped), metrics, memory

    return transformation.with_metrics("clip_by_value", act)


def _metrics_of_entries(
    before: list[jax.Array], after: list[jax.Array], low: Any, high: Any
) -> dict[str, jax.Array]:
    """Return the metrics of clipped entries, whose norm is the largest absolute value.

    Where the limits are numbers, the largest and the smallest entry decide the rest.
    """
    norms.warn_if_local()
    before, after = lax.stop_gradient(
        (before, after)
    )  # a maximum over devices has no derivative
    if np.ndim(high) or (low is not None and np.ndim(low)):
        size, rest = (
            norms.largest(norms.norm(x, None, jnp.inf) for x in each)
            for each in (before, after)
        )
        changes = (
            jnp.any((x != y) & (x == x)) for x, y in zip(before, after, strict=True)
        )
        clipped = norms.largest(change.astype(np.float32) for change in changes) > 0
    elif low is None:
        size = norms.largest(norms.norm(x, None, jnp.inf) for x in before)
        rest = jnp.minimum(size, jnp.asarray(high, size.dtype))
        clipped = size > rest
    else:
        wide = [(x.astype(norms.sum_dtype(x.dtype)), jnp.isnan(x)) for x in before]
        most = norms.largest(
            (norms.maximum(x, is_nan, empty=-jnp.inf) for x, is_nan in wide), -jnp.inf
        )
        least = -norms.largest(
            (norms.maximum(-x, is_nan, empty=-jnp.inf) for x, is_nan in wide), -jnp.inf
        )
        low, high = jnp.asarray(low, most.dtype), jnp.asarray(high, most.dtype)
        size, clipped = (
            jnp.maximum(jnp.maximum(most, -least), 0),
            (most > high) | (least < low),
        )
        ends = jnp.maximum(
            jnp.abs(jnp.clip(most, low, high)), jnp.abs(jnp.clip(least, low, high))
        )
        rest = jnp.where(clipped, ends, size)
    scale, finite = (
        jnp.where(rest < size, rest, 1) / jnp.where(rest < size, size, 1),
        size < jnp.inf,
    )
    return clipping.metrics_of(size, norms.nan_unless(finite, scale), rest) | {
        "clipped": clipped & finite
    }
