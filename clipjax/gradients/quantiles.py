"""Clips whose threshold is a quantile of the norms of past steps."""

from __future__ import annotations

import functools
from typing import NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import optax

from clipjax._core.aliases import Number, Step
from clipjax._core.bounds import check_count, number
from clipjax.gradients.past_norms import clip_by_past_norms, is_counted
from clipjax.gradients.window import (
    Window,
    age,
    check_size,
    empty_window,
    enter,
    quantile,
)


class QuantileMemory(NamedTuple):
    """What :func:`clip_by_quantile` remembers."""

    max_norm: jax.Array  # float: the threshold of the next step


def autoclip(
    percentile: Number = 10.0, *, window: SupportsIndex = 1000
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of all leaves to a percentile of the last norms.

        x * min(1, c / norm),  c = a percentile of the last `window` norms

    The norm of this step is one of these norms. Use it when you know what fraction of
    the steps to clip, but do not know a threshold: with a percentile of 10, about 90%
    of the steps are clipped. If the norms move to a new level, the threshold follows
    within `window` steps.

    Args:
      percentile: the percentile in percent, 10 by default: 0, or from 1 to 100. It is
        interpolated as by `numpy.percentile`.
      window: the number of norms to keep, 1000 by default. The state has one float for
        each, and each step sorts them, which takes tens of microseconds for 1000 norms
        on a CPU.

    Returns:
      A gradient transformation with the metrics of a clip and `threshold`, the
      percentile c.

    Raises:
      ValueError: `percentile` is above 0 and below 1, as if it were a fraction.

    The first step is never clipped. A norm that is 0 or not finite does not enter the
    window.

    Equals the authors' `autoclip` for the first `window` steps if all norms are finite
    and above 0. The authors keep all norms of a run.

    References:
      Seetharaman et al., 2020, AutoClip: adaptive gradient clipping for source
      separation networks, arXiv:2007.14469.

    See Also:
      :func:`clip_by_quantile` tracks a quantile without a window; :func:`zclip` clips
      only outliers; :func:`suggest` replays the norms of a run.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.autoclip(50.0)
      >>> state = tx.init(jnp.zeros(2))
      >>> for norm in (1.0, 2.0, 9.0):
      ...     clipped, state = tx.update(jnp.array([norm, 0.0]), state)
      >>> print(clipped.round(3), clipjax.metrics(state)["autoclip/threshold"])
      [2. 0.] 2.0
    """
    percentile = number("percentile", percentile, "[0, 100]")
    if not isinstance(percentile, jax.core.Tracer) and 0 < percentile < 1:
        raise ValueError(
            "percentile is in percent, such as 10.0 for the tenth percentile, got "
            f"{percentile}; clip_by_quantile takes a fraction"
        )
    window = check_count("window", window, 1)

    def bound_of(norm: jax.Array, past: Window, step: Step) -> tuple[jax.Array, Window]:
        check_size(past, window)
        now = enter(past, norm, is_counted(norm))
        is_held = age(now.values) <= now.held
        bound = quantile(now.values, is_held, percentile / 100)
        return jnp.where(now.held > 0, bound, jnp.inf), now

    initial = functools.partial(empty_window, window)
    return clip_by_past_norms("autoclip", bound_of, initial)


def clip_by_quantile(
    quantile: Number = 0.5,
    *,
    learning_rate: Number = 0.2,
    initial_max_norm: Number = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of all leaves to a threshold that tracks a quantile of the norms.

        x * min(1, c / norm)
        then  c <- c * exp(-learning_rate * (b - quantile)),  b = 1 if norm <= c, else 0

    The threshold c settles where the fraction `quantile` of the norms is at most c. Use
    it when you know what fraction of the steps to leave unclipped, and want a state of
    one number.

    Args:
      quantile: the fraction of the steps that is not clipped, in (0, 1), 0.5 by
        default.
      learning_rate: the step size of log c, above 0, 0.2 by default. In one step, log c
        changes by at most `learning_rate * max(quantile, 1 - quantile)`.
      initial_max_norm: the threshold of the first step, above 0, 1.0 by default. Pass a
        usual norm of your run: a threshold far above all norms falls only by about the
        fraction `learning_rate * (1 - quantile)` at each step.

    Returns:
      A gradient transformation with the metrics of a clip and `threshold`, the c of
      this step.

    Equals the geometric update of the paper, with one norm per step and without the
    noise. Differential privacy would need the norms of single examples, and noise added
    to b.

    References:
      Andrew et al., 2021, Differentially private learning with adaptive clipping,
      arXiv:1905.03871.

    See Also:
      :func:`autoclip` takes the quantile of a window of norms; :func:`suggest` replays
      the norms of a run.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_quantile(0.5, learning_rate=0.2)
      >>> clipped, state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
      >>> print(clipped.round(3), state.memory.max_norm.round(3))  # exp(0.2 * 0.5)
      [0.6 0.8] 1.105
    """
    quantile = number("quantile", quantile, "(0, 1)")
    learning_rate = number("learning_rate", learning_rate, "(0, inf)")
    initial_max_norm = number("initial_max_norm", initial_max_norm, "(0, inf)")

    def bound_of(
        norm: jax.Array, memory: QuantileMemory, step: Step
    ) -> tuple[jax.Array, QuantileMemory]:
        (bound,) = memory
        inside = (norm <= bound).astype(bound.dtype)
        limits = jnp.finfo(bound.dtype)  # c recovers from all but 0 and infinity
        after = jnp.clip(
            bound * jnp.exp(-learning_rate * (inside - quantile)),
            limits.tiny,
            limits.max,
        )
        return bound, QuantileMemory(after)

    return clip_by_past_norms(
        "clip_by_quantile",
        bound_of,
        lambda dtype: QuantileMemory(jnp.array(initial_max_norm, dtype)),
    )
