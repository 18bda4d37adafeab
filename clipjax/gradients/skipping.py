"""Skipping a step: the common code of :func:`skip_nonfinite` and :func:`skip_spikes`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax import _checks
from clipjax._core import bounds, norms, transformation, trees


class SkipMemory(NamedTuple):
    """What a transformation that skips steps remembers."""

    past: Any  # what it compares a step with
    in_a_row: jax.Array  # int32: how many steps it has skipped since it took one
    inner: Any  # the state of the inner transformation


class Verdict(NamedTuple):
    """What `compare` decided about a step."""

    spike: Any  # bool
    past: Any  # for the next step
    counts: dict[str, Any]  # bools: events that are counted
    last: dict[str, Any]  # floats to log


def skipping(
    name: str,
    optimizer: optax.GradientTransformation,
    max_consecutive: SupportsIndex | None,
    compare: Callable[[Any, Any, Any, Any], Verdict],
    remember: Callable[[Any], Any],
) -> optax.GradientTransformationExtraArgs:
    """Make a transformation that skips steps whose norm or loss is not finite or a spike.

    `compare(norm, loss, past, step)` says whether they are a spike, and `remember(dtype)` makes the first past, from
    the dtype of the norm.
    """
    inner = optax.with_extra_args_support(_checks.check_transformation("optimizer", optimizer))
    most = None if max_consecutive is None else _checks.check_count("max_consecutive", max_consecutive, 1)

    def judge(updates: Any, params: Any, step: Any, memory: Any, **extra: Any) -> Any:
        past, in_a_row = memory
        loss = None if extra.get("loss") is None else _mean_of_devices(extra["loss"])
        norm = lax.stop_gradient(norms.tree_norm(trees.floats_of(updates)))
        verdict = compare(norm, loss, past, step)
        bad_loss = jnp.zeros((), bool) if loss is None else ~jnp.isfinite(loss)
        fine = ~(~jnp.isfinite(norm) | bad_loss | verdict.spike)
        skipped = ~(fine if most is None else fine | (in_a_row >= most))
        # It stays at `max_consecutive`, so that bad steps are taken until a fine one makes it 0.
        in_a_row = jnp.where(fine, 0, transformation.saturating_add(in_a_row, skipped))
        counts = {"skipped": skipped, "nonfinite_loss_count": bad_loss, **verdict.counts}
        last = {"norm": norm, "skipped_last": skipped, "skipped_in_a_row": in_a_row}
        metrics = {key: x.astype(np.int32) for key, x in counts.items()}
        metrics |= {key: x.astype(norm.dtype) for key, x in last.items()} | verdict.last
        return updates, metrics, (verdict.past, in_a_row)

    def before(params: Any) -> Any:
        return remember(norms.norm_dtype(params)), jnp.zeros((), np.int32)

    watch = transformation.with_metrics(name, judge, before)

    def init(params: Any) -> transformation.MetricsState:
        state = watch.init(params)
        past, in_a_row = state.memory
        return state._replace(memory=SkipMemory(past, in_a_row, inner.init(params)))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, transformation.MetricsState]:
        transformation.check_state(name, transformation.MetricsState, state)
        past, in_a_row, inner_state = state.memory
        _, watched = watch.update(updates, state._replace(memory=(past, in_a_row)), params, **extra)
        past, in_a_row = watched.memory
        taken = watched.last[f"{name}/skipped_last"] == 0

        def step(updates: Any, inner_state: Any) -> tuple[Any, Any]:
            return inner.update(updates, inner_state, params, **extra)

        updates, inner_state = _step_if(taken, step, updates, inner_state)
        return updates, watched._replace(memory=SkipMemory(past, in_a_row, inner_state))

    return optax.GradientTransformationExtraArgs(init, update)


def _step_if(taken: jax.Array, step: Callable[..., Any], updates: Any, state: Any) -> tuple[Any, Any]:
    """Return what `step(updates, state)` returns if the step is taken, else zero updates and the same state.

    Entries are selected: a `lax.cond` copies the state and keeps all updates on a TPU, and waits for the host on a GPU.
    """

    def select(new: Any, old: Any) -> Any:
        new, old = jnp.asarray(new), jnp.asarray(old)
        return lax.select(taken, new, old if old.dtype == new.dtype else old.astype(new.dtype))

    def nothing(x: Any) -> Any:
        zeros = jnp.zeros_like(x)
        return -zeros if trees.is_float(zeros) else zeros  # -0.0 + 0.0 would be 0.0

    updates, new_state = step(updates, state)
    return jax.tree.map(select, updates, jax.tree.map(nothing, updates)), jax.tree.map(select, new_state, state)


def _mean_of_devices(loss: Any) -> jax.Array:
    """Return the mean of a loss over devices, or raise if it is not a real scalar."""
    if not bounds.is_real(loss) or np.ndim(loss):
        given = f"shape {np.shape(loss)}" if bounds.is_real(loss) else bounds.short_repr(loss)
        raise TypeError(f"loss must be a real scalar, such as the mean over the batch, got {given}")
    value = jnp.asarray(loss, norms.sum_dtype(jnp.result_type(loss)))
    return norms.over_devices(lax.pmean, lax.stop_gradient(value))
