"""Skipping a step: what :func:`skip_nonfinite` and :func:`skip_spikes` share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax._core.aliases import Metrics, Scalar, Step, Tree
from clipjax._core.bounds import check_count, check_flag, check_transformation, is_real
from clipjax._core.door import transformation
from clipjax._core.leaves import Leaves, flatten, is_inexact, nodes_where, short_repr
from clipjax._core.norms import over_devices, sum_dtype, tree_norm
from clipjax._core.states import BadSteps, SkipMemory, old_if, saturating_add
from clipjax.gradients.past_norms import norm_dtype

# compare(norm, loss, past, step) -> (whether it is an outlier, the next past, metrics)
Compare: TypeAlias = Callable[
    [Scalar, Scalar | None, Any, Scalar], tuple[Any, Any, Metrics]
]


class SkipTransformation(optax.GradientTransformationExtraArgs):
    """The transformation that :func:`skip_nonfinite` and :func:`skip_spikes` return.

    It belongs around whatever keeps a state: a clip, the optimizer, or all of
    :func:`bounded`.
    """


def skipping(
    name: str,
    optimizer: optax.GradientTransformation,
    others: Sequence[Any],
    *,
    max_consecutive: SupportsIndex | None,
    check_updates: bool,
    compare: Compare,
    initial: Callable[[Any], Any] = lambda dtype: (),
) -> SkipTransformation:
    """Make a transformation that skips steps which are outliers or not finite.

    Args:
      name: the first part of the names of its metrics.
      optimizer: what a skipped step leaves alone.
      others: what was passed by position besides the optimizer, which is an error.
      max_consecutive: the number of steps in a row that may be skipped, or None.
      check_updates: whether updates that are not finite are skipped, too.
      compare: decides whether a step is an outlier.
      initial: makes the first `past` from the dtype of the norm.

    Returns:
      The transformation.
    """
    if others:
        raise TypeError(
            f"{name} takes one positional argument, the optimizer: write "
            f"{name}(optax.chain(clip, optimizer)) for several transformations, and "
            "pass everything else by name, as in max_consecutive=10; got "
            f"{short_repr(others[0])}"
        )
    check_transformation("optimizer", optimizer)
    check_flag("check_updates", check_updates)
    inner = optax.with_extra_args_support(optimizer)
    is_endless = max_consecutive is None
    most = None if is_endless else check_count("max_consecutive", max_consecutive, 1)

    def judge(
        updates: Leaves, step: Step, memory: SkipMemory, loss: Any, taken: Tree
    ) -> Any:
        """Return whether the step is skipped, metrics, and what is remembered."""
        norm = lax.stop_gradient(tree_norm(updates.inexact))
        spike, past, metrics = compare(norm, loss, memory.past, step)
        bad_loss = jnp.zeros((), bool) if loss is None else ~jnp.isfinite(loss)
        bad_update = jnp.zeros((), bool)
        if check_updates:
            after = lax.stop_gradient(tree_norm(flatten(taken).inexact))
            bad_update = jnp.isfinite(norm) & ~jnp.isfinite(after)
        fine = jnp.isfinite(norm) & ~bad_loss & ~spike & ~bad_update
        before = memory.in_a_row
        enough = False if most is None else (before >= most) | (before < 0)
        skipped = ~(fine | enough)
        one_more = saturating_add(jnp.maximum(before, 0), jnp.int32(1))
        in_a_row = jnp.where(skipped, one_more, jnp.where(fine, 0, -jnp.abs(before)))
        metrics |= {
            "skipped": skipped.astype(np.int32),
            "nonfinite_loss_count": bad_loss.astype(np.int32),
            "update_nonfinite_count": bad_update.astype(np.int32),
            "norm": norm,
        }
        return skipped, metrics, memory._replace(past=past, in_a_row=in_a_row)

    def remember(params: Leaves) -> SkipMemory:
        past = initial(norm_dtype(params))
        state = inner.init(params.rebuild(params.values))
        if nodes_where(lambda node: isinstance(node, BadSteps), state):
            raise ValueError(
                f"keep: record_norms is wrapped by {name}, which freezes its state at "
                "bad steps. Put it outside: optax.chain(record_norms(..., keep=n), "
                f"{name}(...))"
            )
        return SkipMemory(past, jnp.zeros((), np.int32), state)

    def measure(updates: Leaves, params: Tree, step: Step, memory: SkipMemory) -> Any:
        return judge(updates, step, memory, None, params)[1]

    def act(
        updates: Leaves, params: Tree, step: Step, memory: SkipMemory, /, **extra: Any
    ) -> Any:
        loss = loss_of(extra)
        gradients = updates.rebuild(updates.values)
        taken, state = inner.update(gradients, memory.inner, params, **extra)
        skipped, metrics, after = judge(updates, step, memory, loss, taken)
        changed, state = unless(skipped, taken, memory.inner, state)
        return changed, metrics, after._replace(inner=state)

    return SkipTransformation(*transformation(name, act, remember, measure))


def unless(waits: Scalar, updates: Tree, old: Tree, new: Tree) -> tuple[Any, Any]:
    """Return the updates and the new state, or, if `waits`, zeros and the old state.

    Elements are selected, since a `lax.cond` copies the state and keeps all updates in
    memory on a TPU, and waits for the host on a GPU (JAX 0.12).
    """
    nothing = jax.tree.map(_nothing, updates)
    return old_if(waits, nothing, updates), old_if(waits, old, new)


def _nothing(x: Any) -> jax.Array:
    zeros = jnp.zeros_like(x)
    return -zeros if is_inexact(zeros) else zeros  # -0.0 + 0.0 would be 0.0


def loss_of(extra: Mapping[str, Any]) -> Scalar | None:
    """Return the loss that `update` got, as the mean over devices, or None."""
    loss = extra.get("loss")
    if loss is None:
        return None
    if not is_real(loss) or np.ndim(loss):
        given = f"shape {np.shape(loss)}" if is_real(loss) else short_repr(loss)
        raise TypeError(
            f"loss must be a real scalar, such as the mean over the batch, got {given}"
        )
    value = jnp.asarray(loss, sum_dtype(jnp.result_type(loss)))
    return over_devices(lax.pmean, lax.stop_gradient(value))
