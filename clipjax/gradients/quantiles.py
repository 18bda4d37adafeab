"""Bounds at a quantile of the norms of past steps."""

from __future__ import annotations

import functools
from typing import NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import optax

from clipjax._core.aliases import Number, Step
from clipjax._core.checks import check_count, check_number
from clipjax.gradients.history import clip_by_history, is_counted
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

    max_norm: jax.Array  # float: the bound of the next step


def autoclip(
    percentile: Number = 10.0, *, window: SupportsIndex = 1000
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of all leaves to a percentile of the last norms and this one.

    Args:
      percentile: 0, or from 1 to 100, in percent; interpolated as by
        `numpy.percentile`.
      window: how many norms to keep. The state holds that many floats, and each step
        sorts them: tens of microseconds for 1000 on a CPU.

    Returns:
      A transformation with the metrics of a clip and `threshold`, the percentile.

    The first step is never clipped. A norm of 0 is left out. A new level is followed
    within `window` steps.

    Equals the authors' `autoclip` for the first `window` steps. Their history has no
    end.

    References:
      Seetharaman et al., 2020, AutoClip: adaptive gradient clipping for source
      separation networks, arXiv:2007.14469.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.autoclip(50.0)
      >>> state = tx.init(jnp.zeros(2))
      >>> for norm in (1.0, 2.0, 9.0):
      ...     clipped, state = tx.update(jnp.array([norm, 0.0]), state)
      >>> print(clipped.round(3), clipjax.metrics(state)["autoclip/threshold"])
      [2. 0.] 2.0
    """
    percentile = check_number("percentile", percentile, "[0, 100]")
    if not isinstance(percentile, jax.core.Tracer) and 0 < percentile < 1:
        raise ValueError(
            "percentile is in percent, such as 10.0 for the tenth percentile, got "
            f"{percentile}; clip_by_quantile takes a share"
        )
    window = check_count("window", window, 1)

    def bound_of(norm: jax.Array, past: Window, step: Step) -> tuple[jax.Array, Window]:
        check_size(past, window)
        now = enter(past, norm, is_counted(norm))
        is_held = age(now.values) <= now.held
        bound = quantile(now.values, is_held, percentile / 100)
        return jnp.where(now.held > 0, bound, jnp.inf), now

    initial = functools.partial(empty_window, window)
    return clip_by_history("autoclip", bound_of, initial)


def clip_by_quantile(
    quantile: Number = 0.5,
    *,
    learning_rate: Number = 0.2,
    initial_max_norm: Number = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of all leaves to a bound that tracks a quantile of the norms.

    It keeps no history. After each step c <- c * exp(-learning_rate * (b - quantile)),
    where b is 1 if the norm was at most c, and 0 else. So c settles where that share of
    the norms is at most c.

    Args:
      quantile: the share of the steps that is not clipped, in (0, 1).
      learning_rate: bounds the change of log c in one step; above 0.
      initial_max_norm: the bound of the first step, above 0; best a usual norm. A bound
        far above all norms falls by `learning_rate * (1 - quantile)` of itself a step.

    Returns:
      A transformation with the metrics of a clip and `threshold`, the bound c of this
      step.

    Equals the geometric update of the paper with one norm a step and without its noise.
    Differential privacy would need the norms of single examples, and noise added to b.

    References:
      Andrew et al., 2021, Differentially private learning with adaptive clipping,
      arXiv:1905.03871.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_quantile(0.5, learning_rate=0.2)
      >>> clipped, state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
      >>> print(clipped.round(3), state.memory.max_norm.round(3))  # exp(0.2 * 0.5)
      [0.6 0.8] 1.105
    """
    quantile = check_number("quantile", quantile, "(0, 1)")
    learning_rate = check_number("learning_rate", learning_rate, "(0, inf)")
    initial_max_norm = check_number("initial_max_norm", initial_max_norm, "(0, inf)")

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

    return clip_by_history(
        "clip_by_quantile",
        bound_of,
        lambda dtype: QuantileMemory(jnp.array(initial_max_norm, dtype)),
    )
