"""Gradients that are not finite: zero their elements, or skip their steps."""

from __future__ import annotations

from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clipjax._core.aliases import Memory, Scalar, Step, Tree
from clipjax._core.clip import weak_like
from clipjax._core.door import transformation
from clipjax._core.leaves import Leaves, is_float
from clipjax._core.norms import tree_total
from clipjax.gradients.skipping import skipping


def zero_nonfinite() -> optax.GradientTransformationExtraArgs:
    """Replace NaN and infinite entries by 0, and count them.

    In front of a clip this keeps one bad entry from making all others NaN.
    :func:`skip_nonfinite` skips the whole step instead.

    Returns:
      A transformation with the metrics `zeroed_entries`, how many so far, and
      `nonfinite_steps`, at how many steps.

    Equals `optax.zero_nans`, and replaces infinities, too.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.zero_nonfinite()
      >>> grads = jnp.array([1.0, jnp.nan, -jnp.inf])
      >>> clean, state = tx.update(grads, tx.init(grads))
      >>> print(clean, clipjax.metrics(state)["zero_nonfinite/zeroed_entries"])
      [1. 0. 0.] 2
    """

    def act(updates: Leaves, params: Tree, step: Step, memory: Memory, **_: Any) -> Any:
        bad = [(~jnp.isfinite(x)).astype(np.uint8) for x in updates.floats]
        # In float32, which rounds large counts, but does not wrap where billions of
        # elements are NaN. Flags are bytes, since XLA on a CPU writes what it counts to
        # memory.
        zeroed = tree_total(bad, ord=1)
        values = [_zeroed(x) if is_float(x) else x for x in updates.values]
        most = np.float32(2**31 - 128)  # the largest float32 that fits int32
        entries = jnp.minimum(zeroed, most).astype(np.int32)
        steps = (zeroed > 0).astype(np.int32)
        metrics = {"zeroed_entries": entries, "nonfinite_steps": steps}
        return values, metrics, memory

    return transformation("zero_nonfinite", act)


def _zeroed(x: jax.Array) -> jax.Array:
    zeros = jnp.zeros((), x.dtype)
    return weak_like(x, jnp.where(jnp.isfinite(x), x, zeros))


def skip_nonfinite(
    optimizer: optax.GradientTransformation,
    *,
    max_consecutive: SupportsIndex | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Skip every step whose gradients, or whose loss, are NaN or infinite.

    Such a step returns updates of -0.0, which change no bit of the weights, and keeps
    the whole inner state: moments, schedules and statistics. The inner step is computed
    all the same, and not used. One that decomposes matrices, as GaLore's, may not end
    on a CPU if one is infinite: put :func:`zero_nonfinite` in front of it, inside. What
    the model stores in its forward pass, such as the running statistics of batch norm,
    is not part of the state.

    Args:
      optimizer: a gradient transformation, usually a whole chain.
      max_consecutive: after this many skipped steps, the next ones are taken whatever
        they contain, until one is finite. None: every such step is skipped.

    Returns:
      A transformation with the metrics `norm`, `skipped`, `skipped_last` (1 or 0),
      `skipped_in_a_row`, and by reason `nonfinite_count` for gradients and
      `nonfinite_loss_count`. `update(grads, state, params, loss=loss)` checks a loss as
      well, and passes it on; on several devices their mean. In `pmap` take that
      yourself.

    Raises:
      TypeError: `optimizer` is not a gradient transformation; in `update`, `loss` is
        not a real scalar.

    Equals `optax.apply_if_finite` with `max_consecutive`, and checks the loss and the
    norm, too.

    Example:
      >>> import clipjax, optax, jax.numpy as jnp
      >>> tx = clipjax.skip_nonfinite(optax.sgd(0.1, momentum=0.9))
      >>> w = jnp.array([1.0, 2.0])
      >>> updates, state = tx.update(jnp.array([jnp.nan, 1.0]), tx.init(w), w)
      >>> w = optax.apply_updates(w, updates)
      >>> print(w, clipjax.metrics(state)["skip_nonfinite/skipped"])
      [1. 2.] 1
    """

    def compare(norm: Scalar, loss: Scalar | None, past: Memory, step: Scalar) -> Any:
        return np.False_, past, {}

    return skipping("skip_nonfinite", optimizer, max_consecutive, compare)
