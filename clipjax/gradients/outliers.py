"""Bounds on outliers: norms many standard deviations above the moving mean of past norms."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from clipjax._core.arguments import explained, shown
from clipjax._core.bounds import Bound, bound_at, check_count, check_number
from clipjax._core.dtypes import wide
from clipjax._core.maxima import larger
from clipjax._core.members import Memory
from clipjax._core.mesh import AxisName
from clipjax._core.stats import Stats
from clipjax._core.where import Where
from clipjax.gradients.past import capped, clip_by_past, no_norms, one_more

ZclipMode = Literal["adaptive", "mean", "percentile"]


class ZclipState(NamedTuple):
    """State of :func:`zclip`."""

    zclip: Stats
    threshold: jax.Array  # float: the bound of the last step
    mean: jax.Array  # float: the moving mean of the norms
    std: jax.Array  # float: the moving standard deviation of the norms
    taken: jax.Array  # int32: norms that the statistics include


class ClipByLognormalState(NamedTuple):
    """State of :func:`clip_by_lognormal`."""

    clip_by_lognormal: Stats
    threshold: jax.Array  # float: the bound of the last step
    mean: jax.Array  # float: the moving mean of the logarithms of the norms
    std: jax.Array  # float: the moving standard deviation of the logarithms
    taken: jax.Array  # int32: norms that the statistics include


def _no_moments(params: Any, dtype: Any) -> Memory:
    """Return the mean, the standard deviation and the count before the first norm."""
    del params
    return jnp.zeros((), dtype), jnp.zeros((), dtype), no_norms()


@explained
def zclip(
    z_threshold: float = 2.5,
    *,
    decay: float = 0.97,
    warmup_steps: int = 25,
    max_norm: Bound | None = None,
    mode: ZclipMode = "adaptive",
    clip_factor: float = 1.0,
    eps: float = 1e-6,
    update_on_spike: bool = True,
    where: Where = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of the whole tree if its z-score, relative to moving statistics, makes it a spike.

    With m and s the moving mean and standard deviation of the norms before this step, a norm n is a spike if
    z = (n - m) / (s + eps) is above `z_threshold`; in mode "percentile", if n is above m + z_threshold * s.
    The statistics are then updated with n. For a spike they are updated with the norm that it was clipped to,
    before `max_norm` applies.

    Args:
      z_threshold: at least 0.
      decay: the decay of the moving averages, in [0, 1).
      warmup_steps: how many norms, at least one, give the first mean and variance. They are clipped only to
        `max_norm`.
      max_norm: an additional bound on the norm, also during the warm-up: a number, an array or a schedule.
        None sets no such bound.
      mode: what a spike is clipped to. "adaptive": (m + z_threshold * s * z_threshold / z) * clip_factor,
        which is lower for larger spikes; "mean": m; "percentile": m + z_threshold * s.
      clip_factor: the factor in mode "adaptive", at least 0. The other modes do not use it.
      eps: added to the standard deviation, at least 0.
      update_on_spike: whether a spike updates the statistics.
      where: the leaves to clip, as path patterns, a rule or a tree of bools (see :func:`clipjax.box`). None
        selects all. Other leaves are returned unchanged, are not measured and may hold anything.
      axis_name: the mesh axes that split the tree, in `pmap` and unchecked `shard_map`.

    Returns:
      A transformation; `threshold` is the norm that a spike was clipped to or, if there was no spike, the
      norm above which there would have been one. It is at most `max_norm`, and infinite during a warm-up
      without `max_norm`.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range; `mode` is not one of the three.

    Guarantees: those of `clipjax.clip_by_global_norm`, with the threshold as bound. A step whose norm is not
    finite leaves the statistics unchanged and does not count toward the warm-up. Derivatives treat the norms
    of other steps as constants.

    Equals the authors' `ZClip`: `mode="adaptive"` and `"mean"` are its `clip_option` in mode "zscore", and
    its `max_grad_norm` is 1 by default. Its code and its docstring disagree on `clip_factor`: here, as in its
    code, it multiplies the whole bound, and not only z_threshold * s. In `ZClip`, one NaN stops the
    statistics from adapting for the rest of the run. As in `ZClip`, norms that are all equal in the warm-up
    give s = 0, so that any larger norm is clipped to them.

    References:
      Kumar et al., 2025, ZClip: adaptive spike mitigation for LLM pre-training, arXiv:2504.02507.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.zclip(warmup_steps=4)
      >>> state = tx.init(jnp.zeros(2))
      >>> for norm in (1.0, 3.0, 1.0, 3.0, 12.0):  # mean 2, standard deviation 1: z = 10
      ...     clipped, state = tx.update(jnp.array([norm, 0.0]), state)
      >>> print(f"{clipped[0]:.3f}")  # 2 + 2.5 * 1 * 2.5 / 10
      2.625
    """
    check_number("z_threshold", z_threshold, 0)
    check_number("decay", decay, 0, 1, below=True)
    check_count("warmup_steps", warmup_steps, 0)
    check_number("clip_factor", clip_factor, 0)
    check_number("eps", eps, 0)
    if mode not in get_args(ZclipMode):
        raise ValueError(f"mode must be one of {get_args(ZclipMode)}, got {shown(mode)}")
    if not isinstance(update_on_spike, bool):
        raise TypeError(f"update_on_spike must be a bool, got {shown(update_on_spike)}")
    cap = None if max_norm is None else bound_at("max_norm", max_norm)

    def bound_of(norm: jax.Array, memory: Memory, step: jax.Array) -> tuple[jax.Array, Memory]:
        mean, std, taken = memory
        warming = taken < jnp.maximum(warmup_steps, 1)
        width = std if mode == "percentile" else std + wide(eps)
        limit = mean + wide(z_threshold) * width
        spike = ~warming & (norm > limit)
        if mode == "adaptive":
            excess = jnp.where(spike, norm - mean, 1.0)  # z * width; never 0
            spike_bound = (mean + wide(z_threshold) ** 2 * std * width / excess) * wide(clip_factor)
        else:
            spike_bound = mean if mode == "mean" else limit
        bound = jnp.where(warming, jnp.inf, jnp.where(spike, spike_bound, limit))

        number = wide(one_more(taken))  # plain averages in the warm-up, by Welford's update
        rate = jnp.where(warming, 1 / number, 1 - wide(decay))
        away = jnp.where(spike, spike_bound, norm) - mean
        new_mean = mean + rate * away
        # The authors' moving variance uses the distance from the new mean, (1 - rate) * away.
        spread = jnp.where(warming, rate * (1 - rate), rate * (1 - rate) ** 2) * away**2
        new_std = jnp.sqrt((1 - rate) * std**2 + spread)
        if not update_on_spike:
            new_mean, new_std = jnp.where(spike, mean, new_mean), jnp.where(spike, std, new_std)
        return capped(bound, cap, step), (new_mean, new_std, one_more(taken))

    return clip_by_past(ZclipState, _no_moments, bound_of, where, axis_name)


