"""Gradient transformations that clip to bounds which do not depend on weights or past steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, overload

import jax
import optax

from clipjax._core.arguments import explained, shown
from clipjax._core.axes import Axes, check_axes
from clipjax._core.bounds import Bound, bound_at, check_order
from clipjax._core.clip_entries import clip_entries
from clipjax._core.dtypes import in_float64
from clipjax._core.members import Memory, with_stats, without_memory
from clipjax._core.mesh import AxisName
from clipjax._core.norms import check_ord
from clipjax._core.rescale import root_of
from clipjax._core.stats import Stats
from clipjax._core.trees import Report, clip_tree, clip_units, size_of
from clipjax._core.where import Where

_Rule = Callable[[Any, Any], tuple[Any, Report]]


class ClipByValueState(NamedTuple):
    """State of :func:`clip_by_value`."""

    clip_by_value: Stats


class ClipByNormState(NamedTuple):
    """State of :func:`clip_by_norm`."""

    clip_by_norm: Stats


class ClipByGlobalNormState(NamedTuple):
    """State of :func:`clip_by_global_norm`."""

    clip_by_global_norm: Stats


class ClipByRmsState(NamedTuple):
    """State of :func:`clip_by_rms`."""

    clip_by_rms: Stats


def _clipping(
    state: type[Any], clip: _Rule, where: Where, axes: Axes = None
) -> optax.GradientTransformationExtraArgs:
    """Make a transformation from `clip(updates, step) -> (updates, report)`."""

    def act(
        updates: Any, memory: Memory, params: Any, step: Any, **extra_args: Any
    ) -> tuple[Any, Report, Memory]:
        del params, extra_args
        return *clip(updates, step), memory

    return with_stats(state, act, without_memory(axes), where=where)


Transformation: TypeAlias = optax.GradientTransformationExtraArgs


@overload
def clip_by_value(bound: Bound, *, where: Where = None, axis_name: AxisName = None) -> Transformation: ...
@overload
def clip_by_value(*, max_delta: Bound, where: Where = None, axis_name: AxisName = None) -> Transformation: ...
@overload
def clip_by_value(
    low: Bound, /, high: Bound, *, where: Where = None, axis_name: AxisName = None
) -> Transformation: ...
@overload
def clip_by_value(
    *, low: Bound, high: Bound, where: Where = None, axis_name: AxisName = None
) -> Transformation: ...
@explained
def clip_by_value(
    bound: Any = None,
    high: Any = None,
    *,
    low: Any = None,
    max_delta: Any = None,
    where: Where = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip each entry to `[-bound, bound]`, or to `[low, high]`.

    Args:
      bound: the bound on absolute values. If `high` is given, the first positional argument is `low` instead.
      high: the upper limit.
      low: the lower limit. Each limit is a number, an array that broadcasts to every leaf, or a schedule
        `step -> limit`; infinity means no limit.
      max_delta: Optax's name for `bound`.
      where: the leaves to clip, as path patterns, a rule or a tree of bools (see :func:`clipjax.box`). None
        selects all. Other leaves are returned unchanged, are not measured and may hold anything.
      axis_name: the mesh axes over which the metrics are taken, in `pmap` and unchecked `shard_map`.

    Returns:
      A transformation whose state holds scalars; `norm` is the largest absolute entry.

    Raises:
      TypeError, ValueError: a limit is NaN or not a number; a single bound is negative; `low` is above
        `high`; one of the two is missing. In `update`: there are two limits, and a leaf is complex.

    Guarantees: no entry is outside its limits, measured in float64 (a limit that the leaf's dtype cannot
    represent is rounded inward); entries within the limits are unchanged, bit for bit. NaN stays NaN, and is
    counted; an infinite entry becomes the limit, as in TensorFlow and Optax.

    Equals `tf.clip_by_value`, `optax.clip`, Keras's `clipvalue` and torch's `clip_grad_value_`.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_value(1.0)
      >>> grads = jnp.array([-3.0, 0.5, 3.0])
      >>> print(tx.update(grads, tx.init(grads))[0])
      [-1.   0.5  1. ]
    """
    limits = {"bound": bound, "low": low, "high": high, "max_delta": max_delta}
    given = {name: value for name, value in limits.items() if value is not None}
    match sorted(given):
        case ["bound"] | ["max_delta"]:
            largest = bound_at(*next(iter(given.items())))

            def clip(updates: Any, step: Any) -> tuple[Any, Report]:
                return clip_entries(updates, None, largest(step), axis_name)

        case ["bound", "high"] | ["high", "low"]:
            low = given.get("low", bound)
            check_order(low, high)
            lower, upper = bound_at("low", low, minimum=None), bound_at("high", high, minimum=None)

            def clip(updates: Any, step: Any) -> tuple[Any, Report]:
                return clip_entries(updates, lower(step), upper(step), axis_name)

        case _:
            listed = ", ".join(f"{name}={shown(value)}" for name, value in given.items()) or "nothing"
            raise TypeError(
                f"clip_by_value takes one bound, as in clip_by_value(1.0), or both low and high, where "
                f"infinity means no limit; got {listed}"
            )

    return _clipping(ClipByValueState, clip, where)


