"""Skipping a step: the common code of :func:`skip_nonfinite` and :func:`skip_spikes`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax import _core


class SkipMemory(NamedTuple):
    """What a transformation that skips steps remembers."""

    past: Any  # what it compares a step with
    inner: Any  # the state of the inner transformation


class Verdict(NamedTuple):
    """Whether a step is a spike, and what to remember, count and log of it."""

    spike: Any  # bool
    past: Any  # for the next step
    counts: dict[str, Any]  # bools: events that are counted
    last: dict[str, Any]  # floats to log


def skipping(
    name: str,
    optimizer: optax.GradientTransformation,
    max_consecutive: int | None,
    compare: Callable[[Any, Any, Any, Any], Verdict],
    remember: Callable[[Any], Any],
) -> optax.GradientTransformationExtraArgs:
    """Make a transformation that skips steps whose norm or loss is not finite or a spike.

    `compare(norm, loss, past, step)` says whether they are a spike, and `remember(dtype)` makes the first past, from
    the dtype of the norm.
    """
    inner = optax.with_extra_args_support(_core.check_transformation("optimizer", optimizer))
    most = None if max_consecutive is None else _core.check_count("max_consecutive", max_consecutive, 1)

    def init(params: Any) -> _core.MetricsState:
        _core.leaves_of(params)  # for its errors
        dtype = _core.norm_dtype(params)
        past = remember(dtype)
        verdict = jax.eval_shape(compare, jnp.zeros((), dtype), jnp.zeros(()), past, jnp.zeros((), np.int32))
        keys = ("skipped", "nonfinite_count", "nonfinite_loss_count", *verdict.counts)
        totals = {f"{name}/{key}": jnp.zeros((), np.int32) for key in keys}
        last = {f"{name}/{key}": jnp.zeros((), np.int32) for key in ("skipped_last", "skipped_in_a_row")}
        last |= {f"{name}/{key}": jnp.zeros((), x.dtype) for key, x in verdict.last.items()}
        return _core.MetricsState(jnp.zeros((), np.int32), last, totals, {}, SkipMemory(past, inner.init(params)))

    def update(
        updates: Any, state: Any, params: Any = None, *, loss: Any = None, **extra: Any
    ) -> tuple[Any, _core.MetricsState]:
        _core.check_state(name, _core.MetricsState, state)
        if loss is not None:
            extra["loss"] = loss  # the inner transformation may use it, too
            loss = _mean_of_devices(loss)
        norm = lax.stop_gradient(_core.tree_norm(_core.floats_of(updates)))
        verdict = compare(norm, loss, state.memory.past, state.step)
        bad_norm, bad_loss = ~jnp.isfinite(norm), jnp.zeros((), bool) if loss is None else ~jnp.isfinite(loss)
        fine = ~(bad_norm | bad_loss | verdict.spike)
        in_a_row = state.last[f"{name}/skipped_in_a_row"]
        taken = fine if most is None else fine | (in_a_row >= most)

        def step(updates: Any, inner_state: Any) -> tuple[Any, Any]:
            return inner.update(updates, inner_state, params, **extra)

        updates, inner_state = _step_if(taken, step, updates, state.memory.inner)
        metrics = {
            "skipped": ~taken,
            "nonfinite_count": bad_norm,
            "nonfinite_loss_count": bad_loss,
            **verdict.counts,
            "skipped_last": ~taken,
            # It stays at `max_consecutive`, so that bad steps are taken until a fine one makes it 0.
            "skipped_in_a_row": jnp.where(fine, 0, in_a_row + (~taken).astype(np.int32)),
        }
        counted = {f"{name}/{key}": x.astype(np.int32) for key, x in metrics.items()}
        logged = {f"{name}/{key}": x for key, x in verdict.last.items()}
        return updates, _core.next_state(state, counted | logged, SkipMemory(verdict.past, inner_state))

    return optax.GradientTransformationExtraArgs(init, update)


def _step_if(taken: jax.Array, step: Callable[..., Any], updates: Any, state: Any) -> tuple[Any, Any]:
    """Return what `step(updates, state)` returns if the step is taken, else zero updates and the same state.

    Selecting the old or the new state instead of branching compiles for minutes at hundreds of leaves.
    """

    def skip(updates: Any, state: Any) -> tuple[Any, Any]:
        like, like_state = jax.eval_shape(step, updates, state)
        # Zeros like the updates keep weak types; but optax.lookahead, say, returns another structure than it gets.
        before: Any
        before, after = jax.tree.structure(updates), jax.tree.structure(like)
        zeros = jax.tree.map(jnp.zeros_like, updates if before == after else like)
        zeros = jax.tree.map(_typed_as, like, zeros)
        return zeros, jax.tree.map(_typed_as, like_state, state)

    if not isinstance(taken, jax.core.Tracer):  # without jit, each branch would be compiled at each step
        return step(updates, state) if taken else skip(updates, state)
    return lax.cond(taken, step, skip, updates, state)


def _typed_as(like: Any, x: Any) -> jax.Array:
    """Return x with the dtype of `like`, and inside `shard_map` differing over the same mesh axes."""
    x = jnp.asarray(x)
    missing = tuple(name for name in _core.mesh_axes(like) if name not in _core.mesh_axes(x))
    x = x if x.dtype == like.dtype else x.astype(like.dtype)
    return lax.pcast(x, missing, to="varying") if missing else x


def _mean_of_devices(loss: Any) -> jax.Array:
    """Return the mean of a loss over devices, or raise if it is not a real scalar."""
    if not _core.is_real(loss) or np.ndim(loss):
        given = f"shape {np.shape(loss)}" if _core.is_real(loss) else _core.short_repr(loss)
        raise TypeError(f"loss must be a real scalar, such as the mean over the batch, got {given}")
    value = jnp.asarray(loss, _core.wide(jnp.result_type(loss)))
    return _core.over_devices(lax.pmean, lax.stop_gradient(value))
