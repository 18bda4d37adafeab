"""Pure functions on trees of arrays that measure norms or clip.

Leaves that are neither float nor complex (ints, bools, PRNG keys, float0) pass through and do not count
toward a norm; `None` is not a leaf; complex entries count by their absolute value. Norms are accumulated in
float64 and returned in float32 (in float64 if a leaf is float64 or complex128).
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from clipjax._core.arguments import explained, shown
from clipjax._core.axes import Axes, check_axes, is_measured
from clipjax._core.bounds import Bound, bound_at, check_bound, check_order
from clipjax._core.clip_entries import clip_entries
from clipjax._core.dtypes import as_arrays, in_float64, norm_dtype
from clipjax._core.mesh import varying
from clipjax._core.norms import check_ord, norm_of, tree_norm
from clipjax._core.trees import clip_tree, clip_units, units_of

__all__ = [
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "global_norm",
    "leaf_norms",
    "unitwise_norms",
]


T = TypeVar("T")


@in_float64
def _shown(norm: jax.Array, *leaves: Any) -> jax.Array:
    return lax.convert_element_type(norm, norm_dtype([x for x in leaves if is_measured(x)]))


def _number(name: str, bound: Bound, minimum: float | None = 0.0) -> jax.Array:
    if callable(bound):
        raise TypeError(f"{name} must be a number or an array here, not a schedule: got {shown(bound)}")
    check_bound(name, bound, minimum=minimum, forms="a number or an array")
    return bound_at(name, bound, minimum=minimum)(None)


@explained
def global_norm(tree: Any, ord: float = 2) -> jax.Array:  # noqa: A002
    """Measure the norm of all leaves together, as of one long vector.

    Accurate in every precision and for any number of entries: float32 entries up to 3e38 and down to 1e-38,
    bfloat16, and all of float16.

    Args:
      tree: a pytree of arrays of any shapes and dtypes.
      ord: 1, 2, any p >= 1, or `jax.numpy.inf`.

    Returns:
      A scalar, float32 or float64; 0 for a tree without float leaves. NaN if an entry is NaN.

    Raises:
      TypeError, ValueError: `ord` is not a number, or is below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import functional
      >>> float(functional.global_norm({"a": jnp.array([3.0]), "b": jnp.array([[4.0]])}))
      5.0
    """
    tree = as_arrays(tree)
    return _shown(tree_norm(tree, check_ord(ord)), *jax.tree.leaves(tree))


@explained
def leaf_norms(tree: T, ord: float = 2) -> T:  # noqa: A002
    """Measure the norm of each leaf.

    Args:
      tree: a pytree of arrays.
      ord: 1, 2, any p >= 1, or `jax.numpy.inf`.

    Returns:
      A tree of scalars with the same structure, float32 or float64; 0 for a leaf that does not count.

    Raises:
      TypeError, ValueError: `ord` is not a number, or is below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import functional
      >>> functional.leaf_norms([jnp.array([3.0, 4.0]), jnp.array([-2.0])])
      [Array(5., dtype=float32), Array(2., dtype=float32)]
    """
    p = check_ord(ord)

    def measure(leaf: Any) -> jax.Array:
        return _shown(norm_of(leaf, None, p, varying(leaf)), leaf) if is_measured(leaf) else jnp.zeros(())

    return jax.tree.map(measure, as_arrays(tree))


@explained
def unitwise_norms(tree: Any, axes: Axes, ord: float = 2) -> Any:  # noqa: A002
    """Measure the norm of each unit along `axes`.

    Args:
      tree: a pytree of arrays.
      axes: the axes that are reduced: an int, a tuple, None for the whole leaf, a rule such as
        `clipjax.fan_in`, or a mapping from path patterns to these.
      ord: 1, 2, any p >= 1, or `jax.numpy.inf`.

    Returns:
      A tree of the same structure; a leaf of shape `(in, out)` reduced over axis 0 becomes `(out,)`. A leaf
      that is left alone becomes None.

    Raises:
      TypeError, ValueError: `ord` is not a number, or is below 1; `axes` do not fit a leaf; a pattern matches
        no leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import functional
      >>> functional.unitwise_norms(jnp.array([[3.0, 0.0], [4.0, 1.0]]), axes=0)
      Array([5., 1.], dtype=float32)
    """
    tree = as_arrays(tree)
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    norms: list[Any] = [None] * len(leaves)
    p = check_ord(ord)
    for unit in units_of(tree, check_axes(axes), may_bound_nothing=True):
        norm = norm_of(unit.leaf, unit.reduced, p, unit.names)
        norms[unit.position] = _shown(norm if unit.reduced is None else norm.squeeze(unit.reduced), unit.leaf)
    return treedef.unflatten(norms)


@explained
def clip_by_value(tree: T, low: Bound, high: Bound) -> T:
    """Clip each entry to `[low, high]`, like `tf.clip_by_value`.

    A limit that a leaf's dtype cannot represent is rounded inward, so that no entry is outside, measured in
    float64. NaN stays NaN; an infinite entry becomes the limit.

    Args:
      tree: a pytree of real arrays.
      low: the lower limit, a number or an array that broadcasts to every leaf.
      high: the upper limit, likewise.

    Returns:
      The clipped tree: same structure, shapes and dtypes.

    Raises:
      TypeError, ValueError: a limit is NaN or not a number; `low` is above `high`; a leaf is complex.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import functional
      >>> functional.clip_by_value(jnp.array([-3.0, 0.5, 3.0]), -1.0, 1.0)
      Array([-1. ,  0.5,  1. ], dtype=float32)
    """
    check_order(low, high)
    return clip_entries(tree, _number("low", low, None), _number("high", high, None))[0]


@explained
def clip_by_norm(tree: T, max_norm: Bound, axes: Axes = None, ord: float = 2) -> T:  # noqa: A002
    """Clip the norm of each leaf, or of each unit along `axes`, like `tf.clip_by_norm`.

    Args:
      tree: a pytree of arrays.
      max_norm: the bound, a number or an array that broadcasts to the norms.
      axes: the axes that are reduced; None for the whole leaf. See :func:`unitwise_norms`.
      ord: 1, 2, any p >= 1, or `jax.numpy.inf`.

    Returns:
      The clipped tree. Measured in float64, no norm is above `max_norm`; leaves or units within the bound are
      unchanged, bit for bit; a non-finite entry makes every entry that shares its norm NaN.

    Raises:
      TypeError, ValueError: `max_norm` is negative, NaN or not a number, or does not fit the norms; `ord` is
        below 1; `axes` do not fit a leaf; a pattern matches no leaf; no leaf is clipped.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import functional
      >>> print(functional.clip_by_norm(jnp.array([[3.0, 4.0], [0.3, 0.4]]), 1.0, axes=1).round(3))
      [[0.6 0.8]
       [0.3 0.4]]
    """
    bound = _number("max_norm", max_norm)
    return clip_units(tree, lambda _: bound, check_axes(axes), check_ord(ord))[0]


@explained
def clip_by_global_norm(
    tree: T,
    max_norm: Bound,
    ord: float = 2,  # noqa: A002
    norm: jax.Array | None = None,
) -> tuple[T, jax.Array]:
    """Clip the norm of all leaves together, like `tf.clip_by_global_norm`.

    Args:
      tree: a pytree of arrays.
      max_norm: the bound, a number or a scalar array.
      ord: 1, 2, any p >= 1, or `jax.numpy.inf`.
      norm: the global norm, if it is already known (TensorFlow's `use_norm`). It is used without a check, and
        the clipped norm is only as exact as this value.

    Returns:
      The clipped tree and its norm before clipping. Measured in float64, the clipped norm is not above
      `max_norm`; a tree within the bound is unchanged, bit for bit; a norm that is not finite makes every
      entry NaN, as in TensorFlow.

    Raises:
      TypeError, ValueError: `max_norm` is negative, NaN, not a number or not a scalar; `ord` is below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> from clipjax import functional
      >>> clipped, norm = functional.clip_by_global_norm([jnp.array([3.0]), jnp.array([4.0])], 1.0)
      >>> print(norm, [x.round(3) for x in clipped])
      5.0 [Array([0.6], dtype=float32), Array([0.8], dtype=float32)]
    """
    given = None if norm is None else jnp.asarray(norm)
    clipped, report = clip_tree(tree, _number("max_norm", max_norm), check_ord(ord), norm=given)
    return clipped, _shown(report.norm, *jax.tree.leaves(clipped))
