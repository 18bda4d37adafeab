"""Bounds on outliers: norms far above the moving mean of past norms."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, SupportsIndex, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax._core.aliases import Bound, DType, Number, Scalar, Step
from clipjax._core.bounds import limit
from clipjax._core.checks import check_count, check_number, check_word
from clipjax._core.messages import short_repr
from clipjax.gradients.history import clip_by_history, is_counted

ZclipMode = Literal["adaptive", "mean", "percentile"]

# A spike counts 1, and any other step takes 4 away. At a count of 100 they are no
# spikes, but a new level.
_NEW_LEVEL_COUNT, _TAKEN_AWAY = 100, 4


class Moments(NamedTuple):
    """What `zclip` remembers of norms, `clip_by_lognormal` of their logarithms."""

    mean: jax.Array  # float: the moving mean
    std: jax.Array  # float: the moving standard deviation
    steps: jax.Array  # int32: how many norms they have taken in


class ZclipMemory(NamedTuple):
    """What :func:`zclip` remembers."""

    moments: Moments
    spikes: jax.Array  # int32: the count of spikes, less what other steps took away


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
    """Clip the norm of all leaves if its z-score among past norms makes it a spike.

    With m and s the moving mean and standard deviation before this step, a norm n is a
    spike if its z-score z = (n - m) / (s + eps) is above `z_threshold`; in mode
    "percentile", if n is above m + z_threshold * s. Then m and s take in n, or what a
    spike was clipped to before `max_norm` applies.

    Args:
      z_threshold: a number of at least 0, a scalar array or a schedule.
      decay: the decay of the moving averages, in [0, 1).
      warmup_steps: how many norms, at least one, give the first m and s; only
        `max_norm` clips them.
      max_norm: another bound, at all steps, in the same forms.
      mode: what a spike is clipped to. "adaptive": (m + z_threshold**2 * s / z) *
        clip_factor, which is lower for larger spikes; "mean": m; "percentile": m +
        z_threshold * s.
      clip_factor: used in mode "adaptive", at least 0.
      eps: at least 0; not used in mode "percentile".
      update_on_spike: whether m and s take in spikes at all.

    Returns:
      A transformation with the metrics of a clip and `threshold`: what a spike was
      clipped to, else the norm above which there would have been one; at most
      `max_norm`, and infinite in a warm-up without it.

    A norm of 0 is left out. A spike counts 1, and any other step takes 4 away; at 100
    the norms are at a higher level, at which each step would be clipped forever: the
    statistics start anew, with a warm-up. Where fewer than four in five are spikes, m
    and s follow as fast as `decay` allows.

    Until then equals the authors' `ZClip`, where `max_grad_norm` is 1 by default, and
    "adaptive" and "mean" are the `clip_option` of mode "zscore". As there, equal norms
    in the warm-up give s = 0, and then any larger norm is a spike.

    References:
      Kumar et al., 2025, ZClip: adaptive spike mitigation for LLM pre-training,
      arXiv:2504.02507.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.zclip(warmup_steps=4)
      >>> state = tx.init(jnp.zeros(2))
      >>> for norm in (1.0, 3.0, 1.0, 3.0, 12.0):  # mean 2, std 1: z = 10
      ...     clipped, state = tx.update(jnp.array([norm, 0.0]), state)
      >>> print(f"{clipped[0]:.3f}")  # 2 + 2.5**2 * 1 / 10
      2.625
    """
    z_limit = limit("z_threshold", z_threshold, scalar=True)
    norm_limit = limit("max_norm", max_norm, scalar=True)
    decay = check_number("decay", decay, "[0, 1)")
    warm = check_count("warmup_steps", warmup_steps, 0)
    clip_factor = check_number("clip_factor", clip_factor, "[0, inf)")
    eps = check_number("eps", eps, "[0, inf)")
    check_word("mode", mode, get_args(ZclipMode))
    if not isinstance(update_on_spike, bool):
        raise TypeError(
            f"update_on_spike must be a bool, got {short_repr(update_on_spike)}"
        )

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
            # Neither 0 nor infinite.
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
        spikes = jnp.maximum(spikes + jnp.where(spike, 1, -_TAKEN_AWAY), 0)
        # The first norm of a warm-up replaces the averages.
        anew = spikes >= _NEW_LEVEL_COUNT
        after = after._replace(steps=jnp.where(anew, 0, after.steps))
        bound = jnp.minimum(bound, jnp.asarray(norm_limit.at(step), norm.dtype))
        return bound, ZclipMemory(after, jnp.where(anew, 0, spikes))

    return clip_by_history(
        "zclip",
        bound_of,
        lambda dtype: ZclipMemory(_no_moments(dtype), jnp.zeros((), np.int32)),
    )


def _after(past: Moments, norm: Scalar, warming: Scalar, decay: Any) -> Moments:
    """Return the averages after a norm: plain ones in the warm-up, then the paper's.

    Its variance is about the new mean, which is (1 - rate) * away from the norm. The
    averages make steps from the old ones: in decay * old + rate * new the two shares of
    a long average are not 1 in float32.
    """
    plain = 1 / (past.steps.astype(norm.dtype) + 1)
    rate = jnp.where(warming, plain, 1 - decay)
    kept = jnp.where(warming, 1 - rate, (1 - rate) ** 2)
    away = norm - past.mean
    # The squares of norms would leave float32.
    largest = jnp.maximum(past.std, jnp.abs(away))
    largest = jnp.maximum(largest, np.finfo(norm.dtype).tiny)
    std = past.std / largest
    change = rate * (kept * (away / largest) ** 2 - std**2)
    total = std + jnp.sqrt(std**2 + change)  # of the old and the new root
    wider = largest * (change / jnp.where(total > 0, total, 1))
    return Moments(
        past.mean + rate * away,
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
    """Clip the norm of all leaves to the geometric mean, if its log is an outlier.

    With m and s the moving mean and standard deviation of log(norm + eps), this step's
    among them, a norm of exp(m + z_threshold * s) or more is clipped to exp(m).

    Args:
      z_threshold: a number of at least 0, a scalar array or a schedule.
      decay: the decay of the moving averages, in [0, 1). After t norms it is at most t
        / (t + 1), so that the first averages are plain means.
      max_norm: another bound, at all steps, in the same forms.
      eps: keeps the logarithm finite, and is the smallest variance; above 0.

    Returns:
      A transformation with the metrics of a clip and `threshold`: exp(m + z_threshold *
      s), or exp(m) for an outlier, and at most `max_norm`.

    Equals `tf.contrib.layers.adaptive_clipping_fn` of TensorFlow 1 with its
    `global_step` and, as `std_factor`, `z_threshold`.

    References:
      Chorowski et al., 2014, End-to-end continuous speech recognition using
      attention-based recurrent NN, arXiv:1412.1602, section 3.2.1.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_lognormal()
      >>> state = tx.init(jnp.zeros(2))
      >>> for norm in (1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 100.0):
      ...     clipped, state = tx.update(jnp.array([norm, 0.0]), state)
      >>> print(f"{clipped[0]:.3f}, {jnp.exp(state.memory.mean):.3f}")
      1.774, 1.774
    """
    z_limit = limit("z_threshold", z_threshold, scalar=True)
    norm_limit = limit("max_norm", max_norm, scalar=True)
    decay = check_number("decay", decay, "[0, 1)")
    eps = check_number("eps", eps, "(0, inf)")

    def bound_of(norm: Scalar, memory: Moments, step: Step) -> tuple[Scalar, Moments]:
        counted = is_counted(norm)
        plain = 1 / (memory.steps.astype(norm.dtype) + 1)
        rate = jnp.where(counted, jnp.maximum(1 - decay, plain), 0)
        away = jnp.log(jnp.where(counted, norm, 1) + eps) - memory.mean
        mean = memory.mean + rate * away
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

    return clip_by_history("clip_by_lognormal", bound_of, _no_moments)


def _no_moments(dtype: DType) -> Moments:
    # Two arrays, of which each may be donated.
    mean, std = jnp.zeros((), dtype), jnp.zeros((), dtype)
    return Moments(mean, std, jnp.zeros((), np.int32))
