"""Leaving out whole steps whose gradients are out of the ordinary."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax._core.arguments import explained, shown
from clipjax._core.bounds import Bound, bound_at
from clipjax._core.links import check_optimizer, knowing, links_of
from clipjax._core.members import check_state
from clipjax._core.mesh import AxisName
from clipjax._core.norms import as_arrays, in_float64, norm_dtype, wide
from clipjax._core.stats import count
from clipjax._core.trees import measure_tree
from clipjax.gradients.nonfinite import step_if
from clipjax.gradients.past import check_count, length_of, no_ring

# The median of |x - median| of normal numbers, times this, is their standard deviation.
_STD_PER_MAD = 1.4826

# The least standard deviation of the logarithms: what is within 5% of the usual is never an outlier,
# however alike the norms of the window are.
_LEAST_STD = 0.05


class SkipSpikesState(NamedTuple):
    """State of :func:`skip_spikes`."""

    steps: jax.Array  # int32: steps so far
    skipped: jax.Array  # int32: steps skipped so far, for whichever reason
    skipped_in_a_row: jax.Array  # int32: steps skipped since the last good one
    nonfinite_count: jax.Array  # int32: steps whose norm was not finite, all of them skipped
    norm: jax.Array  # float: the norm at the last step
    z_score: jax.Array  # float: how many standard deviations it was above the median; 0 until it is judged
    threshold: jax.Array  # float: the largest norm that the last step could have had; infinite until then
    norms: jax.Array  # float (window,): the last norms, a ring
    taken: jax.Array  # int32: norms taken in so far
    inner: Any


class _Verdict(NamedTuple):
    """What the window says of a norm: two bools, and scalars of the dtype of the state."""

    finite: jax.Array
    good: jax.Array
    norm: jax.Array
    z_score: jax.Array
    threshold: jax.Array


@explained
def skip_spikes(
    optimizer: optax.GradientTransformation,
    z_threshold: Bound = 6.0,
    *,
    window: int = 128,
    warmup_steps: int | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip every step whose gradients are far larger than usual, or not finite.

    Such a step returns zero updates and leaves the inner state as it was. The usual is what the last
    `window` norms of the whole gradient say, by the median m and the median absolute deviation d of
    their logarithms: with z = (log(norm) - m) / (1.4826 d), a step of z > z_threshold is skipped.

    Args:
      optimizer: a gradient transformation, as a whole chain.
      z_threshold: how many standard deviations a norm may be above the median: a number, a scalar
        array or a schedule `step -> number`. 6 lets pass 1.8 times the median where the norms vary by
        10%, and 20 times where they vary by a factor of 1.65.
      window: how many of the last norms to remember. The state holds as many floats, 512 bytes for
        128, and a step sorts them.
      warmup_steps: how many norms must be in the window before it judges, at most `window`; until
        then every finite step is taken. None is half of the window.
      axis_name: the mesh axes whose devices skip together, in `pmap` and unchecked `shard_map`.

    Returns:
      A transformation whose state counts `steps`, `skipped`, `skipped_in_a_row` and `nonfinite_count`,
      and holds the last step's `norm`, `z_score` and `threshold`, the largest norm that would have been
      taken (0 and infinite while it does not judge yet).

    Raises:
      TypeError, ValueError: `optimizer` is no gradient transformation; a number is none, negative or
        out of range. When built by `optax.inject_hyperparams` and initialised under `jit`: `window`,
        which is a shape, is traced.

    Guarantees: a norm that is NaN or infinite always skips and never enters the window: however many
    there are in a row, the statistics and the inner state afterwards are, bit for bit, those of a run
    without these steps. So does a norm of 0, which says nothing of the usual size, but for being taken.
    A norm that is skipped for its size does enter the window: a few cannot move a median, so that one
    spike never hides the next; and where the norms have moved to a new level for good, they are the
    new majority after at most half a window, and steps are taken again. z does not change when all
    gradients are scaled. It is at least as if norms varied by 5%. There is no branch that
    waits for the host.

    Differs from the step skipping of Levanter, OLMo and MaxText, whose defaults are the same 6 and
    128: they compare with mean + 6 standard deviations of the norms (and of the losses), which one
    spike can raise far enough to let the next one pass, and which in some of them a single NaN turns
    into NaN until it leaves the window. Logarithms, because norms vary by factors: training a small
    network on batches of 8 without any spike, median and deviation of the norms themselves would skip
    6% of the steps, mean and standard deviation 0.3%, and this none.

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
    inner = optax.with_extra_args_support(check_optimizer("optimizer", optimizer))
    highest = bound_at("z_threshold", z_threshold)
    check_count("window", window, 1)
    if warmup_steps is not None:
        check_count("warmup_steps", warmup_steps, 1)
        known = not isinstance(window, jax.core.Tracer) and not isinstance(warmup_steps, jax.core.Tracer)
        if known and warmup_steps > window:
            raise ValueError(
                f"warmup_steps must be at most window={shown(window)}, got {shown(warmup_steps)}"
            )

    def init(params: Any) -> SkipSpikesState:
        dtype = norm_dtype(jax.tree.leaves(as_arrays(params)))
        number = functools.partial(jnp.zeros, (), dtype)  # a buffer each, to be donated
        counter = functools.partial(jnp.zeros, (), jnp.int32)
        return SkipSpikesState(
            steps=counter(),
            skipped=counter(),
            skipped_in_a_row=counter(),
            nonfinite_count=counter(),
            norm=number(),
            z_score=number(),
            threshold=jnp.full((), jnp.inf, dtype),
            norms=no_ring(window, dtype),
            taken=counter(),
            inner=inner.init(params),
        )

    @in_float64
    def judge(updates: Any, state: SkipSpikesState) -> _Verdict:
        dtype, length = state.norms.dtype, length_of(state.norms, "skip_spikes", window)
        # What a step is worth is no function to be differentiated.
        norm = wide(lax.convert_element_type(lax.stop_gradient(measure_tree(updates, 2.0, axis_name)), dtype))
        filled = jnp.minimum(state.taken, length)
        enough = filled >= (max(1, length // 2) if warmup_steps is None else warmup_steps)
        held = jnp.arange(length, dtype=np.int32) < filled
        logs = jnp.log(jnp.where(held, wide(state.norms), 1.0))
        median = _median(logs, held)
        std = jnp.maximum(_STD_PER_MAD * _median(jnp.abs(logs - median), held), _LEAST_STD)
        at_most = lax.stop_gradient(highest(state.steps))
        threshold = jnp.exp(median + at_most * std)
        finite = jnp.isfinite(norm)
        z = jnp.where(enough, (jnp.log(norm) - median) / std, 0.0)
        shown = (norm, z, jnp.where(enough, threshold, jnp.inf))
        return _Verdict(
            finite,
            finite & ~(enough & ~(norm <= threshold)),
            *(lax.convert_element_type(x, dtype) for x in shown),
        )

    @in_float64
    def remember(state: SkipSpikesState, verdict: _Verdict) -> tuple[jax.Array, jax.Array]:
        norms, enters = state.norms, verdict.finite & (verdict.norm > 0)
        position = state.taken % norms.shape[0]
        new = jnp.where(enters, verdict.norm, norms[position])
        return norms.at[position].set(new), count(state.taken, enters)

    def update(
        updates: Any, state: SkipSpikesState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, SkipSpikesState]:
        check_state("skip_spikes", SkipSpikesState, state)
        verdict = judge(as_arrays(updates), state)
        good = verdict.good

        def step(updates: Any, inner_state: Any) -> tuple[Any, Any]:
            return inner.update(updates, inner_state, params, **extra_args)

        new_updates, new_inner = step_if(good, step, updates, state.inner)
        norms, taken = remember(state, verdict)
        return new_updates, SkipSpikesState(
            steps=count(state.steps, jnp.ones((), bool)),
            skipped=count(state.skipped, ~good),
            skipped_in_a_row=jnp.where(good, 0, count(state.skipped_in_a_row, ~good)),
            nonfinite_count=count(state.nonfinite_count, ~verdict.finite),
            norm=verdict.norm,
            z_score=verdict.z_score,
            threshold=verdict.threshold,
            norms=norms,
            taken=taken,
            inner=new_inner,
        )

    return knowing(optax.GradientTransformationExtraArgs(init, update), *links_of(optimizer))


def _median(values: jax.Array, held: jax.Array) -> jax.Array:
    """The median of the values that are held; something finite if none is."""
    ascending = jnp.sort(jnp.where(held, values, jnp.inf))
    last = jnp.maximum(jnp.sum(held, dtype=np.int32), 1) - 1
    middle = (ascending[last // 2] + ascending[(last + 1) // 2]) / 2
    return jnp.where(jnp.any(held), middle, 0.0)