@explained
def clip_by_norm(
    max_norm: Bound,
    *,
    axes: Axes = None,
    ord: float = 2,  # noqa: A002
    specs: Any = None,
    where: Where = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of each leaf, or of each unit along `axes`, to `max_norm`.

    Args:
      max_norm: the bound: a number, an array that broadcasts to the norms, or a schedule.
      axes: the axes that are reduced: entries along them share a norm. None is the whole leaf. Otherwise an
        int or a tuple; a rule `(path, leaf) -> axes` such as `clipjax.fan_in`; or a mapping from path
        patterns (globs for the whole path, such as `"encoder/Dense_0/kernel"`, or for its last components) to
        any of these. The first pattern that matches a leaf applies; leaves that no pattern matches are left
        alone.
      ord: 1, 2, any p >= 1, or `jax.numpy.inf`.
      specs: inside `shard_map`, the tree of `PartitionSpec` or `NamedSharding` of the updates, needed for
        units of leaves that are split. In a `shard_map` over only some axes of a mesh, it may contain the
        other axes.
      where: the leaves to clip, as path patterns, a rule or a tree of bools (see :func:`clipjax.box`). None
        selects all. Other leaves are returned unchanged, are not measured and may hold anything.
      axis_name: the mesh axes that split the norms, in `pmap` and unchecked `shard_map`: names, or a mapping
        from path patterns to names, as in :func:`clip_by_global_norm`.

    Returns:
      A transformation whose state holds scalars; `norm` is the largest of the norms.

    Raises:
      TypeError, ValueError: a bound is negative, NaN or not a number; `ord` is below 1; `axes` has an invalid
        form. In `init`: a leaf does not have an axis; a pattern matches no leaf; no leaf is bounded, unless
        `clipjax.SKIP` asks for that.

    Guarantees: measured in float64, no clipped norm is above `max_norm`, in any dtype, and none is more than
    4 ulp below it; leaves or units within the bound are unchanged, bit for bit; a non-finite entry makes
    every entry that shares its norm NaN; derivatives are correct, and finite at 0.

    Equals `tf.clip_by_norm` with its `axes`, and Keras's `clipnorm`.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_norm(1.0, axes=0)
      >>> grads = jnp.array([[3.0, 0.3], [4.0, 0.4]])
      >>> print(tx.update(grads, tx.init(grads))[0].round(3))
      [[0.6 0.3]
       [0.8 0.4]]
    """
    bound, p, axes = bound_at("max_norm", max_norm), check_ord(ord), check_axes(axes)

    def clip(updates: Any, step: Any) -> tuple[Any, Report]:
        at_step = bound(step)
        return clip_units(updates, lambda _: at_step, axes, p, specs, axis_name)

    return _clipping(ClipByNormState, clip, where, axes)


@explained
def clip_by_global_norm(
    max_norm: Bound,
    *,
    ord: float = 2,  # noqa: A002
    where: Where = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of all leaves together to `max_norm`, with the same factor for every leaf.

    Args:
      max_norm: the bound: a number, a scalar array or a schedule `step -> bound`.
      ord: 1, 2, any p >= 1, or `jax.numpy.inf`.
      where: the leaves to clip, as path patterns, a rule or a tree of bools (see :func:`clipjax.box`). None
        selects all. Other leaves are returned unchanged, are not measured and may hold anything.
      axis_name: the mesh axes that split the tree, in `pmap` and unchecked `shard_map` (`check_vma=False`).
        One or more names apply to every leaf. If some leaves are the same on all devices and others are not,
        such as experts, give a mapping from path patterns to names: `{"experts/*": "expert"}`. Leaves that no
        pattern matches count once. In a checked `shard_map`, the types of the leaves contain the axes.

    Returns:
      A transformation whose state holds the norm, the scale and counts, as scalars.

    Raises:
      TypeError, ValueError: `max_norm` is negative, NaN or not a number; `ord` is below 1.

    Guarantees: measured in float64, the clipped norm is not above `max_norm`, for any dtypes and any mix of
    them; a tree within the bound is unchanged, bit for bit; norms neither overflow nor underflow; a
    non-finite entry makes every entry NaN, never silently 0; derivatives are correct, and finite at 0.

    Equals `tf.clip_by_global_norm`, `optax.clip_by_global_norm`, Keras's `global_clipnorm` and torch's
    `clip_grad_norm_` with its `norm_type`.

    References:
      Pascanu et al., 2013, On the difficulty of training recurrent neural networks, arXiv:1211.5063.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_global_norm(1.0)
      >>> grads = {"w": jnp.array([3.0]), "b": jnp.array([4.0])}
      >>> clipped, state = tx.update(grads, tx.init(grads))
      >>> print(clipped["w"].round(3), clipped["b"].round(3), state.clip_by_global_norm.norm)
      [0.6] [0.8] 5.0
    """
    bound, p = bound_at("max_norm", max_norm, scalar=True), check_ord(ord)

    def clip(updates: Any, step: Any) -> tuple[Any, Report]:
        return clip_tree(updates, bound(step), p, axis_name)

    return _clipping(ClipByGlobalNormState, clip, where)


@explained
def clip_by_rms(
    threshold: Bound,
    *,
    axes: Axes = None,
    specs: Any = None,
    where: Where = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip the root mean square of each leaf, or of each unit along `axes`, to `threshold`.

    Args:
      threshold: the bound on the RMS: a number, an array that broadcasts to the units, or a schedule.
      axes: the axes that are reduced, as in :func:`clip_by_norm`; None is the whole leaf.
      specs: inside `shard_map`, the `PartitionSpec` tree of the updates.
      where: the leaves to clip, as path patterns, a rule or a tree of bools (see :func:`clipjax.box`). None
        selects all. Other leaves are returned unchanged, are not measured and may hold anything.
      axis_name: the mesh axes that split the units, in `pmap` and unchecked `shard_map`.

    Returns:
      A transformation whose state holds scalars; `norm` is the largest norm (not RMS).

    Raises:
      TypeError, ValueError: as for :func:`clip_by_norm`.

    Guarantees: those of :func:`clip_by_norm`, with the bound `threshold * sqrt(entries)`.

    Equals `optax.clip_by_block_rms`.

    References:
      Shazeer and Stern, 2018, Adafactor, arXiv:1804.04235, section 6.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_rms(1.0)
      >>> grads = jnp.array([3.0, -3.0, 3.0, 3.0])
      >>> print(tx.update(grads, tx.init(grads))[0].round(3))
      [ 1. -1.  1.  1.]
    """
    bound, axes = bound_at("threshold", threshold), check_axes(axes)

    def clip(updates: Any, step: Any) -> tuple[Any, Report]:
        at_step = bound(step)

        @functools.cache
        @in_float64
        def of_size(entries: Any) -> jax.Array:
            return at_step * root_of(entries)

        return clip_units(updates, lambda u: of_size(size_of(u)), axes, 2.0, specs, axis_name, "threshold")

    return _clipping(ClipByRmsState, clip, where, axes)
