"""Clips whose thresholds depend neither on the weights nor on past steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from clipjax._core.aliases import Axes, Bound, Memory, Ord, Step, Tree
from clipjax._core.bounds import check_bound, check_ord
from clipjax._core.clip import (
    check_limits,
    clip_by_tree_norm,
    clip_by_unit_norms,
    clip_entries,
    metrics_of_entries,
)
from clipjax._core.door import transformation
from clipjax._core.leaves import Leaves
from clipjax._core.norms import axes_of, check_axes, map_units, norms_of, size_of_units


def clip_by_global_norm(
    max_norm: Bound, *, ord: Ord = None
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of all leaves together.

        x * min(1, max_norm / norm)

    All leaves are multiplied by one factor, so that the direction of the gradient stays
    the same. For 16-bit leaves the factor is up to 0.4% smaller, so that rounding does
    not put their norm above the threshold. Use it when some steps have gradients far
    larger than usual, as in recurrent networks and transformers: it is the usual first
    choice.

    Args:
      max_norm: the threshold for the norm, a scalar `Bound`.
      ord: the order of the norm: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.

    Returns:
      A gradient transformation with the metrics of a clip, where `norm` is the norm of
      all leaves before the clip.

    Equals `tf.clip_by_global_norm` and Keras' `global_clipnorm`. Equals
    `optax.clip_by_global_norm` for finite gradients in float32. It differs from Optax
    where one element is infinite: Optax makes that element NaN and all others 0, and
    here all elements become NaN. It also differs for 16-bit leaves: Optax sums their
    squares in 16 bits, so that the norm of the result may be above the threshold.
    torch's `clip_grad_norm_` divides by norm + 1e-6 in place of the norm. Its result is
    therefore 0.01% smaller if the norm is 0.01.

    References:
      Pascanu et al., 2013, On the difficulty of training recurrent neural networks,
      arXiv:1211.5063.

    See Also:
      :func:`clip_by_norm` clips each leaf by its own norm; :func:`zclip` and
      :func:`autoclip` find the threshold from past norms;
      :func:`functional.clip_by_global_norm` clips a tree directly.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_global_norm(1.0)
      >>> grads = {"w": jnp.array([3.0]), "b": jnp.array([4.0])}
      >>> clipped, state = tx.update(grads, tx.init(grads))
      >>> metrics = clipjax.metrics(state)
      >>> print(clipped["w"].round(3), metrics["clip_by_global_norm/norm"])
      [0.6] 5.0
    """
    bound = check_bound("max_norm", max_norm, scalar=True)
    order = check_ord(ord)

    def act(
        updates: Leaves, params: Tree, step: Step, memory: Memory, /, **_: Any
    ) -> Any:
        return *clip_by_tree_norm(updates, bound.at(step), order), memory

    return transformation("clip_by_global_norm", act)


