"""A skip of outlier steps, whose gradients or loss are far larger than usual."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple, Never, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clipjax._core.aliases import Bound, Memory, Step
from clipjax._core.bounds import check_bound, check_count
from clipjax.gradients.skipping import SkipTransformation, skipping
from clipjax.gradients.window import (
    Window,
    age,
    at,
    check_size,
    empty_window,
    enter,
)

# For normally distributed numbers, the median of |x - median| times this is the
# standard deviation.
_STD_PER_MAD = 1.4826

# The smallest standard deviations of logarithms, for norms and for losses, so that
# noise is no outlier: bfloat16 rounds a loss in steps of up to 0.8%.
_LEAST_STDS = (0.05, 0.01)

# An outlier is above this many times its level, and this many times the last value that
# was none: without noise, as on full batches, every rise is many standard deviations,
# but it comes over several steps.
_LEAST_TIMES = 3.0

# The largest standard deviation of logarithms: 6 times this number makes exp(3) = 20.1
# times the level an outlier, however much values vary.
_MOST_STD = 0.5

# With 16 values and more there is a trend. The trend may end, so the level is at least
# the median of the last 16 values.
_RECENT = 16

# This number replaces values of 0 and less, which have no logarithm.
_LEAST_VALUE = 1e-30


class Past(NamedTuple):
    """What a norm and a loss are compared with, two of each."""

    window: Window
    # float: the norm and the loss of the last step that was no outlier; infinite before
    # it
    usual: jax.Array


def skip_spikes(
    optimizer: optax.GradientTransformation,
    *args: Never,
    z_threshold: Bound = 6.0,
    max_norm: Bound = jnp.inf,
    window: SupportsIndex = 64,
    warmup_steps: SupportsIndex | None = None,
    max_consecutive: SupportsIndex | None = None,
    check_updates: bool = False,
) -> SkipTransformation:
    """Skip every step whose gradients or loss are far larger than usual, or not finite.

    Use it around the whole optimizer when corrupted batches give finite gradients that
    a clip would still apply. A step is an outlier if its norm jumps, which means that
    it is above all three of

        exp(level + z_threshold * std),  3 * exp(level),  3 * usual

    Here `usual` is the norm of the last step that was no outlier, while the level and
    the standard deviation are those of the trend of the last norms, whose logarithms
    are y[1] (the oldest) to y[k]:

        b = median of (y[i + k - h] - y[i]) / (k - h),  h = k // 2, i = 1 … h
        e[i] = y[i] + b (k + 1 - i)
        level = max(median of e, median of the last 16 y)
        std = 1.4826 median of |e - median of e|, at least 0.05 and at most 0.5

    The slope b, which is 0 with fewer than 16 norms, keeps the norms of the first
    steps, which fall fast, from being taken for noise. The other two conditions let the
    steps of runs with little noise pass, such as those on full batches, where every
    small rise is many standard deviations and large swings build up over several steps.

    Losses are compared in the same way, with a standard deviation of at least 0.01. If
    a loss in the window is not positive, they are compared without logarithms, and
    `level + 2 |level|` and `usual + 2 |level|` take the place of the second and the
    third number.

    Args:
      optimizer: a gradient transformation, usually a whole chain.
      z_threshold: the number of standard deviations that an outlier is above the level,
        a scalar `Bound`, 6.0 by default.
      max_norm: the norm above which a step is always an outlier, a scalar `Bound`;
        infinity, the default, means no such norm.
      window: the number of last norms, and of last losses, to keep, 64 by default.
      warmup_steps: the number of norms, and of losses, that must be in the window
        before a value is compared with them, at most `window`. None, the default, means
        16, or half of `window` if `window` is below 32.
      max_consecutive: the number of steps in a row that may be skipped, as in
        :func:`skip_nonfinite`; None, the default, means no limit.
      check_updates: whether a step is also skipped if its updates are not finite, as in
        :func:`skip_nonfinite`; False by default.

    Returns:
      A gradient transformation with the metrics of :func:`skip_nonfinite`, the numbers
      of outliers `norm_spike_count` and `loss_spike_count`, and `norm`, `z_score` and
      `threshold` of the norm. `loss`, `loss_z_score` and `loss_threshold` are those of
      the loss that `update(grads, state, params, loss=loss)` gets.

    Raises:
      TypeError: `optimizer` is not a gradient transformation, or not the only
        positional argument; `check_updates` is not a bool; in `update`, `loss` is not a
        real scalar.
      ValueError: `warmup_steps` is above `window`.

    An outlier is applied after all if its norm and loss equal, bit for bit, those of
    the last finite step: the same data have come again, so there is no other batch to
    wait for. `max_norm` makes no such exception.

    If the norm or the loss of a step is not finite, neither of the two enters its
    window, and a norm or loss of 0 does not either. Outliers do enter, since a few of
    them cannot move a median. If norms stay at a new level, however far away, and
    scatter no more than before, steps are applied again after at most 9 skipped steps.
    A longer run of outliers is taken for a new level, too.

    References:
      Leys et al., 2013, Detecting outliers: do not use standard deviation around the
      mean, use absolute deviation around the median, Journal of Experimental Social
      Psychology 49(4).

    See Also:
      :func:`skip_nonfinite` skips only steps that are not finite; :func:`zclip` clips
      outliers; :func:`record_norms` keeps the last outlier steps; :func:`explain`, on
      the batch that was just skipped, replays exactly that step.

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
    z_limit = check_bound("z_threshold", z_threshold, scalar=True)
    norm_limit = check_bound("max_norm", max_norm, scalar=True)
    length = check_count("window", window, 1)
    enough = None
    if warmup_steps is not None:
        enough = check_count("warmup_steps", warmup_steps, 1)
        is_known = not isinstance(length + enough, jax.core.Tracer)
        if is_known and enough > length:
            raise ValueError(
                f"warmup_steps must be at most window={length}, got {enough}"
            )

    def compare_at(
        norm: Any, loss: Any, past: Memory, step: Step
    ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        check_size(past.window, length)
        return compare(norm, loss, past, enough, z_limit.at(step), norm_limit.at(step))

    return skipping(
        "skip_spikes",
        optimizer,
        args,
        max_consecutive=max_consecutive,
        check_updates=check_updates,
        compare=compare_at,
        initial=functools.partial(no_past, length),
    )


def no_past(window: Any, dtype: jnp.dtype) -> Past:
    """Return what norms and losses are compared with before the first step."""
    # A loss may be float64 wherever that is enabled.
    wide = np.promote_types(dtype, jnp.result_type(float))
    return Past(empty_window(window, wide, (2,)), jnp.full(2, jnp.inf, wide))


def compare(
    norm: jax.Array,
    loss: jax.Array | None,
    past: Past,
    enough: Any = None,
    z_threshold: Any = 6.0,
    max_norm: Any = jnp.inf,
) -> tuple[jax.Array, Past, dict[str, jax.Array]]:
    """Compare a norm and a loss with those of the past.

    Returns:
      Whether the step is an outlier, the next past, and metrics.
    """
    if enough is None:
        enough = max(1, min(_RECENT, past.window.values.shape[-1] // 2))
    dtype = past.window.values.dtype
    # Both windows at once, which takes half as many kernels.
    each = [norm, 0 if loss is None else loss]
    seen = jnp.stack([jnp.asarray(x, dtype) for x in each])
    is_given = np.array([True, loss is not None])
    finite = jnp.isfinite(seen)
    z_scores, thresholds = _compared(seen, past, enough, z_threshold)
    limits = jnp.stack([jnp.asarray(x, dtype) for x in (max_norm, jnp.inf)])
    thresholds = jnp.minimum(thresholds, limits)
    # The same data have come again, so that there are no others to wait for.
    again = ((seen == past.window.values[:, -1]) | ~is_given).all()
    above = finite & is_given & (seen > thresholds)
    spikes = above & (~again | (seen > limits))
    metrics = {
        "norm_spike_count": spikes[0].astype(np.int32),
        "loss_spike_count": spikes[1].astype(np.int32),
        "z_score": z_scores[0],
        "threshold": thresholds[0],
        "loss": seen[1],
        "loss_z_score": jnp.where(is_given[1], z_scores[1], 0),
        "loss_threshold": thresholds[1],
    }
    enters = finite.all() & jnp.stack([norm > 0, seen[1] != 0])
    window = enter(past.window, seen, enters)
    usual = jnp.where(enters & ~above.any(), seen, past.usual)
    return spikes[0] | spikes[1], Past(window, usual), metrics


def _compared(
    seen: jax.Array, past: Past, enough: Any, z_threshold: Any
) -> tuple[jax.Array, jax.Array]:
    """Compare a norm and a loss, `(2,)`, with the trends of past norms and losses.

    Returns:
      The numbers of standard deviations by which the two are above their levels, and
      the values above which they are outliers.
    """
    level, std, is_log = _trends(past.window)

    def on_scale(x: jax.Array) -> jax.Array:
        return jnp.where(is_log, jnp.log(jnp.maximum(x, _LEAST_VALUE)), x)

    times = _LEAST_TIMES
    rise = jnp.where(is_log, math.log(times), (times - 1) * jnp.abs(level))
    highest = jnp.maximum(
        level + jnp.asarray(z_threshold, std.dtype) * std,
        jnp.maximum(level, on_scale(past.usual)) + rise,
    )
    threshold = jnp.where(is_log, jnp.exp(highest), highest)
    z_score = (on_scale(seen) - level) / std
    is_warm = past.window.held >= enough
    return jnp.where(is_warm, z_score, 0), jnp.where(is_warm, threshold, jnp.inf)


def _trends(past: Window) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return levels and standard deviations of past norms and losses, `(2,)` each.

    The third result says for which of the two they are those of logarithms.
    """
    count = past.held[:, None]
    ago = age(past.values)
    is_held = ago <= count
    # All norms are positive, and most losses.
    is_log = jnp.all((past.values > 0) | ~is_held, axis=-1)
    held = jnp.where(is_held, past.values, 1)
    logarithms = jnp.log(jnp.where(is_log[:, None], held, 1))
    y = jnp.where(is_log[:, None], logarithms, held)

    # The median of the slopes between the two halves.
    half = count // 2
    apart = jnp.maximum(count - half, 1)
    places = past.values.shape[-1] - ago
    slopes = (y - at(y, jnp.maximum(places - apart, 0))) / apart.astype(y.dtype)
    last = jnp.minimum(count, _RECENT)
    slope, recent = _median(jnp.stack([slopes, y]), jnp.stack([half, last]))
    slope = jnp.where(past.held >= _RECENT, slope, 0)
    # Each value carried to now along the slope.
    carried = y + slope[:, None] * ago.astype(y.dtype)
    middle = _median(carried, count)
    std = _STD_PER_MAD * _median(jnp.abs(carried - middle[:, None]), count)
    level = jnp.maximum(middle, recent)
    least_stds = np.array(_LEAST_STDS, y.dtype)
    size = jnp.maximum(jnp.abs(level), _LEAST_VALUE)
    std = jnp.maximum(std, least_stds * jnp.where(is_log, 1, size))
    std = jnp.minimum(std, jnp.where(is_log, _MOST_STD, jnp.inf))
    return level, std, is_log


def _median(values: jax.Array, count: jax.Array) -> jax.Array:
    """Return the median of the last `count` values, along the last axis.

    It counts ranks: for so few values that is two kernels on an H100, where a sort and
    its surroundings are three (JAX 0.12).
    """
    ago = age(values)
    is_counted = ago <= count
    mine, other = values[..., :, None], values[..., None, :]
    # Of two equal values, the older is before the newer.
    is_older = ago[..., None, :] > ago[..., :, None]
    is_before = (other < mine) | ((other == mine) & is_older)
    rank = jnp.sum(is_before & is_counted[..., None, :], axis=-1, dtype=np.int32)
    is_low, is_high = rank == (count - 1) // 2, rank == count // 2
    half = is_low.astype(values.dtype) + is_high.astype(values.dtype)
    return jnp.sum(jnp.where(is_counted, half * values / 2, 0), axis=-1)
