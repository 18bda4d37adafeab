"""Clips of outliers: norms far above the moving mean of past norms."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, SupportsIndex, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax._core.aliases import Bound, DType, Number, Scalar, Step
from clipjax._core.bounds import (
    check_bound,
    check_count,
    check_flag,
    check_word,
    number,
)
from clipjax.gradients.past_norms import average, clip_by_past_norms, is_counted

ZclipMode = Literal["adaptive", "mean", "percentile"]

# An outlier adds 1 to a counter, and any other step subtracts 1.25 / z_threshold². At
# 50 the statistics are reset. Of norms with any distribution, at most 1 / (1 + z²)
# are z standard deviations above their mean (Cantelli's inequality), so the counter
# rises only if the statistics are not those of the norms: after a change of level, or
# if many norms are clipped before they enter. It counts ten-millionths.
_ADDED, _TAKEN_AWAY, _NEW_LEVEL_COUNT = 10_000_000, 12_500_000, 500_000_000


class Moments(NamedTuple):
    """What `zclip` remembers of norms, and `clip_by_lognormal` of their logarithms."""

    mean: jax.Array  # float: the moving mean
    std: jax.Array  # float: the moving standard deviation
    steps: jax.Array  # int32: the number of norms they have taken in


class ZclipMemory(NamedTuple):
    """What :func:`zclip` remembers."""

    moments: Moments
    spikes: jax.Array  # int32: the counter of outliers, in ten-millionths


def zclip(
    z_threshold: Bound = 2.5,
    *,
    decay: Number = 0.97,
    warmup_steps: SupportsIndex = 25,
    max_norm: Bound = jnp.inf,
    mode: ZclipMode = "adaptive",
    clip_factor: Number = 1.0,
    eps: Number = 1e-6,
    update_on_spike: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of all leaves if its z-score among past norms makes it an outlier.

        z = (norm - m) / (s + eps)
        c = (m + z_threshold² * s / z) * clip_factor
        if z > z_threshold:  x * min(1, c / norm)

    Here m and s are the moving mean and the moving standard deviation of the norms
    before this step. Use it for the pretraining of language models, where most steps
    should pass unchanged and rare outlier steps should be reduced to a usual size.

    Args:
      z_threshold: the z-score above which a norm is an outlier, a scalar `Bound`, 2.5
        by default.
      decay: the decay of the moving averages, in [0, 1), 0.97 by default.
      warmup_steps: the number of norms that give the first m and s, 25 by default; 0
        counts as 1. In the warm-up only `max_norm` clips.
      max_norm: an additional fixed threshold for all steps, a scalar `Bound`. Infinity,
        the default, means no fixed threshold.
      mode: what an outlier is clipped to. "adaptive", the default: (m + z_threshold² *
        s / z) * clip_factor, which is lower for larger outliers; "mean": m;
        "percentile": m + z_threshold * s, where norms above this number are the
        outliers.
      clip_factor: a factor of the threshold in mode "adaptive", at least 0, 1.0 by
        default.
      eps: a number added to s, at least 0, 1e-6 by default; not used in mode
        "percentile".
      update_on_spike: whether outliers enter m and s, True by default. An outlier
        enters as the threshold that `mode` gives, without `max_norm`.

    Returns:
      A gradient transformation with the metrics of a clip and `threshold`: what an
      outlier was clipped to, or the norm above which this step would have been an
      outlier. The threshold is at most `max_norm`. In the warm-up it is `max_norm`.

    Raises:
      TypeError: `update_on_spike` is not a bool.
      ValueError: `mode` is not one of the three words.

    A norm that is 0 or not finite does not enter the statistics. An outlier adds 1 to a
    counter, and any other norm subtracts 1.25 / z_threshold², which is 0.2 by default.
    When the counter reaches 50, the statistics are reset, and a new warm-up begins,
    since so many outliers mean that m and s no longer describe the norms. With the
    default `z_threshold`, the counter reaches 50 after 50 outliers in a row, or later
    if more than one in six norms is an outlier.

    Until the first reset, `zclip` equals the authors' `ZClip`. There, `max_grad_norm`
    is 1 by default, and the modes "adaptive" and "mean" are the values
    "adaptive_scaling" and "mean" of `clip_option` in mode "zscore". As in `ZClip`,
    equal norms in the warm-up give s = 0, and then any larger norm is an outlier.

    References:
      Kumar et al., 2025, ZClip: adaptive spike mitigation for LLM pre-training,
      arXiv:2504.02507.

    See Also:
      :func:`skip_spikes` skips outlier steps; :func:`clip_by_lognormal` compares
      logarithms; :func:`suggest` replays the norms of a run.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.zclip(warmup_steps=4)
      >>> state = tx.init(jnp.zeros(2))
      >>> for norm in (1.0, 3.0, 1.0, 3.0, 12.0):  # mean 2, std 1: z = 10
      ...     clipped, state = tx.update(jnp.array([norm, 0.0]), state)
      >>> print(f"{clipped[0]:.3f}")  # 2 + 2.5**2 * 1 / 10
      2.625
    """
    z_limit = check_bound("z_threshold", z_threshold, scalar=True)
    norm_limit = check_bound("max_norm", max_norm, scalar=True)
    decay = number("decay", decay, "[0, 1)")
    warm = check_count("warmup_steps", warmup_steps, 0)
    clip_factor = number("clip_factor", clip_factor, "[0, inf)")
    eps = number("eps", eps, "[0, inf)")
    check_word("mode", mode, get_args(ZclipMode))
    check_flag("update_on_spike", update_on_spike)

    def bound_of(norm: Scalar, memory: ZclipMemory, step: Step) -> tuple[Scalar, Any]:
        past, spikes = memory
        tiny = np.finfo(norm.dtype).tiny
        warming = past.steps < jnp.maximum(warm, 1)
        z_max = jnp.asarray(z_limit.at(step), norm.dtype)
        std = jnp.maximum(past.std, tiny)  # infinity times 0 would be NaN
        width = std if mode == "percentile" else std + eps
        most = past.mean + z_max * width
        spike = ~warming & (norm > most)
        of_spike = most
        if mode == "mean":
            of_spike = past.mean
        if mode == "adaptive":
            # `excess` is never 0 or infinite.
            excess = jnp.where(spike, norm - past.mean, 1)
            allowed = jnp.where(spike, z_max, 0)
            of_spike = past.mean + allowed * std * (allowed * width / excess)
            of_spike *= clip_factor
        bound = jnp.where(spike, of_spike, most)
        bound = jnp.where(warming, jnp.inf, bound)

        entering = lax.stop_gradient(jnp.where(spike, of_spike, norm))
        after = _after(past, entering, warming, decay)
        if not update_on_spike:
            after = jax.tree.map(lambda a, b: jnp.where(spike, b, a), after, past)
        taken_away = jnp.minimum(_TAKEN_AWAY / z_max**2, _NEW_LEVEL_COUNT)
        change = jnp.where(spike, _ADDED, -taken_away.astype(np.int32))
        spikes = jnp.maximum(spikes + change, 0)
        # After a restart, the first norm of the warm-up replaces the averages.
        anew = spikes >= _NEW_LEVEL_COUNT
        after = after._replace(steps=jnp.where(anew, 0, after.steps))
        bound = jnp.minimum(bound, jnp.asarray(norm_limit.at(step), norm.dtype))
        return bound, ZclipMemory(after, jnp.where(anew, 0, spikes))

    return clip_by_past_norms(
        "zclip",
        bound_of,
        lambda dtype: ZclipMemory(_no_moments(dtype), jnp.zeros((), np.int32)),
    )


