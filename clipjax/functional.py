"""Pure functions on trees of arrays that measure norms or clip.

`axes` are literal here, as in NumPy: an int or a tuple applies to leaves of every rank.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from clipjax._core.aliases import Axes, Ord, Tree
from clipjax._core.bounds import (
    check_fits,
    constant,
    fit_bound,
    is_real,
)
from clipjax._core.checks import check_ord
from clipjax._core.clip import clip_by_tree_norm, clip_by_unit_norms
from clipjax._core.entries import clip_entries, constant_limits
from clipjax._core.leaves import flatten, is_float
from clipjax._core.norms import norm as norm_of
from clipjax._core.norms import sum_dtype, tree_norm, warn_if_local
from clipjax._core.units import axes_of, literal_axes, norms_of

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

    Args:
      tree: a pytree of arrays.
      ord: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.

    Returns:
      A scalar, float32 or float64; 0 for a tree without float leaves.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import functional
      >>> float(functional.global_norm([jnp.array([3.0]), jnp.array([[4.0]])]))
      5.0
    """
    warn_if_local()
    return tree_norm(flatten(tree).floats, check_ord(ord))


def leaf_norms(tree: T, *, ord: Ord = None) -> T:
    """Measure the norm of each leaf.

    Args:
      tree: a pytree of arrays.
      ord: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.

    Returns:
      A tree of scalars with the same structure; 0 for a leaf that has no norm.

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
        [norm_of(x, None, order) if is_float(x) else zero for x in leaves.values]
    )


def unitwise_norms(
    tree: Tree, axes: Axes, *, ord: Ord = None, keepdims: bool = False
) -> Tree:
    """Measure the norm of each unit along `axes`.

    Args:
      tree: a pytree of arrays.
      axes: the axes that are reduced, in leaves of every rank, biases too.
      ord: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.
      keepdims: whether reduced axes stay, with size 1, as bounds for these units have
        them.

    Returns:
      A tree of the same structure; a leaf of shape (in, out) reduced over axis 0
      becomes (out,), or (1, out) with `keepdims`, and a leaf without units None.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import functional
      >>> functional.unitwise_norms(jnp.array([[3.0, 0.0], [4.0, 1.0]]), axes=0)
      Array([5., 1.], dtype=float32)
    """
    warn_if_local()
    leaves = flatten(tree)
    where = axes_of(leaves, literal_axes(axes))
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
    """Clip each element to `[-bound, bound]` or `[low, high]`, like `tf.clip_by_value`.

    Args:
      tree: a pytree of real arrays.
      bound: the bound on absolute values, a number or an array that broadcasts to every
        leaf. Two positional arguments are `low` and `high`.
      high: the upper limit, likewise.
      low: the lower limit, likewise.

    Returns:
      The clipped tree. NaN stays NaN; an infinite element becomes the limit.

    Raises:
      TypeError, ValueError: a limit is NaN or not a number; `low` is above `high`; one
        of the two is missing; a leaf is complex, and there are two.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import functional
      >>> functional.clip_by_value(jnp.array([-3.0, 0.5, 3.0]), 1.0)
      Array([-1. ,  0.5,  1. ], dtype=float32)
    """
    limits = constant_limits(bound, high, low)
    leaves = flatten(tree)
    return leaves.rebuild(
        [
            clip_entries(leaf, *limits) if is_float(leaf.value) else leaf.value
            for leaf in leaves.each
        ]
    )


def clip_by_norm(
    tree: T, max_norm: ArrayLike, axes: Axes = None, *, ord: Ord = None
) -> T:
    """Clip the norm of each leaf, or of each unit along `axes`, like `tf.clip_by_norm`.

    Args:
      tree: a pytree of arrays.
      max_norm: the bound, a number or an array that broadcasts to the norms.
      axes: the axes that are reduced, in leaves of every rank, biases too; None for the
        whole leaf.
      ord: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.

    Returns:
      The clipped tree.

    Raises:
      TypeError, ValueError: `max_norm` is negative, NaN or not a number, or does not
        fit the norms; `axes` do not fit a leaf, or apply to none.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import functional
      >>> x = jnp.array([[3.0, 4.0], [0.3, 0.4]])
      >>> print(functional.clip_by_norm(x, 1.0, axes=1).round(3))
      [[0.6 0.8]
       [0.3 0.4]]
    """
    warn_if_local()
    bound = constant("max_norm", max_norm)
    leaves = flatten(tree)
    where = axes_of(leaves, literal_axes(axes))
    of = norms_of(leaves.values, where, check_ord(ord))
    fit = functools.partial(fit_bound, "max_norm")
    return leaves.rebuild(clip_by_unit_norms(leaves, of, bound, fit)[0])


def clip_by_global_norm(
    tree: T,
    max_norm: ArrayLike,
    *,
    ord: Ord = None,
    norm: ArrayLike | None = None,
) -> tuple[T, jax.Array]:
    """Clip the norm of all leaves together, like `tf.clip_by_global_norm`.

    Args:
      tree: a pytree of arrays.
      max_norm: the bound, a number or a scalar array.
      ord: 1, 2 (the default), any p >= 1, or `jax.numpy.inf`.
      norm: the global norm, if it is known: TensorFlow's `use_norm`, or one that is
        summed over devices by hand.

    Returns:
      The clipped tree, and its norm before.

    Raises:
      TypeError, ValueError: `max_norm` is negative, NaN, not a number or not a scalar;
        `norm` is negative or not a scalar.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import functional
      >>> tree = [jnp.array([3.0]), jnp.array([4.0])]
      >>> clipped, norm = functional.clip_by_global_norm(tree, 1.0)
      >>> print(norm, [x.round(3) for x in clipped])
      5.0 [Array([0.6], dtype=float32), Array([0.8], dtype=float32)]
    """
    warn_if_local()
    bound = constant("max_norm", max_norm, scalar=True)
    order = check_ord(ord)
    if norm is not None:
        norm = _given_norm(norm)
    leaves = flatten(tree)
    values, metrics = clip_by_tree_norm(leaves, bound, order, norm)
    return leaves.rebuild(values), metrics["norm"]


def _given_norm(norm: ArrayLike) -> jax.Array:
    """Return a norm that a user gave, where NaN is one that is not finite."""
    check_fits("norm", norm, (), "the whole tree")
    is_known = is_real(norm) and not isinstance(norm, jax.core.Tracer)
    if not (is_known and np.isnan(float(jax.device_get(norm)))):
        norm = constant("norm", norm)
    return jnp.asarray(norm, sum_dtype(jnp.result_type(norm)))
