"""Skipping a step: what :func:`skip_nonfinite` and :func:`skip_spikes` share."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax import _checks
from clipjax._core import bounds, norms, states, transformation, trees
from clipjax._core.aliases import Metrics, Scalar, Tree
from clipjax._core.messages import short_repr
from clipjax.gradients.history import norm_dtype

# compare(norm, loss, past, step) -> (whether they are a spike, the next past, metrics)
Compare: TypeAlias = Callable[
    [Scalar, Scalar | None, Any, Scalar], tuple[Any, Any, Metrics]
]


class SkipMemory(NamedTuple):
    """What a transformation that skips steps remembers."""

    past: Any  # what it compares a step with
    in_a_row: Scalar  # int32: bad steps in a row, at most `max_consecutive`
    inner: Any  # the state of the inner transformation


def skipping(
    name: str,
    optimizer: optax.GradientTransformation,
    max_consecutive: SupportsIndex | None,
    compare: Compare,
    initial: Callable[[Any], Any] = lambda dtype: (),
) -> optax.GradientTransformationExtraArgs:
    """Make a transformation that skips steps which are not finite, or spikes.

    `compare` says what is a spike; `initial` makes the first past, from the dtype of
    the norm.
    """
    _checks.check_transformation("optimizer", optimizer)
    inner = optax.with_extra_args_support(optimizer)
    most = None
    if max_consecutive is not None:
        most = _checks.check_count("max_consecutive", max_consecutive, 1)

    def judge(updates: Tree, loss: Scalar | None, memory: SkipMemory, step: Any) -> Any:
        """Return whether the step is skipped, metrics, and what is remembered."""
        norm = lax.stop_gradient(norms.tree_norm(trees.floats_of(updates)))
        spike, past, metrics = compare(norm, loss, memory.past, step)
        bad_loss = jnp.zeros((), bool) if loss is None else ~jnp.isfinite(loss)
        fine = jnp.isfinite(norm) & ~bad_loss & ~spike
        skipped = ~fine if most is None else ~(fine | (memory.in_a_row >= most))
        # It stays at `max_consecutive`, so that bad steps are taken until a fine one
        # makes it 0.
        one = skipped.astype(np.int32)
        more = states.saturating_add(memory.in_a_row, one)
        in_a_row = jnp.where(fine, 0, more)
        metrics |= {
            "skipped": one,
            "nonfinite_loss_count": bad_loss.astype(np.int32),
            "norm": norm,
            "skipped_last": skipped.astype(norm.dtype),
            "skipped_in_a_row": in_a_row.astype(norm.dtype),
        }
        metrics = transformation.checked_metrics(name, metrics)
        return skipped, metrics, SkipMemory(past, in_a_row, memory.inner)

    def init(params: Tree) -> states.MetricsState:
        step = jnp.zeros((), np.int32)
        # Without the inner state, which may hold anything.
        first = SkipMemory(initial(norm_dtype(params)), jnp.zeros((), np.int32), ())
        _, metrics, _ = trees.eval_shape(judge, params, None, first, step)
        memory = first._replace(inner=inner.init(params))
        if trees.nodes_where(lambda x: isinstance(x, states.BadSteps), memory.inner):
            raise ValueError(
                f"keep: record_norms is inside of {name}, where its state is frozen at "
                "bad steps. Put it outside: optax.chain(record_norms(..., keep=n), "
                f"{name}(...))"
            )
        return states.first_state(name, metrics, memory)

    def update(
        updates: Tree, state: Any, params: Tree = None, **extra: Any
    ) -> tuple[Tree, states.MetricsState]:
        norms.warn_if_local()
        states.check_state(name, states.MetricsState, state)
        loss = loss_of(extra)
        skipped, metrics, memory = judge(updates, loss, state.memory, state.step)
        taken = inner.update(updates, memory.inner, params, **extra)
        nothing = jax.tree.map(_nothing, taken[0]), memory.inner
        updates, after = _select(skipped, nothing, taken)
        memory = memory._replace(inner=after)
        return updates, states.next_state(state, metrics, memory)

    return optax.GradientTransformationExtraArgs(init, update)


def _select(skipped: Scalar, old: Tree, new: Tree) -> Tree:
    """Return the old tree if the step is skipped, else the new one, in its dtypes.

    Entries are selected: a `lax.cond` copies the state and keeps all updates on a TPU,
    and waits for the host on a GPU (JAX 0.12).
    """

    def select(old: Any, new: Any) -> jax.Array:
        old = jnp.asarray(old)
        new = jnp.asarray(new)
        same = old if old.dtype == new.dtype else old.astype(new.dtype)
        return lax.select(skipped, same, new)

    return jax.tree.map(select, old, new)


def _nothing(x: Any) -> jax.Array:
    zeros = jnp.zeros_like(x)
    return -zeros if trees.is_float(zeros) else zeros  # -0.0 + 0.0 would be 0.0


def loss_of(extra: Mapping[str, Any]) -> Scalar | None:
    """Return the mean over devices of the loss that `update` got, if it got one."""
    loss = extra.get("loss")
    if loss is None:
        return None
    is_real = bounds.is_real(loss)
    if not is_real or np.ndim(loss):
        given = f"shape {np.shape(loss)}" if is_real else short_repr(loss)
        raise TypeError(
            f"loss must be a real scalar, such as the mean over the batch, got {given}"
        )
    value = jnp.asarray(loss, norms.sum_dtype(jnp.result_type(loss)))
    return norms.over_devices(lax.pmean, lax.stop_gradient(value))
