"""Clips whose bounds depend neither on the weights nor on past steps."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from clipjax._core.aliases import Axes, Bound, Memory, Ord, Step, Tree
from clipjax._core.bounds import check_order, limit
from clipjax._core.checks import check_ord
from clipjax._core.clip import clip_by_tree_norm, clip_by_unit_norms
from clipjax._core.door import transformation
from clipjax._core.entries import check_limits, clip_entries, metrics_of_entries
from clipjax._core.leaves import Leaf, Leaves, is_float
from clipjax._core.units import axes_of, check_axes, map_units, norms_of, size_of_units


def clip_by_global_norm(
    max_norm: Bound, ord: Ord = None
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of all leaves together: x * min(1, max_norm / norm).

    Args:
      max_norm: the bound: a number, a scalar array or a schedule `step -> bound`.
      ord: the order of the norm: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.

    Returns:
      A transformation with the metrics of a clip; `norm` is that of the whole tree.

    Equals `tf.clip_by_global_norm`, `optax.clip_by_global_norm` and Keras'
    `global_clipnorm`; and torch's `clip_grad_norm_`, except that torch divides by norm
    + 1e-6: for a norm just above 0.01, its result is smaller by 1e-4 of itself.

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
    bound = limit("max_norm", max_norm, scalar=True)
    order = check_ord(ord)

    def act(updates: Leaves, params: Tree, step: Step, memory: Memory, **_: Any) -> Any:
        return *clip_by_tree_norm(updates, bound.at(step), order), memory

    return transformation("clip_by_global_norm", act)


def clip_by_norm(
    max_norm: Bound, axes: Axes = None, *, ord: Ord = None
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of each leaf, or unit: x * min(1, max_norm / |x|).

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
    bound = limit("max_norm", max_norm)
    order = check_ord(ord)
    axes = check_axes(axes)

    def act(updates: Leaves, params: Tree, step: Step, memory: Memory, **_: Any) -> Any:
        of = norms_of(updates.values, axes_of(updates, axes), order)
        return *clip_by_unit_norms(updates, of, bound.at(step), bound.fit), memory

    return transformation("clip_by_norm", act)


def clip_by_rms(
    threshold: Bound, axes: Axes = None
) -> optax.GradientTransformationExtraArgs:
    """Clip the root mean square of each leaf, or unit: x * min(1, threshold / rms(x)).

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
    bound = limit("threshold", threshold)
    axes = check_axes(axes)

    def rms_of(norm: jnp.ndarray, x: jnp.ndarray, reduced: Any) -> jnp.ndarray:
        size = jnp.asarray(size_of_units(x, reduced), norm.dtype)
        return norm / jnp.sqrt(size)

    def act(updates: Leaves, params: Tree, step: Step, memory: Memory, **_: Any) -> Any:
        where = axes_of(updates, axes)
        of = norms_of(updates.values, where)
        of = map_units(rms_of, of, updates.values, where)
        return *clip_by_unit_norms(updates, of, bound.at(step), bound.fit), memory

    return transformation("clip_by_rms", act)


def clip_by_value(
    bound: Bound | None = None,
    high: Bound | None = None,
    *,
    low: Bound | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip each entry to `[-bound, bound]` or `[low, high]`: min(max(x, low), high).

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
    low, high = check_limits(bound, high, low)
    if low is None:
        lowest, highest = None, limit("bound", high)
    else:
        lowest, highest = limit("low", low, -np.inf), limit("high", high, -np.inf)
        check_order(low, high)

    def act(updates: Leaves, params: Tree, step: Step, memory: Memory, **_: Any) -> Any:
        bottom = None if lowest is None else lowest.at(step)
        top = highest.at(step)

        def clip(leaf: Leaf) -> Any:
            is_changed = is_float(leaf.value)
            return clip_entries(leaf, bottom, top) if is_changed else leaf.value

        clipped = updates._replace(values=list(map(clip, updates.each)))
        metrics = metrics_of_entries(updates.floats, clipped.floats, bottom, top)
        return clipped.values, metrics, memory

    return transformation("clip_by_value", act)
