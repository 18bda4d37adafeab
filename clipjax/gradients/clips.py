"""Clips whose bounds depend neither on the weights nor on past steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import optax

from clipjax import _core
from clipjax._core import Axes


def clip_by_global_norm(
    max_norm: optax.ScalarOrSchedule, *, ord: float | None = None
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of all leaves together: each is multiplied by min(1, max_norm / norm).

    Args:
      max_norm: the bound: a number, a scalar array or a schedule `step -> bound`.
      ord: the order of the norm: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.

    Returns:
      A transformation with the metrics of a clip; `norm` is that of the whole tree.

    Raises:
      TypeError, ValueError: `max_norm` is negative, NaN or not a number; `ord` is below 1.

    Equals `tf.clip_by_global_norm`, `optax.clip_by_global_norm`, Keras' `global_clipnorm` and torch's
    `clip_grad_norm_`.

    References:
      Pascanu et al., 2013, On the difficulty of training recurrent neural networks, arXiv:1211.5063.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_global_norm(1.0)
      >>> grads = {"w": jnp.array([3.0]), "b": jnp.array([4.0])}
      >>> clipped, state = tx.update(grads, tx.init(grads))
      >>> metrics = clipjax.metrics(state)
      >>> print(clipped["w"].round(3), metrics["clip_by_global_norm/norm"])
      [0.6] 5.0
    """
    bound, order = _core.as_schedule("max_norm", max_norm, scalar=True), _core.check_ord(ord)

    def act(updates: Any, params: Any, step: Any, memory: Any) -> Any:
        return *_core.clip_tree(updates, bound(step), order), memory

    return _core.with_metrics("clip_by_global_norm", act)


def clip_by_norm(
    max_norm: optax.ScalarOrSchedule,
    *,
    axes: Axes = None,
    ord: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of each leaf, or of each unit along `axes`: x * min(1, max_norm / |x|).

    Args:
      max_norm: the bound: a number, an array that broadcasts to the norms, whose reduced axes have size 1, or a
        schedule.
      axes: the axes that are reduced, where ints are for leaves of rank 2 and more. None: each leaf has one norm.
      ord: the order of the norm: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.

    Returns:
      A transformation with the metrics of a clip; `norm` is the largest of the norms.

    Raises:
      TypeError, ValueError: `max_norm` is negative, NaN or not a number, or does not fit the norms; `ord` is
        below 1; `axes` is invalid, or applies to no leaf.

    Equals `tf.clip_by_norm` with its `axes` for matrices, and Keras' `clipnorm`.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_norm(1.0, axes=0)
      >>> grads = jnp.array([[3.0, 0.3], [4.0, 0.4]])
      >>> print(tx.update(grads, tx.init(grads))[0].round(3))
      [[0.6 0.3]
       [0.8 0.4]]
    """
    bound, order, axes = _core.as_schedule("max_norm", max_norm), _core.check_ord(ord), _core.check_axes(axes)

    def act(updates: Any, params: Any, step: Any, memory: Any) -> Any:
        return *_core.clip_units(updates, axes, bound(step), order), memory

    return _core.with_metrics("clip_by_norm", act)


def clip_by_rms(threshold: optax.ScalarOrSchedule, *, axes: Axes = None) -> optax.GradientTransformationExtraArgs:
    """Clip the root mean square of each leaf, or of each unit along `axes`: x * min(1, threshold / rms(x)).

    Args:
      threshold: the bound on the RMS: a number, an array that broadcasts to the units, or a schedule.
      axes: the axes that are reduced, as in :func:`clip_by_norm`. None: each leaf has one RMS.

    Returns:
      A transformation with the metrics of a clip; `norm` is the largest RMS.

    Raises:
      TypeError, ValueError: `threshold` is negative, NaN or not a number, or does not fit the units; `axes` is
        invalid, or applies to no leaf.

    Equals `optax.clip_by_block_rms` and Adafactor's update clipping.

    References:
      Shazeer and Stern, 2018, Adafactor: adaptive learning rates with sublinear memory cost, arXiv:1804.04235.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_rms(1.0)
      >>> grads = jnp.array([2.0, 2.0, 2.0, 2.0])
      >>> print(tx.update(grads, tx.init(grads))[0].round(3))
      [1. 1. 1. 1.]
    """
    bound, axes = _core.as_schedule("threshold", threshold), _core.check_axes(axes)

    def root(units: _core.Units) -> float:
        return max(_core.entries_per_unit(units), 1) ** 0.5

    def act(updates: Any, params: Any, step: Any, memory: Any) -> Any:
        return *_core.clip_units(updates, axes, bound(step), name="threshold", size_of=root), memory

    return _core.with_metrics("clip_by_rms", act)


def clip_by_value(
    bound: optax.ScalarOrSchedule | None = None,
    high: optax.ScalarOrSchedule | None = None,
    *,
    low: optax.ScalarOrSchedule | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip each entry to `[-bound, bound]`, or to `[low, high]`: min(max(x, low), high).

    Args:
      bound: the bound on absolute values. Two positional arguments are `low` and `high`.
      high: the upper limit: a number, an array that broadcasts to every leaf, or a schedule; infinity for none.
      low: the lower limit, likewise.

    Returns:
      A transformation with the metrics of a clip; `norm` is the largest absolute entry.

    Raises:
      TypeError, ValueError: a limit is NaN or not a number; `bound` is negative; `low` is above `high`; one of
        the two is missing. In `update`: a leaf is complex, and there are two limits.

    An infinite entry becomes the limit, and NaN stays NaN, as in TensorFlow. A limit that a leaf's dtype cannot
    represent is rounded inward.

    Equals `tf.clip_by_value`, `optax.clip`, Keras' `clipvalue` and torch's `clip_grad_value_`.

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
        listed = ", ".join(f"{name}={_core.short_repr(value)}" for name, value in given.items() if value is not None)
        raise TypeError(
            "clip_by_value takes one bound, as in clip_by_value(1.0), or low and high, where infinity means no "
            f"limit; got {listed or 'nothing'}"
        )
    if bound is None:
        _core.check_order(low, high)
        lower, upper = _core.as_schedule("low", low, -np.inf), _core.as_schedule("high", high, -np.inf)
    else:
        lower, upper = (lambda _: None), _core.as_schedule("bound", bound)

    def act(updates: Any, params: Any, step: Any, memory: Any) -> Any:
        leaves, rebuild = _core.leaves_of(updates)
        bottom, top = lower(step), upper(step)
        clipped = [_core.clip_entries(leaf, bottom, top) for leaf in leaves]
        before, after = _core.floats_of(updates), _core.floats_of(clipped)
        metrics = _core.metrics_of_entries(before, after, top if bottom is None else None)
        return rebuild(clipped), metrics, memory

    return _core.with_metrics("clip_by_value", act)
