"""Pure functions on trees of arrays that measure norms or clip.

The functions keep no state and take no schedules. As in NumPy, an int or a tuple as
`axes` applies to leaves of every rank.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from clipjax._core.aliases import Axes, Ord, Tree
from clipjax._core.bounds import check_fits, check_flag, check_ord, is_real, number
from clipjax._core.clip import check_limits, clip, clip_by_tree_norm, clip_entries
from clipjax._core.leaves import flatten, is_inexact
from clipjax._core.norms import (
    axes_of,
    check_axes,
    norm_of,
    norms_of,
    sum_dtype,
    tree_norm,
    warn_if_local,
)

__all__ = [
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "global_norm",
    "leaf_norms",
    "unitwise_norms",
]

T = TypeVar("T")


def global_norm(tree: Tree, *, ord: Ord = None) -> jax.Array:
    """Measure the norm of all leaves together, as of one long vector.

        (sum of |x|^ord)^(1/ord)

    Use it for logging outside of an optimizer, and to clip by hand.

    Args:
      tree: a pytree of arrays.
      ord: the order of the norm: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.

    Returns:
      A scalar, which is float64 if a leaf is float64 or complex128, and float32
      otherwise. It is 0 for a tree without float leaves.

    Equals `tf.linalg.global_norm` and, for float32 leaves, `optax.global_norm`. Optax
    adds the squares of 16-bit leaves in 16 bits, and measures 512 instead of 548 for
    300 bfloat16 leaves of 1,000 ones.

    See Also:
      :func:`functional.leaf_norms` and :func:`functional.unitwise_norms` measure parts
      of the tree; :func:`record_norms` logs norms from a chain.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import functional
      >>> float(functional.global_norm([jnp.array([3.0]), jnp.array([[4.0]])]))
      5.0
    """
    warn_if_local()
    return tree_norm(flatten(tree).inexact, check_ord(ord))


def leaf_norms(tree: T, *, ord: Ord = None) -> T:
    """Measure the norm of each leaf.

    Use it to see which layer has the largest gradient.

    Args:
      tree: a pytree of arrays.
      ord: the order of the norms: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.

    Returns:
      A tree of scalars with the same structure; 0 for a leaf that has no norm, such as
      an array of ints.

    See Also:
      :func:`functional.global_norm` measures all leaves together; :func:`record_norms`
      logs the norms of leaves from a chain.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import functional
      >>> functional.leaf_norms([jnp.array([3.0, 4.0]), jnp.array([-2.0])])
      [Array(5., dtype=float32), Array(2., dtype=float32)]
    """
    warn_if_local()
    order = check_ord(ord)
    leaves = flatten(tree)
    zero = jnp.zeros((), np.float32)
    return leaves.rebuild(
        [norm_of(x, None, order) if is_inexact(x) else zero for x in leaves.values]
    )


def unitwise_norms(
    tree: Tree, *, axes: Axes, ord: Ord = None, keepdims: bool = False
) -> Tree:
    """Measure the norm of each unit along `axes`.

    Use it to choose a bound for :func:`max_norm`, and to write a clip or a projection
    by hand.

    Args:
      tree: a pytree of arrays.
      axes: the axes that are reduced, as `Axes`, in leaves of every rank, biases
        included.
      ord: the order of the norms: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.
      keepdims: whether the result keeps the reduced axes, with size 1, so that it has
        the shape of a bound for these units; False by default.

    Returns:
      A tree of the same structure. For a leaf of shape (in, out) that is reduced over
      axis 0, it has an array of shape (out,), or (1, out) with `keepdims`. For a leaf
      without units, it has None.

    Raises:
      TypeError: `keepdims` is not a bool.
      ValueError: `axes` do not fit a leaf, or apply to no leaf.

    See Also:
      :func:`functional.leaf_norms` measures whole leaves; :func:`violations` lists
      units above a bound.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import functional
      >>> functional.unitwise_norms(jnp.array([[3.0, 0.0], [4.0, 1.0]]), axes=0)
      Array([5., 1.], dtype=float32)
    """
    warn_if_local()
    check_flag("keepdims", keepdims)
    leaves = flatten(tree)
    where = axes_of(leaves, check_axes(axes), least_rank=0)
    measured: list[Any] = norms_of(leaves.values, where, check_ord(ord))
    for i, (norm, x, reduced) in enumerate(
        zip(measured, leaves.values, where, strict=True)
    ):
        if reduced is None and keepdims:
            measured[i] = norm.reshape((1,) * x.ndim)
        elif isinstance(reduced, tuple) and not keepdims:
            measured[i] = norm.squeeze(reduced)
    return leaves.rebuild(measured)


def clip_by_value(
    tree: T,
    bound: ArrayLike | None = None,
    high: ArrayLike | None = None,
    *,
    low: ArrayLike | None = None,
) -> T:
    """Clip each element to `[-bound, bound]`, or to `[low, high]`.

        min(max(x, low), high)

    Use it to port code that calls `tf.clip_by_value`, or to clip outside of an
    optimizer.

    Args:
      tree: a pytree of arrays. With two thresholds, the arrays must be real.
      bound: the threshold for absolute values, a number or an array that broadcasts to
        every leaf. If you also pass `high`, and no `low`, this argument is `low`.
      high: the upper threshold, a number or an array. Infinity means no upper
        threshold.
      low: the lower threshold, a number or an array. Minus infinity means no lower
        threshold.

    Returns:
      The clipped tree. NaN stays NaN; an infinite element becomes the threshold, or
      NaN if it is complex.

    Raises:
      TypeError: `low` is given without `high`, or no threshold is given; a threshold is
        not a number, or is a schedule; a leaf is complex and there are two
        thresholds.
      ValueError: a threshold is NaN, or does not fit a leaf; `low` is above `high`.

    Equals `tf.clip_by_value` of each leaf, except that integers pass through, and that
    a threshold which the dtype of a leaf cannot represent is rounded toward the inside
    of the interval.

    See Also:
      :func:`clip_by_value` is the transformation; :func:`functional.clip_by_norm` keeps
      the direction of each leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import functional
      >>> functional.clip_by_value(jnp.array([-3.0, 0.5, 3.0]), 1.0)
      Array([-1. ,  0.5,  1. ], dtype=float32)
    """
    limits = check_limits(bound, high, low, functools.partial(number, scalar=False))
    leaves = flatten(tree)
    return leaves.rebuild([clip_entries(leaf, *limits) for leaf in leaves.each])


def clip_by_norm(
    tree: T, max_norm: ArrayLike, *, axes: Axes = None, ord: Ord = None
) -> T:
    """Clip the norm of each leaf, or of each unit along `axes`.

        x * min(1, max_norm / |x|)

    Use it to port code that calls `tf.clip_by_norm`, or to clip outside of an
    optimizer.

    Args:
      tree: a pytree of arrays.
      max_norm: the threshold for each norm, a number or an array that broadcasts to the
        norms.
      axes: the axes that are reduced, as `Axes`, in leaves of every rank, biases
        included. None, the default, gives each leaf one norm.
      ord: the order of the norms: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.

    Returns:
      The clipped tree.

    Raises:
      TypeError: `max_norm` is not a number, or is a schedule.
      ValueError: `max_norm` is negative or NaN, or does not fit the norms; `axes` do
        not fit a leaf, or apply to no leaf.

    Equals `tf.clip_by_norm` of each leaf if all elements are finite.

    See Also:
      :func:`clip_by_norm` is the transformation; :func:`functional.clip_by_global_norm`
      clips all leaves together.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import functional
      >>> x = jnp.array([[3.0, 4.0], [0.3, 0.4]])
      >>> print(functional.clip_by_norm(x, 1.0, axes=1).round(3))
      [[0.6 0.8]
       [0.3 0.4]]
    """
    warn_if_local()
    bound = number("max_norm", max_norm, "[0, inf]", scalar=False)
    leaves = flatten(tree)
    where = axes_of(leaves, check_axes(axes), least_rank=0)
    of = norms_of(leaves.values, where, check_ord(ord))
    values, _ = clip(leaves, of, [bound] * len(of))
    return leaves.rebuild(values)


def clip_by_global_norm(
    tree: T,
    max_norm: ArrayLike,
    *,
    ord: Ord = None,
    norm: ArrayLike | None = None,
) -> tuple[T, jax.Array]:
    """Clip the norm of all leaves together, and also return the norm before the clip.

        x * min(1, max_norm / norm)

    Use it to port code that calls `tf.clip_by_global_norm`, and for training loops
    without Optax.

    Args:
      tree: a pytree of arrays.
      max_norm: the threshold for the norm, a number or a scalar array.
      ord: the order of the norm: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.
      norm: the norm of the tree, a scalar, if you have it already. This is TensorFlow's
        `use_norm`, and may be a norm that you have summed over devices by hand. If it
        is None, the default, the function measures the norm.

    Returns:
      The clipped tree, and its norm before the clip.

    Raises:
      TypeError: `max_norm` is not a scalar, or is a schedule; `norm` is not a number.
      ValueError: `max_norm` is negative or NaN; `norm` is negative or not a scalar.

    Equals `tf.clip_by_global_norm`, which takes lists of tensors.

    See Also:
      :func:`clip_by_global_norm` is the transformation; :func:`functional.global_norm`
      only measures.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import functional
      >>> tree = [jnp.array([3.0]), jnp.array([4.0])]
      >>> clipped, norm = functional.clip_by_global_norm(tree, 1.0)
      >>> print(norm, [x.round(3) for x in clipped])
      5.0 [Array([0.6], dtype=float32), Array([0.8], dtype=float32)]
    """
    warn_if_local()
    bound = number("max_norm", max_norm, "[0, inf]")
    order = check_ord(ord)
    if norm is not None:
        norm = _given_norm(norm)
    clipped, metrics = clip_by_tree_norm(flatten(tree), bound, order, norm)
    return clipped, metrics["norm"]


def _given_norm(norm: ArrayLike) -> jax.Array:
    """Return a norm that a user gave, where NaN stands for one that is not finite."""
    check_fits("norm", norm, (), "the whole tree")
    is_known = is_real(norm) and not isinstance(norm, jax.core.Tracer)
    if not (is_known and np.isnan(float(jax.device_get(norm)))):
        norm = number("norm", norm, "[0, inf]")
    return jnp.asarray(norm, sum_dtype(jnp.result_type(norm)))
