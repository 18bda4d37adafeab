"""Transformations for gradients that are not finite: zero their entries, or skip their steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax._core.arguments import explained
from clipjax._core.axes import is_measured
from clipjax._core.dtypes import as_arrays, in_float64
from clipjax._core.links import Clip
from clipjax._core.members import check_state
from clipjax._core.mesh import AxisName, names_of_leaves
from clipjax._core.norms import tree_norm
from clipjax._core.stats import count
from clipjax.gradients.skipping import skipping


class ZeroNonfiniteState(NamedTuple):
    """State of :func:`zero_nonfinite`."""

    steps: jax.Array  # int32: steps so far
    nonfinite_count: jax.Array  # int32: entries zeroed so far
    nonfinite_steps: jax.Array  # int32: steps at which entries were zeroed


class SkipNonfiniteState(NamedTuple):
    """State of :func:`skip_nonfinite`."""

    steps: jax.Array  # int32: steps so far
    skipped: jax.Array  # int32: steps skipped so far, for any reason
    skipped_last: jax.Array  # int32: 1 if the last step was skipped, else 0
    skipped_in_a_row: jax.Array  # int32: steps skipped since the last good one
    nonfinite_count: jax.Array  # int32: steps whose gradients were not finite
    nonfinite_loss_count: jax.Array  # int32: steps whose loss was not finite
    inner: Any  # the state of the inner transformation


@explained
def zero_nonfinite(*, axis_name: AxisName = None) -> optax.GradientTransformationExtraArgs:
    """Replace NaN and infinite entries by 0, and count them.

    Before a clip, this keeps one bad entry from making the rest NaN. To skip the whole step instead, see
    `clipjax.skip_nonfinite`.

    Args:
      axis_name: the mesh axes to count over, in `pmap` and unchecked `shard_map`.

    Returns:
      A transformation whose state counts `steps`, `nonfinite_count` (entries zeroed so far) and
      `nonfinite_steps`, as int32 scalars that stop at their largest value.

    Equals `optax.zero_nans`, but also replaces infinities.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.zero_nonfinite()
      >>> grads = jnp.array([1.0, jnp.nan, -jnp.inf])
      >>> clean, state = tx.update(grads, tx.init(grads))
      >>> print(clean, state.nonfinite_count)
      [1. 0. 0.] 2
    """

    def init(params: Any) -> ZeroNonfiniteState:
        del params
        return ZeroNonfiniteState(*(jnp.zeros((), jnp.int32) for _ in range(3)))

    def update(
        updates: Any, state: ZeroNonfiniteState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, ZeroNonfiniteState]:
        del params, extra_args
        stateless = state is None or isinstance(state, optax.EmptyState)
        if not stateless:
            check_state("zero_nonfinite", ZeroNonfiniteState, state)
        bad = jnp.zeros((), jnp.int32)
        treedef: Any
        leaves, treedef = jax.tree.flatten(as_arrays(updates))
        for i, (leaf, names) in enumerate(zip(leaves, names_of_leaves(updates, axis_name), strict=True)):
            if is_measured(leaf):
                finite = jnp.isfinite(leaf)
                found = jnp.sum(~finite, dtype=np.int32)
                bad = count(bad, lax.psum(found, names) if names else found)
                leaves[i] = jnp.where(finite, leaf, jnp.zeros_like(leaf))
        if stateless:
            return treedef.unflatten(leaves), state
        one = jnp.ones((), bool)
        return treedef.unflatten(leaves), ZeroNonfiniteState(
            count(state.steps, one), count(state.nonfinite_count, bad), count(state.nonfinite_steps, bad > 0)
        )

    return Clip(init, update)


@explained
def skip_nonfinite(
    optimizer: optax.GradientTransformation,
    *,
    max_consecutive: int | None = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip every step whose gradients, or whose loss, are NaN or infinite.

    Such a step returns zero updates and leaves the inner state as it was: moments, schedules and statistics
    are not affected.

    Args:
      optimizer: a gradient transformation, usually a whole chain.
      max_consecutive: after this many skipped steps in a row, the next steps are taken whatever they contain,
        until one is finite. A NaN is then in the weights, and stays there. With None every such step is
        skipped, and :func:`clipjax.raise_if_skipping` can end the run instead.
      axis_name: the mesh axes whose devices skip together, in `pmap` and unchecked `shard_map`.

    Returns:
      A transformation whose state counts `steps`, `skipped`, `skipped_in_a_row` (since the last good step)
      and, by reason, `nonfinite_count` for gradients and `nonfinite_loss_count`, as int32 scalars;
      `skipped_last` is 1 if the last step was skipped, else 0. Call `update(grads, state, params, loss=loss)`
      to check a loss as well: a real scalar, which is also passed on to `optimizer`. On several devices, the
      mean of the losses decides, over the mesh axes that the loss varies on and those of `axis_name`.

    Raises:
      TypeError, ValueError: `optimizer` is not a gradient transformation; `max_consecutive` is below 1; in
        `update`, `loss` is not a real scalar.

    Flax: `nnx.Optimizer.update(model, grads, loss=loss)` passes on a loss. `TrainState.apply_gradients` would
    take it for one of its own fields: write `updates, opt_state = state.tx.update(grads, state.opt_state,
    state.params, loss=loss)`, and set the rest with `state.replace`. `optax.MultiSteps` around this
    transformation passes on the loss of each micro batch, and only the last one of a round counts: give it
    their mean. In an `optax.chain`, the `gradient_transformation()` of a `MultiSteps` drops all extra
    arguments; inside this transformation it needs none.

    Checkpoints: the state of a run without skipping continues in a run with skipping as
    `tx.init(params)._replace(inner=restored)`, and in the other direction as `state.inner`. If no step is
    skipped, the numbers are those of the run without skipping, bit for bit, apart from how XLA rounds a
    different program.

    With `max_consecutive` it equals `optax.apply_if_finite`, except that `apply_if_finite` does not check the
    loss and has a branch, for which accelerators wait.

    Example:
      >>> import clipjax, optax, jax.numpy as jnp
      >>> tx = clipjax.skip_nonfinite(optax.sgd(0.1, momentum=0.9))
      >>> w = jnp.array([1.0, 2.0])
      >>> updates, state = tx.update(jnp.array([jnp.nan, 1.0]), tx.init(w), w)
      >>> print(updates, state.skipped)
      [0. 0.] 1
      >>> _, state = tx.update(jnp.array([1.0, 1.0]), state, w, loss=jnp.inf)
      >>> print(state.skipped, state.nonfinite_loss_count)
      2 1
    """

    @in_float64
    def judge(
        updates: Any, loss: jax.Array | None, state: SkipNonfiniteState
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        # Most clips measure the same norm, so XLA computes it once for both.
        fine = finite = jnp.isfinite(tree_norm(updates, 2.0, axis_name))
        fields = {"nonfinite_count": count(state.nonfinite_count, ~finite)}
        if loss is not None:
            finite_loss = jnp.isfinite(loss)
            fine = finite & finite_loss
            fields["nonfinite_loss_count"] = count(state.nonfinite_loss_count, ~finite_loss)
        return fine, fields

    return skipping(SkipNonfiniteState, optimizer, lambda _: {}, judge, max_consecutive, axis_name)
