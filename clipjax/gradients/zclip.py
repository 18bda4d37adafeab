"""Bounds on outliers: norms many standard deviations above the moving mean of past norms."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, SupportsIndex, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax import _checks
from clipjax._core import bounds
from clipjax.gradients.history import clip_by_history, counts

ZclipMode = Literal["adaptive", "mean", "percentile"]


# A spike counts 1, and any other step takes 4 away. At this count they are no spikes,
# but a new level.
_NO_SPIKES, _ORDINARY = 100, 4


class Moments(NamedTuple):
    """What :func:`zclip` remembers of the norms, and :func:`clip_by_lognormal` of their logarithms."""

    mean: jax.Array  # float: the moving mean
    std: jax.Array  # float: the moving standard deviation
    steps: jax.Array  # int32: how many norms they have taken in
    spikes: (
        jax.Array
    )  # int32: spikes count 1, other steps take 4 away; 0 of `clip_by_lognormal`


def zclip(
    z_threshold: bounds.Bound = 2.5,
    *,
    decay: bounds.Number = 0.97,
    warmup_steps: SupportsIndex = 25,
    max_norm: bounds.Bound = jnp.inf,
    mode: ZclipMode = "adaptive",
    clip_factor: bounds.Number = 1.0,
    eps: bounds.Number = 1e-6,
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
    highest = bounds.as_schedule("z_threshold", z_threshold, scalar=True)
    decay = _checks.check_number("decay", decay, "[0, 1)")
    warm = _checks.check_count("warmup_steps", warmup_steps, 0)
    clip_factor = _checks.check_number("clip_factor", clip_factor, "[0, inf)")
    eps = _checks.check_number("eps", eps, "[0, inf)")
    if mode not in get_args(ZclipMode):
        raise ValueError(
            f"mode must be one of {get_args(ZclipMode)}, got {bounds.short_repr(mode)}"
        )
    if not isinstance(update_on_spike, bool):
        raise TypeError(
            f"update_on_spike must be a bool, got {bounds.short_repr(update_on_spike)}"
        )
    cap = bounds.as_schedule("max_norm", max_norm, scalar=True)

    def bound_of(
        norm: jax.Array, memory: Moments, step: Any
    ) -> tuple[jax.Array, Moments]:
        mean, std, steps, spikes = memory
        tiny = np.finfo(norm.dtype).tiny
        warming = steps < jnp.maximum(warm, 1)
        most, wide = (
            jnp.asarray(highest(step), norm.dtype),
            jnp.maximum(std, tiny),
        )  # infinity times 0 would be NaN
        width = wide if mode == "percentile" else wide + eps
        limit = mean + most * width
        spike = ~warming & (norm > limit)
        if mode == "adaptive":
            excess, z = (
                jnp.where(spike, norm - mean, 1),
                jnp.where(spike, most, 0),
            )  # neither 0 nor infinite
            of_spike = (mean + z * wide * (z * width / excess)) * clip_factor
        else:
            of_spike = mean if mode == "mean" else limit
        bound = jnp.where(warming, jnp.inf, jnp.where(spike, of_spike, limit))

        # Plain averages in the warm-up. Later, the paper's variance is about the new
        # mean, which is (1 - rate) * away from the norm.
        rate = jnp.where(warming, 1 / (steps.astype(norm.dtype) + 1), 1 - decay)
        away = lax.stop_gradient(jnp.where(spike, of_spike, norm)) - mean
        kept = jnp.where(warming, 1 - rate, (1 - rate) ** 2)
        largest = jnp.maximum(jnp.maximum(std, jnp.abs(away)), tiny)
        before = std / largest  # the squares of norms would leave float32
        # Steps from the old averages, not decay * old + rate * new: in float32 the two
        # shares of a long one are not 1.
        change = rate * (kept * (away / largest) ** 2 - before**2)
        total = before + jnp.sqrt(before**2 + change)  # of the old and the new root
        wider = largest * (change / jnp.where(total > 0, total, 1))
        new = Moments(
            mean + rate * away,
            jnp.maximum(std + wider, 0),
            optax.safe_increment(steps),
            spikes,
        )
        if not update_on_spike:
            new = jax.tree.map(
                lambda after, before: jnp.where(spike, before, after), new, memory
            )
        spikes = jnp.maximum(spikes + jnp.where(spike, 1, -_ORDINARY), 0)
        anew = spikes >= _NO_SPIKES  # the first of a warm-up replaces the averages
        new = new._replace(
            steps=jnp.where(anew, 0, new.steps), spikes=jnp.where(anew, 0, spikes)
        )
        return jnp.minimum(bound, jnp.asarray(cap(step), norm.dtype)), new

    return clip_by_history("zclip", _no_moments, bound_of)


def clip_by_lognormal(
    z_threshold: bounds.Bound = 2.0,
    *,
    decay: bounds.Number = 0.95,
    max_norm: bounds.Bound = jnp.inf,
    eps: bounds.Number = 1e-8,
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of all leaves, if its logarithm is an outlier, to the geometric mean of the norms.

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
    highest = bounds.as_schedule("z_threshold", z_threshold, scalar=True)
    decay = _checks.check_number("decay", decay, "[0, 1)")
    eps = _checks.check_number("eps", eps, "(0, inf)")
    cap = bounds.as_schedule("max_norm", max_norm, scalar=True)

    def bound_of(
        norm: jax.Array, memory: Moments, step: Any
    ) -> tuple[jax.Array, Moments]:
        mean, std, steps, spikes = memory
        known = counts(norm) | (steps > 0)
        rate = jnp.where(
            counts(norm), jnp.maximum(1 - decay, 1 / (steps.astype(norm.dtype) + 1)), 0
        )
        away = jnp.log(jnp.where(counts(norm), norm, 1) + eps) - mean
        mean = mean + rate * away
        variance = std**2 + rate * ((1 - rate) * away**2 - std**2)
        most = jnp.asarray(highest(step), norm.dtype)
        finite = known & (most < jnp.inf)
        top = 0.99 * np.log(np.finfo(norm.dtype).max)  # above it slopes are infinite
        width = jnp.where(finite, most, 0) * jnp.sqrt(jnp.maximum(variance, eps))
        limit = jnp.where(finite, jnp.exp(jnp.minimum(mean + width, top)), jnp.inf)
        bound = jnp.where(~known | (norm < limit), limit, jnp.exp(mean))
        new = Moments(
            mean,
            jnp.sqrt(jnp.maximum(lax.stop_gradient(variance), 0)),
            optax.safe_increment(steps),
            spikes,
        )
        return jnp.minimum(bound, jnp.asarray(cap(step), norm.dtype)), new

    return clip_by_history("clip_by_lognormal", _no_moments, bound_of)


def _no_moments(dtype: Any) -> Moments:
    return Moments(
        jnp.zeros((), dtype),
        jnp.zeros((), dtype),
        jnp.zeros((), np.int32),
        jnp.zeros((), np.int32),
    )
