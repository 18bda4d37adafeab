"""Bounds at a quantile of the norms of past steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax._core.arguments import explained
from clipjax._core.bounds import check_count, check_number
from clipjax._core.dtypes import wide
from clipjax._core.members import Memory
from clipjax._core.mesh import AxisName
from clipjax._core.stats import Stats
from clipjax._core.where import Where
from clipjax.gradients.past import clip_by_past, length_of, no_norms, no_ring, one_more


class AutoclipState(NamedTuple):
    """State of :func:`autoclip`."""

    autoclip: Stats
    threshold: jax.Array  # float: the bound of the last step
    history: jax.Array  # float (window,): the last norms, as a ring buffer
    taken: jax.Array  # int32: norms that have entered the history


class ClipByQuantileState(NamedTuple):
    """State of :func:`clip_by_quantile`."""

    clip_by_quantile: Stats
    threshold: jax.Array  # float: the bound of the last step
    max_norm: jax.Array  # float: the bound of the next step


@explained
def autoclip(
    percentile: float = 10.0, *, window: int = 1000, where: Where = None, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of the whole tree to a percentile of its own history, this step included.

    Args:
      percentile: 0, or from 1 to 100, in percent. Interpolated linearly, as by `numpy.percentile`.
      window: how many of the last norms to keep. The state holds that many floats (4 kB for 1000), and each
        step sorts them: tens of microseconds for 1000 on a CPU.
      where: the leaves to clip, as path patterns, a rule or a tree of bools (see :func:`clipjax.box`). None
        selects all. Other leaves are returned unchanged, are not measured and may hold anything.
      axis_name: the mesh axes that split the tree, in `pmap` and unchecked `shard_map`.

    Returns:
      A transformation; `threshold` is the percentile that this step was clipped to.

    Raises:
      TypeError, ValueError: `percentile` or `window` is not a number, or is out of range. When built by
        `optax.inject_hyperparams` and initialized under `jit`: `window`, which sets a shape, is traced.

    Guarantees: those of `clipjax.clip_by_global_norm`, with the threshold as bound. A step whose norm is not
    finite leaves the history unchanged. The first step is never clipped. Derivatives treat the norms of other
    steps as constants.

    Equals the authors' `autoclip` for the first `window` steps. Later, the percentile here is that of the
    last `window` norms, while the authors' history grows without end.

    References:
      Seetharaman et al., 2020, AutoClip: adaptive gradient clipping for source separation networks,
      arXiv:2007.14469.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.autoclip(50.0)
      >>> state = tx.init(jnp.zeros(2))
      >>> for norm in (1.0, 2.0, 9.0):
      ...     clipped, state = tx.update(jnp.array([norm, 0.0]), state)
      >>> print(state.threshold, clipped.round(3))
      2.0 [2. 0.]
    """
    check_number("percentile", percentile, 0, 100)
    if not isinstance(percentile, jax.core.Tracer) and 0 < percentile < 1:
        raise ValueError(
            f"percentile is in percent, such as 10.0 for the tenth percentile, got {percentile}; "
            f"clip_by_quantile takes a share"
        )
    check_count("window", window, 1)

    def first(params: Any, dtype: Any) -> Memory:
        del params
        return no_ring(window, dtype), no_norms()

    def bound_of(norm: jax.Array, memory: Memory, step: jax.Array) -> tuple[jax.Array, Memory]:
        del step
        history, taken = memory
        length = length_of(history, "autoclip", window)
        history = history.at[taken % length].set(lax.stop_gradient(norm))
        taken = one_more(taken)
        filled = jnp.minimum(taken, length)
        places = jnp.arange(length, dtype=np.int32)
        ascending = _sorted(jnp.where(places < filled, history, jnp.inf))
        rank = wide(percentile) / 100 * wide(filled - 1)
        low = lax.convert_element_type(jnp.floor(rank), np.int32)
        high = jnp.minimum(low + 1, filled - 1)
        share = rank - jnp.floor(rank)
        bound = ascending[low] + (ascending[high] - ascending[low]) * share
        # The derivative of the bound by this step's norm, because JAX cannot differentiate a float64 sort.
        own = lax.stop_gradient(norm)
        slope = jnp.where(ascending[low] == own, 1 - share, 0) + jnp.where(ascending[high] == own, share, 0)
        return bound + slope * (norm - own), (history, taken)

    return clip_by_past(AutoclipState, first, bound_of, where, axis_name)