@explained
def clip_by_lognormal(
    std_factor: float = 2.0,
    *,
    decay: float = 0.95,
    max_norm: Bound | None = None,
    eps: float = 1e-8,
    where: Where = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of the whole tree to its geometric mean if it is an outlier of a log-normal distribution.

    With m and s the moving mean and standard deviation of log(norm + eps), this step included, a norm of
    exp(m + std_factor * s) or more is clipped to exp(m).

    Args:
      std_factor: at least 0.
      decay: the decay of the moving averages, in [0, 1). After t norms it is at most t / (t + 1), so that the
        first averages are plain means.
      max_norm: an additional bound on the norm: a number, an array or a schedule. None sets no such bound.
      eps: keeps the logarithm finite, and is the smallest variance; above 0.
      where: the leaves to clip, as path patterns, a rule or a tree of bools (see :func:`clipjax.box`). None
        selects all. Other leaves are returned unchanged, are not measured and may hold anything.
      axis_name: the mesh axes that split the tree, in `pmap` and unchecked `shard_map`.

    Returns:
      A transformation; `threshold` is exp(m + std_factor * s) if the norm was below it, else exp(m), and at
      most `max_norm`. `mean` and `std` are those of the logarithms.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range.

    Guarantees: those of `clipjax.clip_by_global_norm`, with the threshold as bound. A step whose norm is not
    finite leaves the averages unchanged and does not count toward t. Derivatives treat the norms of other
    steps as constants.

    Equals `tf.contrib.layers.adaptive_clipping_fn` of TensorFlow 1 with its `global_step`. That function
    keeps the mean of the squares and subtracts the squared mean, which loses precision in float32 by
    cancellation; here the variance itself is kept, which is mathematically the same number.

    References:
      Chorowski et al., 2014, End-to-end continuous speech recognition using attention-based recurrent
      NN, arXiv:1412.1602, section 3.2.1.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_lognormal()
      >>> state = tx.init(jnp.zeros(2))
      >>> for norm in (1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 100.0):
      ...     clipped, state = tx.update(jnp.array([norm, 0.0]), state)
      >>> print(f"{clipped[0]:.3f}, {jnp.exp(state.mean):.3f}")
      1.774, 1.774
    """
    check_number("std_factor", std_factor, 0)
    check_number("decay", decay, 0, 1, below=True)
    check_number("eps", eps, 0, inside=True)
    cap = None if max_norm is None else bound_at("max_norm", max_norm)

    def bound_of(norm: jax.Array, memory: Memory, step: jax.Array) -> tuple[jax.Array, Memory]:
        mean, std, taken = memory
        old = jnp.minimum(wide(decay), wide(taken) / (wide(taken) + 1))
        away = jnp.log(norm + wide(eps)) - mean
        mean = mean + (1 - old) * away
        variance = old * std**2 + old * (1 - old) * away**2
        limit = jnp.exp(mean + wide(std_factor) * jnp.sqrt(larger(variance, wide(eps))))
        bound = jnp.where(norm < limit, limit, jnp.exp(mean))
        return capped(bound, cap, step), (mean, jnp.sqrt(variance), one_more(taken))

    return clip_by_past(ClipByLognormalState, _no_moments, bound_of, where, axis_name)