def clip_by_norm(
    max_norm: Bound, *, axes: Axes = None, ord: Ord = None
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of each leaf, or of each unit.

        x * min(1, max_norm / |x|)

    Leaves, or units, that are within the threshold do not change when another one is
    above it. Use it when the gradients of a few layers are large and the other layers
    should learn at full speed. The direction of the whole gradient changes.

    Args:
      max_norm: the threshold for each norm, a `Bound`. An array broadcasts to the norms
        of every leaf, in which the reduced axes have size 1.
      axes: the axes that are reduced, as `Axes`. None, the default, gives each leaf one
        norm.
      ord: the order of the norm: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.

    Returns:
      A gradient transformation with the metrics of a clip, where `norm` is the largest
      of the norms before the clip.

    For finite gradients, equals Keras' `clipnorm`, which clips each variable, and
    `tf.clip_by_norm` of each leaf. With `axes`, TensorFlow also clips vectors, and this
    function leaves them as they are.

    See Also:
      :func:`clip_by_global_norm` clips all leaves by one norm;
      :func:`clip_by_group_norm` clips groups of leaves; :func:`adaptive_grad_clip`
      compares with the norm of the weights.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_norm(1.0, axes=0)
      >>> grads = jnp.array([[3.0, 0.3], [4.0, 0.4]])
      >>> print(tx.update(grads, tx.init(grads))[0].round(3))
      [[0.6 0.3]
       [0.8 0.4]]
    """
    bound = check_bound("max_norm", max_norm)
    order = check_ord(ord)
    axes = check_axes(axes)

    def act(
        updates: Leaves, params: Tree, step: Step, memory: Memory, /, **_: Any
    ) -> Any:
        of = norms_of(updates.values, axes_of(updates, axes), order)
        return *clip_by_unit_norms(updates, of, bound.at(step), bound.name), memory

    return transformation("clip_by_norm", act)


def clip_by_rms(
    threshold: Bound, *, axes: Axes = None
) -> optax.GradientTransformationExtraArgs:
    """Clip the root mean square (RMS) of each leaf, or of each unit.

        x * min(1, threshold / rms(x)),  rms(x) = |x| / sqrt(number of elements)

    An RMS does not grow with the size of a leaf, so that one threshold suits small and
    large leaves. Use it to clip the updates of an optimizer with a scale of its own,
    such as Adam, in front of the learning rate, as Adafactor does:
    `optax.chain(optax.scale_by_adam(), clipjax.clip_by_rms(1.0),
    optax.scale_by_learning_rate(1e-3))`. After the learning rate, updates are too small
    to be clipped.

    Args:
      threshold: the threshold for each RMS, a `Bound`. An array broadcasts to the units
        of every leaf.
      axes: the axes that are reduced, as `Axes`. None, the default, gives each leaf one
        RMS.

    Returns:
      A gradient transformation with the metrics of a clip, where `norm` is the largest
      RMS before the clip.

    Equals Adafactor's update clipping and `optax.clip_by_block_rms`. It differs from
    Optax where the threshold is 0, for which Optax returns NaN for gradients of 0, and
    where an element is infinite: Optax makes that element NaN and the others 0, and
    here all elements of the unit become NaN.

    References:
      Shazeer and Stern, 2018, Adafactor: adaptive learning rates with sublinear memory
      cost, arXiv:1804.04235.

    See Also:
      :func:`clip_by_norm` clips the norm; :func:`relative_update` gives updates the
      norm of the weights.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_rms(1.0)
      >>> grads = jnp.array([2.0, 2.0, 2.0, 2.0])
      >>> print(tx.update(grads, tx.init(grads))[0].round(3))
      [1. 1. 1. 1.]
    """
    bound = check_bound("threshold", threshold)
    axes = check_axes(axes)

    def rms_of(norm: jax.Array, x: jax.Array, reduced: Any) -> jax.Array:
        size = jnp.asarray(size_of_units(x, reduced), norm.dtype)
        return norm / jnp.sqrt(size)

    def act(
        updates: Leaves, params: Tree, step: Step, memory: Memory, /, **_: Any
    ) -> Any:
        where = axes_of(updates, axes)
        of = norms_of(updates.values, where)
        of = map_units(rms_of, of, updates.values, where)
        return *clip_by_unit_norms(updates, of, bound.at(step), bound.name), memory

    return transformation("clip_by_rms", act)


def clip_by_value(
    bound: Bound | None = None,
    high: Bound | None = None,
    *,
    low: Bound | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip each element to `[-bound, bound]`, or to `[low, high]`.

        min(max(x, low), high)

    Each element is clipped by itself, so that the direction of the gradient changes.
    Use it when single elements are extreme, and a clip by norm would scale down all
    other elements with them, or to reproduce a published training run.

    Args:
      bound: the threshold for absolute values, a `Bound`; an array broadcasts to every
        leaf. If you also pass `high`, and no `low`, this argument is `low`, as in
        `clip_by_value(-1.0, 2.0)`.
      high: the upper threshold, a `Bound` of any sign. Infinity means no upper
        threshold.
      low: the lower threshold, a `Bound` of any sign. Minus infinity means no lower
        threshold.

    Returns:
      A gradient transformation with the metrics of a clip, where `norm` is the largest
      absolute element before the clip.

    Raises:
      TypeError: `low` is given without `high`, or no threshold is given; in
        `init` or `update`, a leaf is complex and there are two thresholds.
      ValueError: `low` is above `high`.

    An infinite element becomes the threshold, and NaN stays NaN. A complex element
    whose absolute value is infinite, or above 1.8e19 in complex64, becomes NaN.

    Equals `tf.clip_by_value`, `optax.clip`, Keras' `clipvalue` and torch's
    `clip_grad_value_`, except that integers pass through, and that a threshold which
    the dtype of a leaf cannot represent is rounded toward the inside of the interval.
    In float32, 0.1 becomes 0.09999999 here, and 0.1 + 1.5e-9 elsewhere.

    See Also:
      :func:`clip_by_norm` keeps the direction of each leaf, and
      :func:`clip_by_global_norm` that of the whole gradient; :func:`box` is the
      projection of weights.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_value(1.0)
      >>> grads = jnp.array([-3.0, 0.5, 3.0])
      >>> print(tx.update(grads, tx.init(grads))[0])
      [-1.   0.5  1. ]
    """
    lowest, highest = check_limits(bound, high, low, check_bound)

    def act(
        updates: Leaves, params: Tree, step: Step, memory: Memory, /, **_: Any
    ) -> Any:
        bottom = None if lowest is None else lowest.at(step)
        top = highest.at(step)
        values = [clip_entries(leaf, bottom, top) for leaf in updates.each]
        clipped = updates._replace(values=values)
        metrics = metrics_of_entries(updates.inexact, clipped.inexact, bottom, top)
        return updates.rebuild(values), metrics, memory

    return transformation("clip_by_value", act)