def _after(past: Moments, norm: Scalar, warming: Scalar, decay: Any) -> Moments:
    """Return the averages after a norm: plain ones in the warm-up, then the paper's.

    The variance of the paper is about the new mean, which is (1 - rate) * away from the
    norm. It is computed as a step from the old one, as :func:`average` explains.
    """
    plain = 1 / (past.steps.astype(norm.dtype) + 1)
    rate = jnp.where(warming, plain, 1 - decay)
    kept = jnp.where(warming, 1 - rate, (1 - rate) ** 2)
    away = norm - past.mean
    # Divided by the largest of them, since squares of norms may overflow in float32.
    largest = jnp.maximum(past.std, jnp.abs(away))
    largest = jnp.maximum(largest, np.finfo(norm.dtype).tiny)
    std = past.std / largest
    change = rate * (kept * (away / largest) ** 2 - std**2)
    total = std + jnp.sqrt(std**2 + change)  # the sum of the old and the new root
    wider = largest * (change / jnp.where(total > 0, total, 1))
    return Moments(
        average(past.mean, norm, rate),
        jnp.maximum(past.std + wider, 0),
        optax.safe_increment(past.steps),
    )


def clip_by_lognormal(
    z_threshold: Bound = 2.0,
    *,
    decay: Number = 0.95,
    max_norm: Bound = jnp.inf,
    eps: Number = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of all leaves to its moving geometric mean if it is an outlier.

        if norm >= exp(m + z_threshold * s):  x * exp(m) / norm

    Here m and s are the moving mean and the moving standard deviation of log(norm +
    eps), with this step among them, so exp(m) is a moving geometric mean of the norms.
    Use it when the norms often change by large factors, as in recurrent networks for
    speech, or to continue a run of TensorFlow 1.

    Args:
      z_threshold: the number of standard deviations above which a logarithm is an
        outlier, a scalar `Bound`, 2.0 by default.
      decay: the decay of the moving averages, in [0, 1), 0.95 by default. After t norms
        the decay is at most t / (t + 1), so that the first averages are plain means.
      max_norm: an additional fixed threshold for all steps, a scalar `Bound`. Infinity,
        the default, means no fixed threshold.
      eps: a number above 0, 1e-8 by default, that keeps the logarithm finite, and is
        the smallest variance.

    Returns:
      A gradient transformation with the metrics of a clip and `threshold`: exp(m +
      z_threshold * s), or exp(m) for an outlier, and at most `max_norm`.

    Equals `tf.contrib.layers.adaptive_clipping_fn` of TensorFlow 1 with its
    `global_step`, where `std_factor` is `z_threshold`. The exception is a norm that is
    0 or not finite, which does not enter the statistics here.

    References:
      Chorowski et al., 2014, End-to-end continuous speech recognition using
      attention-based recurrent NN, arXiv:1412.1602, section 3.2.1.

    See Also:
      :func:`zclip` compares the norms themselves; :func:`skip_spikes` skips outlier
      steps.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_lognormal()
      >>> state = tx.init(jnp.zeros(2))
      >>> for norm in (1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 100.0):
      ...     clipped, state = tx.update(jnp.array([norm, 0.0]), state)
      >>> print(f"{clipped[0]:.3f}, {jnp.exp(state.memory.mean):.3f}")
      1.774, 1.774
    """
    z_limit = check_bound("z_threshold", z_threshold, scalar=True)
    norm_limit = check_bound("max_norm", max_norm, scalar=True)
    decay = number("decay", decay, "[0, 1)")
    eps = number("eps", eps, "(0, inf)")

    def bound_of(norm: Scalar, memory: Moments, step: Step) -> tuple[Scalar, Moments]:
        counted = is_counted(norm)
        plain = 1 / (memory.steps.astype(norm.dtype) + 1)
        rate = jnp.where(counted, jnp.maximum(1 - decay, plain), 0)
        logarithm = jnp.log(jnp.where(counted, norm, 1) + eps)
        away = logarithm - memory.mean
        mean = average(memory.mean, logarithm, rate)
        square = memory.std**2
        variance = square + rate * ((1 - rate) * away**2 - square)
        known = counted | (memory.steps > 0)
        z_max = jnp.asarray(z_limit.at(step), norm.dtype)
        finite = known & (z_max < jnp.inf)
        width = jnp.where(finite, z_max, 0) * jnp.sqrt(jnp.maximum(variance, eps))
        top = 0.99 * np.log(np.finfo(norm.dtype).max)  # above it slopes are infinite
        most = jnp.where(finite, jnp.exp(jnp.minimum(mean + width, top)), jnp.inf)
        bound = jnp.where(~known | (norm < most), most, jnp.exp(mean))
        std = jnp.sqrt(jnp.maximum(lax.stop_gradient(variance), 0))
        after = Moments(mean, std, optax.safe_increment(memory.steps))
        return jnp.minimum(bound, jnp.asarray(norm_limit.at(step), norm.dtype)), after

    return clip_by_past_norms("clip_by_lognormal", bound_of, _no_moments)


def _no_moments(dtype: DType) -> Moments:
    # Two arrays, since the same array cannot be donated twice.
    mean, std = jnp.zeros((), dtype), jnp.zeros((), dtype)
    return Moments(mean, std, jnp.zeros((), np.int32))
