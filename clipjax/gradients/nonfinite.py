"""Gradients that are not finite: zero their elements, or skip their steps."""

from __future__ import annotations

from typing import Any, Never, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clipjax._core.aliases import Memory, Step, Tree
from clipjax._core.clip import weak_like
from clipjax._core.door import transformation
from clipjax._core.leaves import Leaves, is_inexact
from clipjax._core.norms import tree_total
from clipjax.gradients.skipping import SkipTransformation, skipping


def zero_nonfinite() -> optax.GradientTransformationExtraArgs:
    """Replace NaN and infinite elements by 0, and count them.

        x if x is finite, else 0

    Use it in front of a clip when single elements are not finite and the other elements
    should still be used. Without it, a clip makes all elements NaN that share a norm
    with such an element. When whole batches are corrupted, use :func:`skip_nonfinite`.

    Returns:
      A gradient transformation with the metrics `zeroed_entries`, the number of
      elements that were replaced in all steps, and `nonfinite_steps`, the number of
      steps with such an element.

    Equals `optax.zero_nans`, except that it replaces infinite elements too, and counts.

    See Also:
      :func:`skip_nonfinite` skips the whole step; :func:`bounded` takes
      `nonfinite="zero"`.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.zero_nonfinite()
      >>> grads = jnp.array([1.0, jnp.nan, -jnp.inf])
      >>> clean, state = tx.update(grads, tx.init(grads))
      >>> print(clean, clipjax.metrics(state)["zero_nonfinite/zeroed_entries"])
      [1. 0. 0.] 2
    """

    def act(
        updates: Leaves, params: Tree, step: Step, memory: Memory, /, **_: Any
    ) -> Any:
        bad = [(~jnp.isfinite(x)).astype(np.uint8) for x in updates.inexact]
        # The count is float32, which rounds large counts, but does not wrap where
        # billions of elements are NaN. Flags are bytes, since XLA on a CPU writes what
        # it counts to memory.
        zeroed = tree_total(bad, ord=1)
        values = [_zeroed(x) if is_inexact(x) else x for x in updates.values]
        most = np.float32(2**31 - 128)  # the largest float32 that fits int32
        entries = jnp.minimum(zeroed, most).astype(np.int32)
        steps = (zeroed > 0).astype(np.int32)
        metrics = {"zeroed_entries": entries, "nonfinite_steps": steps}
        return updates.rebuild(values), metrics, memory

    return transformation("zero_nonfinite", act)


def _zeroed(x: jax.Array) -> jax.Array:
    zeros = jnp.zeros((), x.dtype)
    return weak_like(x, jnp.where(jnp.isfinite(x), x, zeros))


def skip_nonfinite(
    optimizer: optax.GradientTransformation,
    *args: Never,
    max_consecutive: SupportsIndex | None = None,
    check_updates: bool = False,
) -> SkipTransformation:
    """Skip every step whose gradients, or whose loss, are NaN or infinite.

    Use it around the whole optimizer when corrupted batches, or overflow in 16 bits,
    must not reach the weights. At a skipped step the updates are -0.0, which change no
    bit of the weights, and the whole inner state stays as it was: moments, schedules
    and statistics.

    The inner step is computed all the same, and its result is not used. An inner step
    that decomposes matrices, as GaLore's does, may not end on a CPU if an element is
    infinite: put :func:`zero_nonfinite` in front of it, within the skip. What the model
    stores in its forward pass, such as the running statistics of batch norm, is not
    part of the optimizer state: :func:`unless_skipped` keeps it.

    Args:
      optimizer: a gradient transformation, usually a whole chain.
      max_consecutive: the number of steps in a row that may be skipped. After these
        steps, all steps are applied, whatever they contain, until a step is finite, and
        the metric `skipped_in_a_row` stays at this number. None, the default, skips
        every step that is not finite.
      check_updates: whether a step is also skipped if its gradients are finite but the
        updates that the optimizer makes of them are not, as with moments that were
        restored as NaN, or a matrix iteration that diverged. False by default, since
        all updates then have to be measured before any of them is applied: compiled for
        a TPU v5e, a step of Adam moves 12 times the bytes of the parameters in place of
        8, and needs memory for one more copy of them.

    Returns:
      A gradient transformation with the metrics `norm`, `skipped` (the number of
      skipped steps), `skipped_last` (1 or 0), `skipped_in_a_row`, and the number of
      steps by reason: `nonfinite_count` for gradients, `nonfinite_loss_count` for the
      loss, and `update_nonfinite_count` for updates of finite gradients. `update(grads,
      state, params, loss=loss)` checks a loss too, and passes it on. On several devices
      it checks the mean of their losses.

    Raises:
      TypeError: `optimizer` is not a gradient transformation, or not the only
        positional argument; `check_updates` is not a bool; in `update`, `loss` is not a
        real scalar.

    Equals `optax.apply_if_finite` with `max_consecutive_errors=max_consecutive`, which
    may be 0 there, except that it also skips a step whose loss is not finite, or whose
    norm overflows although all elements are finite.

    See Also:
      :func:`skip_spikes` also skips outlier steps; :func:`zero_nonfinite` replaces
      single elements; :func:`bounded` takes `nonfinite="skip"`; :func:`explain`, called
      right after a skipped step with the same batch, replays exactly that step, since
      weights and state are as they were, and names the operation that broke it.

    Example:
      >>> import clipjax, optax, jax.numpy as jnp
      >>> tx = clipjax.skip_nonfinite(optax.sgd(0.1, momentum=0.9))
      >>> w = jnp.array([1.0, 2.0])
      >>> updates, state = tx.update(jnp.array([jnp.nan, 1.0]), tx.init(w), w)
      >>> w = optax.apply_updates(w, updates)
      >>> print(w, clipjax.metrics(state)["skip_nonfinite/skipped"])
      [1. 2.] 1
    """
    return skipping(
        "skip_nonfinite",
        optimizer,
        args,
        max_consecutive=max_consecutive,
        check_updates=check_updates,
        compare=lambda norm, loss, past, step: (np.False_, past, {}),
    )
