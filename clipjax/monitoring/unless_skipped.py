"""What else, besides weights and optimizer state, a skipped step must not change."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from clipjax._core.aliases import Tree
from clipjax._core.leaves import short_repr
from clipjax._core.states import old_if
from clipjax.monitoring.metrics import skipped_in

T = TypeVar("T")


def unless_skipped(opt_state: Tree, *, new: T, old: T) -> T:
    """Return a new value, or the old one if the last step was skipped.

    Use it for what a training step changes besides the weights and the optimizer state.
    The running statistics of batch norm, which the model changes in its forward pass,
    would take in the NaN of a skipped step: `stats = clipjax.unless_skipped(opt_state,
    new=new_stats, old=stats)`. Averages of weights, and schedules that you keep
    yourself, need the same protection.

    Args:
      opt_state: the optimizer state after the step, or a tree that contains it, as in
        :func:`metrics`.
      new: a pytree of arrays, as it is after the step.
      old: the same pytree, as it was before the step.

    Returns:
      `old` if one of the skips in `opt_state` skipped the last step, else `new`; in the
      dtypes of `new`.

    Raises:
      ValueError: `opt_state` has no skip, or is stacked, as `vmap` makes it (then call
        `jax.vmap` of this function); `new` and `old` differ in structure.

    See Also:
      :func:`skip_nonfinite`, :func:`skip_spikes` and :func:`bounded`, which skip steps.

    Example:
      >>> import clipjax, optax, jax.numpy as jnp
      >>> tx = clipjax.skip_nonfinite(optax.sgd(0.1))
      >>> w = jnp.ones(2)
      >>> _, state = tx.update(jnp.array([jnp.nan, 1.0]), tx.init(w), w)
      >>> print(clipjax.unless_skipped(state, new=jnp.nan * w, old=w))
      [1. 1.]
    """
    skipped = skipped_in(opt_state)
    if not skipped:
        raise ValueError(
            "opt_state: there is no skip in it; use nonfinite='skip', skip_nonfinite "
            "or skip_spikes"
        )
    structures: Any = [jax.tree.structure(each) for each in (new, old)]
    if structures[0] != structures[1]:
        raise ValueError(
            "new and old must have the same structure, such as that of "
            f"nnx.state(model, nnx.BatchStat), got {short_repr(structures)}"
        )
    was_skipped = functools.reduce(jnp.logical_or, skipped)
    if was_skipped.ndim:
        raise ValueError(
            f"opt_state: it is stacked, of shape {was_skipped.shape}: use "
            "jax.vmap(clipjax.unless_skipped)"
        )
    return old_if(was_skipped, old, new)