@jax.jit
def _sorted(norms: jax.Array) -> jax.Array:
    """Sort in ascending order."""

    def by_bits(norms: jax.Array) -> jax.Array:
        # Read as integers, positive floats keep their order, and XLA sorts integers four times as fast.
        ascending = lax.sort(lax.bitcast_convert_type(norms, np.int64), is_stable=False)
        return lax.bitcast_convert_type(ascending, np.float64)

    def in_float32(norms: jax.Array) -> jax.Array:  # the dtype of the history; TPUs do not sort float64
        return wide(jnp.sort(lax.convert_element_type(norms, np.float32)))

    return lax.platform_dependent(norms, cpu=by_bits, tpu=in_float32, default=jnp.sort)


@explained
def clip_by_quantile(
    quantile: float = 0.5,
    *,
    learning_rate: float = 0.2,
    initial_max_norm: float = 1.0,
    where: Where = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of the whole tree to a bound that tracks a quantile of the norms.

    After each step c <- c * exp(-learning_rate * (b - quantile)), where b is 1 if the norm was at most c,
    else 0. The bound c settles where the share of norms that are at most c is `quantile`. No history is
    needed.

    Args:
      quantile: the share of steps to leave unclipped, in (0, 1).
      learning_rate: the largest change of log c in one step, above 0.
      initial_max_norm: the bound c of the first step, above 0.
      where: the leaves to clip, as path patterns, a rule or a tree of bools (see :func:`clipjax.box`). None
        selects all. Other leaves are returned unchanged, are not measured and may hold anything.
      axis_name: the mesh axes that split the tree, in `pmap` and unchecked `shard_map`.

    Returns:
      A transformation; `threshold` is the bound of this step, `max_norm` that of the next step.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.

    Guarantees: those of `clipjax.clip_by_global_norm`, with the threshold as bound. A step is clipped to c
    from before the step, as in the paper. A step whose norm is not finite leaves c unchanged. c stays a
    normal floating-point number above 0, from which it can recover.

    Equals the geometric update of the paper with one norm per step and without its noise. Differential
    privacy would need norms of single examples, and noise added to b.

    References:
      Andrew et al., 2021, Differentially private learning with adaptive clipping, arXiv:1905.03871.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_quantile(0.5, learning_rate=0.2, initial_max_norm=1.0)
      >>> clipped, state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
      >>> print(clipped.round(3), state.max_norm.round(3))  # 1.0 * exp(0.2 * 0.5)
      [0.6 0.8] 1.105
    """
    check_number("quantile", quantile, 0, 1, inside=True)
    check_number("learning_rate", learning_rate, 0, inside=True)
    check_number("initial_max_norm", initial_max_norm, 0, inside=True)

    def first(params: Any, dtype: Any) -> Memory:
        del params
        return (jnp.array(initial_max_norm, dtype),)

    def bound_of(norm: jax.Array, memory: Memory, step: jax.Array) -> tuple[jax.Array, Memory]:
        del step
        (bound,) = memory
        inside = wide(norm <= bound)
        after = bound * jnp.exp(-wide(learning_rate) * (inside - wide(quantile)))
        limits = jnp.finfo(np.float32)  # the narrowest dtype of a state
        return bound, (jnp.clip(after, float(limits.tiny), float(limits.max)),)

    return clip_by_past(ClipByQuantileState, first, bound_of, where, axis_name)
