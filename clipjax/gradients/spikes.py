"""Skipping steps whose gradients or loss are far larger than usual."""

from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clipjax import _checks
from clipjax._core import bounds
from clipjax._core.messages import traced_error
from clipjax.gradients.history import Ring, empty_ring, enter
from clipjax.gradients.skipping import skipping

# For normally distributed numbers, the median of |x - median| times this is the
# standard deviation.
_STD_PER_MAD = 1.4826

# The smallest standard deviations of logarithms: a norm within 5% of the usual one is
# never an outlier, nor a loss within 1%, since bfloat16 rounds a loss in steps of up to
# 0.8%.
_LEAST_STD, _LEAST_STD_OF_LOSS = 0.05, 0.01

# In place of 0 and less, which have no logarithm.
_LEAST_VALUE = 1e-30


def skip_spikes(
    optimizer: optax.GradientTransformation,
    z_threshold: bounds.Bound = 6.0,
    *,
    max_norm: bounds.Bound = jnp.inf,
    window: SupportsIndex = 64,
    warmup_steps: SupportsIndex | None = None,
    max_consecutive: SupportsIndex | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip every step whose gradients, or whose loss, are far larger than usual, or not finite.

    With the median m and the median absolute deviation d of the logarithms of the last
    norms, a step is a spike if (log(norm) - m) / (1.4826 d) > z_threshold. Losses are
    compared likewise, without logarithms if one in the window is not positive. The
    deviation counts as at least 5% for norms and 1% for losses.

    Args:
      optimizer: a gradient transformation, usually a whole chain.
      z_threshold: how many standard deviations a value may be above the median: a
        number or a schedule.
      max_norm: a norm above this is always a spike: a number or a schedule.
      window: how many of the last norms and losses to keep. While a loss falls fast, a
        long window takes the fall for ordinary: 32 sees a spike some 50 steps earlier
        than 64.
      warmup_steps: how many there must be before they are compared, at most `window`.
        None is half of the window.
      max_consecutive: as in :func:`skip_nonfinite`.

    Returns:
      A transformation with the metrics of :func:`skip_nonfinite`, `norm_spike_count`,
      `loss_spike_count`, and `norm`, `z_score` and `threshold` of the norm, and `loss`,
      `loss_z_score` and `loss_threshold` of the loss that `update(grads, state, params,
      loss=loss)` gets.

    Raises:
      TypeError: `optimizer` is not a gradient transformation; in `update`, `loss` is
        not a real scalar.

    A step whose norm or loss is not finite enters neither window, and no 0 enters its
    own. Spikes enter, since a few cannot move a median. If norms stay at a new level,
    steps are taken again after half a window.

    References:
      Leys et al., 2013, Detecting outliers: do not use standard deviation around the
      mean, use absolute deviation around the median, Journal of Experimental Social
      Psychology 49(4).

    Example:
      >>> import clipjax, optax, jax.numpy as jnp
      >>> tx = clipjax.skip_spikes(optax.sgd(1.0), warmup_steps=4)
      >>> state = tx.init(jnp.zeros(2))
      >>> for norm in (1.0, 1.1, 0.9, 1.0, 100.0):
      ...     updates, state = tx.update(jnp.array([norm, 0.0]), state)
      >>> w = optax.apply_updates(jnp.ones(2), updates)
      >>> print(w, clipjax.metrics(state)["skip_spikes/skipped"])
      [1. 1.] 1
    """
    highest = bounds.as_schedule("z_threshold", z_threshold, scalar=True)
    cap = bounds.as_schedule("max_norm", max_norm, scalar=True)
    if isinstance(window, jax.core.Tracer):
        raise traced_error("window", window)
    length = _checks.check_count("window", window, 1)
    enough = (
        max(1, length // 2)
        if warmup_steps is None
        else _checks.check_count("warmup_steps", warmup_steps, 1)
    )
    if not isinstance(enough, jax.core.Tracer) and enough > length:
        raise ValueError(f"warmup_steps must be at most window={length}, got {enough}")

    def compare(
        norm: Any, loss: Any, past: Any, step: Any
    ) -> tuple[Any, Any, dict[str, Any]]:
        past_norms, losses = past
        if past_norms.values.size != length:
            raise ValueError(
                f"window: the state was made with {past_norms.values.size}, got "
                f"{length}"
            )
        z_score, threshold = _compared(
            norm, past_norms, highest(step), enough, _LEAST_STD
        )
        threshold = jnp.minimum(threshold, jnp.asarray(cap(step), threshold.dtype))
        seen = (
            jnp.zeros((), losses.values.dtype)
            if loss is None
            else loss.astype(losses.values.dtype)
        )
        loss_z_score, limit = _compared(
            seen, losses, highest(step), enough, _LEAST_STD_OF_LOSS
        )
        spike = jnp.isfinite(norm) & (norm > threshold)
        loss_spike = jnp.isfinite(seen) & (seen > limit) & (loss is not None)
        metrics = {
            "norm_spike_count": spike.astype(np.int32),
            "loss_spike_count": loss_spike.astype(np.int32),
        }
        metrics |= {"z_score": z_score, "threshold": threshold}
        metrics |= {"loss": seen, "loss_z_score": loss_z_score, "loss_threshold": limit}
        finite = jnp.isfinite(norm) & jnp.isfinite(seen)
        past = (
            enter(past_norms, norm, finite & (norm > 0)),
            enter(losses, seen, finite & (seen != 0)),
        )
        return spike | loss_spike, past, metrics

    def remember(dtype: Any) -> tuple[Ring, ...]:
        return empty_ring(length, dtype), empty_ring(
            length, float
        )  # a loss may be float64 wherever that is enabled

    return skipping("skip_spikes", optimizer, max_consecutive, compare, remember)


def _compared(
    value: jax.Array, window: Ring, highest: Any, enough: Any, least: float
) -> tuple[jax.Array, jax.Array]:
    """Return how many standard deviations a value is above the median, and the value that is `highest` of them."""
    held = jnp.arange(window.values.size, dtype=np.int32) < window.entered
    past = jnp.where(held, window.values, 1)
    positive = jnp.all(past > 0)  # always so for norms, and for most losses
    past = jnp.where(positive, jnp.log(jnp.where(positive, past, 1)), past)
    median = _median(past, held)
    floor = least * jnp.where(positive, 1, jnp.abs(median))
    std = jnp.maximum(_STD_PER_MAD * _median(jnp.abs(past - median), held), floor)
    limit = median + jnp.asarray(highest, std.dtype) * std
    scaled = jnp.where(positive, jnp.log(jnp.maximum(value, _LEAST_VALUE)), value)
    warm = jnp.minimum(window.entered, window.values.size) >= enough
    threshold = jnp.where(positive, jnp.exp(limit), limit)
    return jnp.where(warm, (scaled - median) / std, 0), jnp.where(
        warm, threshold, jnp.inf
    )


def _median(values: jax.Array, held: jax.Array) -> jax.Array:
    """Return the median of the values that are held; 0 if there are none."""
    ascending = jnp.sort(jnp.where(held, values, jnp.inf))
    last = jnp.maximum(jnp.sum(held, dtype=np.int32), 1) - 1
    return jnp.where(
        jnp.any(held), (ascending[last // 2] + ascending[(last + 1) // 2]) / 2, 0
    )
