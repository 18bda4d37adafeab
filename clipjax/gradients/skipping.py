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
from clipjax.gradients.history import norm_dtype
from clipjax.gradients.window import keeps_bad_steps


class SkipMemory(NamedTuple):
    """What a transformation that skips steps remembers."""

    past: Any  # what it compares a step with
    in_a_row: (
        jax.Array
    )  # int32: how many steps in a row were bad, at most `max_consecutive`
    inner: Any  # the state of the inner transformation


def skipping(
    name: str,
    optimizer: optax.GradientTransformation,
    max_consecutive: SupportsIndex | None,
    compare: Callable[[Any, Any, Any, Any], tuple[Any, Any, dict[str, Any]]],
    remember: Callable[[Any], Any],
) -> optax.GradientTransformationExtraArgs:
    """Make a transformation that skips steps whose norm or loss is not finite or a spike.

    `compare(norm, loss, past, step)` returns whether they are a spike, the next past,
    and metrics; `remember(dtype)` makes the first past, from the dtype of the norm.
    """
    inner = optax.with_extra_args_support(
        _checks.check_transformation("optimizer", optimizer)
    )
    most = (
        None
        if max_consecutive is None
        else _checks.check_count("max_consecutive", max_consecutive, 1)
    )

    def judge(updates: Any, params: Any, step: Any, memory: Any, **extra: Any) -> Any:
        past, in_a_row, _ = memory
        loss = loss_of(extra)
        norm = lax.stop_gradient(norms.tree_norm(trees.floats_of(updates)))
        spike, past, metrics = compare(norm, loss, past, step)
        bad_loss = jnp.zeros((), bool) if loss is None else ~jnp.isfinite(loss)
        fine = jnp.isfinite(norm) & ~bad_loss & ~spike
        skipped = ~(fine if most is None else fine | (in_a_row >= most))
        # It stays at `max_consecutive`, so that bad steps are taken until a fine one
        # makes it 0.
        in_a_row = jnp.where(fine, 0, transformation.saturating_add(in_a_row, skipped))
        counts = {"skipped": skipped, "nonfinite_loss_count": bad_loss}
        last = {"norm": norm, "skipped_last": skipped, "skipped_in_a_row": in_a_row}
        metrics |= {key: x.astype(np.int32) for key, x in counts.items()}
        metrics |= {key: x.astype(norm.dtype) for key, x in last.items()}
        return ~skipped, metrics, SkipMemory(past, in_a_row, ())

    def first(params: Any) -> SkipMemory:
        return SkipMemory(remember(norm_dtype(params)), jnp.zeros((), np.int32), ())

    # Without the inner state: `init` traces `judge`, and an inner step may need
    # arguments that only `update` gets.
    watch = transformation.with_metrics(name, judge, first)

    def init(params: Any) -> transformation.MetricsState:
        state = watch.init(params)
        first_of_inner = inner.init(params)
        if keeps_bad_steps(first_of_inner):
            raise ValueError(
                f"keep: record_norms is inside of {name}, where its state is frozen at "
                "bad steps. Put it outside: optax.chain(record_norms(..., keep=n), "
                f"{name}(...))"
            )
        return state._replace(memory=state.memory._replace(inner=first_of_inner))

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, transformation.MetricsState]:
        transformation.check_state(name, transformation.MetricsState, state)
        before, seen = (
            state.memory.inner,
            state._replace(memory=state.memory._replace(inner=())),
        )
        taken, watched = watch.update(updates, seen, params, **extra)
        step, after = inner.update(updates, before, params, **extra)
        updates, after = _select(
            taken, (step, after), (jax.tree.map(_nothing, step), before)
        )
        return updates, watched._replace(memory=watched.memory._replace(inner=after))

    return optax.GradientTransformationExtraArgs(init, update)


def _select(taken: jax.Array, new: Any, old: Any) -> Any:
    """Return the new tree if the step is taken, else the old one.

    Entries are selected: a `lax.cond` copies the state and keeps all updates on a TPU,
    and waits for the host on a GPU.
    """

    def select(new: Any, old: Any) -> Any:
        new, old = jnp.asarray(new), jnp.asarray(old)
        return lax.select(
            taken, new, old if old.dtype == new.dtype else old.astype(new.dtype)
        )

    return jax.tree.map(select, new, old)


def _nothing(x: Any) -> Any:
    zeros = jnp.zeros_like(x)
    return -zeros if trees.is_float(zeros) else zeros  # -0.0 + 0.0 would be 0.0


def loss_of(extra: dict[str, Any]) -> jax.Array | None:
    """Return the mean over devices of the loss that `update` got, if it got one."""
    loss = extra.get("loss")
    if loss is None:
        return None
    if not bounds.is_real(loss) or np.ndim(loss):
        given = (
            f"shape {np.shape(loss)}"
            if bounds.is_real(loss)
            else bounds.short_repr(loss)
        )
        raise TypeError(
            f"loss must be a real scalar, such as the mean over the batch, got {given}"
        )
    value = jnp.asarray(loss, norms.sum_dtype(jnp.result_type(loss)))
    return norms.over_devices(lax.pmean, lax.stop_gradient(value))
