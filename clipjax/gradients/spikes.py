"""Skipping whole steps whose gradients or loss are far larger than usual."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax._core.arguments import explained, shown
from clipjax._core.bounds import Bound, bound_at, check_count
from clipjax._core.dtypes import as_arrays, in_float64, norm_dtype, wide
from clipjax._core.mesh import AxisName
from clipjax._core.stats import count
from clipjax._core.trees import measure_tree
from clipjax.gradients.past import length_of, no_ring
from clipjax.gradients.skipping import skipping

# For normally distributed numbers, the median of |x - median| times this is the standard deviation.
_STD_PER_MAD = 1.4826

# The smallest standard deviation of the logarithms, used even if the norms in the window hardly differ:
# a norm within 5% of the usual one is then never an outlier.
_LEAST_STD = 0.05

# The same for losses, whose spikes are smaller: 1%, because bfloat16 rounds a loss in steps of up to 0.8%.
_LEAST_STD_OF_LOSSES = 0.01


class SkipSpikesState(NamedTuple):
    """State of :func:`skip_spikes`."""

    steps: jax.Array  # int32: steps so far
    skipped: jax.Array  # int32: steps skipped so far, for any reason
    skipped_last: jax.Array  # int32: 1 if the last step was skipped, else 0
    skipped_in_a_row: jax.Array  # int32: steps skipped since the last good one
    nonfinite_count: jax.Array  # int32: steps whose norm was not finite
    nonfinite_loss_count: jax.Array  # int32: steps whose loss was not finite
    norm_spike_count: jax.Array  # int32: steps whose norm was finite, and a spike
    loss_spike_count: jax.Array  # int32: steps whose loss was finite, and a spike
    norm: jax.Array  # float: the norm at the last step
    z_score: jax.Array  # float: standard deviations above the median; 0 until norms are judged
    threshold: jax.Array  # float: the largest norm that would not have been a spike; infinite until then
    norms: jax.Array  # float (window,): the last norms, as a ring buffer
    taken: jax.Array  # int32: norms that have entered the ring
    loss: jax.Array  # float: the loss at the last step that had one
    loss_z_score: jax.Array  # float: as `z_score`, of the loss
    loss_threshold: jax.Array  # float: as `threshold`, of the loss
    losses: jax.Array  # float (window,): the last losses, as a ring buffer
    losses_taken: jax.Array  # int32: losses that have entered the ring
    inner: Any  # the state of the inner transformation


class _Judged(NamedTuple):
    """How a value compares with a window: two bools, and scalars of the dtype of the state."""

    finite: jax.Array
    spike: jax.Array
    value: jax.Array
    z_score: jax.Array
    threshold: jax.Array


@explained
def skip_spikes(
    optimizer: optax.GradientTransformation,
    z_threshold: Bound = 6.0,
    *,
    max_norm: Bound | None = None,
    window: int = 128,
    warmup_steps: int | None = None,
    max_consecutive: int | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip every step whose gradients, or whose loss, are far larger than usual, or not finite.

    Such a step returns zero updates and leaves the inner state as it was. What is usual is measured on the
    last `window` norms of the whole gradient, by the median m and the median absolute deviation d of their
    logarithms: with z = (log(norm) - m) / (1.4826 d), a step with z > z_threshold is skipped. Losses are
    judged in the same way, but without logarithms if a loss in the window is negative.

    Args:
      optimizer: a gradient transformation, usually a whole chain.
      z_threshold: how many standard deviations a norm or a loss may be above the median: a number, a scalar
        array or a schedule `step -> number`. 6 allows 1.8 times the median if the norms vary by 10%, and 20
        times if they vary by a factor of 1.65.
      max_norm: a norm above this is always a spike, even before the window judges: a number, a scalar array
        or a schedule. None sets no such limit. With an infinite `z_threshold` this limit alone decides.
      window: how many of the last norms and losses to keep. The state holds that many floats of each, 1024
        bytes for 128, and each step sorts them.
      warmup_steps: how many norms, or losses, must be in the window before it judges them, at most `window`;
        until then every finite step is taken. None is half of the window.
      max_consecutive: after this many skipped steps in a row, the next steps are taken whatever they contain,
        until one is finite and no spike. A NaN is then in the weights, and stays there. With None every such
        step is skipped, and :func:`clipjax.raise_if_skipping` can end the run instead.
      axis_name: the mesh axes whose devices skip together, in `pmap` and unchecked `shard_map`.

    Returns:
      A transformation whose state counts `steps`, `skipped`, `skipped_in_a_row` (since the last good step)
      and, by reason, `nonfinite_count` (of the norm), `nonfinite_loss_count`, `norm_spike_count` and
      `loss_spike_count`; `skipped_last` is 1 if the last step was skipped, else 0. It also holds the `norm`
      of the last step, its `z_score` and the `threshold`, the largest norm that would have been taken (0 and
      infinite until the window judges); and `loss`, `loss_z_score` and `loss_threshold`. Call
      `update(grads, state, params, loss=loss)` to judge a loss as well, of the form that
      :func:`skip_nonfinite` takes; without a loss, only the norm is judged.

    Raises:
      TypeError, ValueError: `optimizer` is not a gradient transformation; a number has a wrong type, is
        negative or is out of range; in `update`, `loss` is not a real scalar. When built by
        `optax.inject_hyperparams` and initialized under `jit`: `window`, which sets a shape, is traced.

    Guarantees: a step whose norm or loss is NaN or infinite is always skipped, and none of its values enter
    the windows: after any number of such steps in a row, the statistics and the inner state are, bit for bit,
    those of a run without these steps (`max_consecutive` apart). A norm or a loss of 0 does not enter either,
    because it says nothing about the usual size; such a norm is always taken. Steps skipped for their size do
    enter: a few of them cannot move a median, so one spike never hides the next. If norms or losses have
    moved to a new level for good, they are the new majority after at most half a window, and steps are taken
    again. Small values are never spikes. z does not change when all gradients, or all losses, are scaled. The
    standard deviation counts as at least 5% for norms and 1% for losses, so a loss that has settled is not
    judged by its rounding. No branch waits for the host.

    Differs from the step skipping of Levanter, OLMo and MaxText, whose defaults are also 6 and 128: they
    compare with mean + 6 standard deviations of the norms and of the losses. One spike can raise these far
    enough to let the next one pass, and a single NaN turns them into NaN, so that every step is skipped until
    it leaves the window. Before half a window they also take steps with NaN. (OLMo also skips what is as far
    below the mean. Without a loss Levanter raises an error, and MaxText judges nothing.) Logarithms are used
    because norms and losses vary by factors: when a small network is trained on batches of 8 without any
    spike, median and deviation of the norms themselves would skip 6% of the steps, and those of the losses
    8%; mean and standard deviation 0.3% and 0.8%; and this transformation none.

    For Flax, `optax.MultiSteps` and the checkpoints of a run without skipping, see :func:`skip_nonfinite`.

    References:
      Leys et al., 2013, Detecting outliers: do not use standard deviation around the mean, use absolute
      deviation around the median, Journal of Experimental Social Psychology 49(4).

    Example:
      >>> import clipjax, optax, jax.numpy as jnp
      >>> tx = clipjax.skip_spikes(optax.sgd(1.0), warmup_steps=4)
      >>> state = tx.init(jnp.zeros(2))
      >>> for norm in (1.0, 1.1, 0.9, 1.0, 100.0):
      ...     updates, state = tx.update(jnp.array([norm, 0.0]), state)
      >>> print(updates, state.skipped, state.threshold.round(2))
      [0. 0.] 1 1.53
    """
    highest = bound_at("z_threshold", z_threshold)
    cap = None if max_norm is None else bound_at("max_norm", max_norm, scalar=True)
    check_count("window", window, 1)
    if warmup_steps is not None:
        check_count("warmup_steps", warmup_steps, 1)
        known = not isinstance(window, jax.core.Tracer) and not isinstance(warmup_steps, jax.core.Tracer)
        if known and warmup_steps > window:
            raise ValueError(
                f"warmup_steps must be at most window={shown(window)}, got {shown(warmup_steps)}"
            )

    def first(params: Any) -> dict[str, jax.Array]:
        dtype = norm_dtype(jax.tree.leaves(as_arrays(params)))
        numbers = ("norm", "z_score", "loss", "loss_z_score")  # separate buffers, to be donated
        return {
            **{field: jnp.zeros((), dtype) for field in numbers},
            **{field: jnp.full((), jnp.inf, dtype) for field in ("threshold", "loss_threshold")},
            **{field: no_ring(window, dtype) for field in ("norms", "losses")},
        }

    def compared(
        value: jax.Array, ring: jax.Array, entered: jax.Array, at_most: jax.Array, least_std: float
    ) -> _Judged:
        dtype, length = ring.dtype, length_of(ring, "skip_spikes", window)
        value = wide(lax.convert_element_type(value, dtype))
        filled = jnp.minimum(entered, length)
        enough = filled >= (max(1, length // 2) if warmup_steps is None else warmup_steps)
        held = jnp.arange(length, dtype=np.int32) < filled
        past = jnp.where(held, wide(ring), 1.0)
        positive = jnp.all(past > 0)  # always true for norms, and for most losses
        past = jnp.where(positive, jnp.log(jnp.where(positive, past, 1.0)), past)
        median = _median(past, held)
        least = least_std * jnp.where(positive, 1.0, jnp.abs(median))
        std = jnp.maximum(_STD_PER_MAD * _median(jnp.abs(past - median), held), least)
        limit = median + at_most * std
        threshold = jnp.where(positive, jnp.exp(limit), limit)
        scaled = jnp.where(positive, jnp.log(jnp.maximum(value, 0.0)), value)
        z = jnp.where(enough, (scaled - median) / std, 0.0)
        shown = (value, z, jnp.where(enough, threshold, jnp.inf))
        return _Judged(
            finite := jnp.isfinite(value),
            finite & enough & ~(value <= threshold),
            *(lax.convert_element_type(x, dtype) for x in shown),
        )

    @in_float64
    def judge(
        updates: Any, loss: jax.Array | None, state: SkipSpikesState
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return whether a step is fine, and the state fields that say why, with the updated windows."""
        # The judgment of a step is not differentiated.
        norm = lax.stop_gradient(measure_tree(updates, 2.0, axis_name))
        at_most = lax.stop_gradient(highest(state.steps))
        of_norm = compared(norm, state.norms, state.taken, at_most, _LEAST_STD)
        if cap is not None:
            of_norm = _capped(of_norm, lax.stop_gradient(cap(state.steps)))
        fields = {"norm": of_norm.value, "z_score": of_norm.z_score, "threshold": of_norm.threshold}
        fields |= _counts(state, of_norm, "nonfinite_count", "norm_spike_count")
        finite, spike = of_norm.finite, of_norm.spike
        if loss is not None:
            of_loss = compared(loss, state.losses, state.losses_taken, at_most, _LEAST_STD_OF_LOSSES)
            fields |= {"loss": of_loss.value, "loss_z_score": of_loss.z_score}
            fields |= {"loss_threshold": of_loss.threshold}
            fields |= _counts(state, of_loss, "nonfinite_loss_count", "loss_spike_count")
            finite, spike = finite & of_loss.finite, spike | of_loss.spike
            fields["losses"], fields["losses_taken"] = _remembered(
                state.losses, state.losses_taken, of_loss.value, finite & (of_loss.value != 0)
            )
        fields["norms"], fields["taken"] = _remembered(
            state.norms, state.taken, of_norm.value, finite & (of_norm.value > 0)
        )
        return finite & ~spike, fields

    return skipping(SkipSpikesState, optimizer, first, judge, max_consecutive, axis_name)


def _capped(judged: _Judged, cap: jax.Array) -> _Judged:
    """Make a norm above `cap` a spike, too."""
    lower = jnp.minimum(wide(judged.threshold), cap)
    return judged._replace(
        spike=judged.spike | (judged.finite & (wide(judged.value) > cap)),
        threshold=lax.convert_element_type(lower, judged.threshold.dtype),
    )


def _counts(state: SkipSpikesState, judged: _Judged, nonfinite: str, spikes: str) -> dict[str, jax.Array]:
    return {
        nonfinite: count(getattr(state, nonfinite), ~judged.finite),
        spikes: count(getattr(state, spikes), judged.spike),
    }


def _remembered(
    ring: jax.Array, entered: jax.Array, value: jax.Array, enters: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the ring, with a value that enters in place of the oldest, and how many have entered."""
    position = entered % ring.shape[0]
    return ring.at[position].set(jnp.where(enters, value, ring[position])), count(entered, enters)


def _median(values: jax.Array, held: jax.Array) -> jax.Array:
    """Return the median of the values where `held` is true; 0 if there are none."""
    ascending = jnp.sort(jnp.where(held, values, jnp.inf))
    last = jnp.maximum(jnp.sum(held, dtype=np.int32), 1) - 1
    middle = (ascending[last // 2] + ascending[(last + 1) // 2]) / 2
    return jnp.where(jnp.any(held), middle, 0.0)
