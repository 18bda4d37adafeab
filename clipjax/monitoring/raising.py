"""Ending a run whose steps are all skipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from clipjax._core.arguments import explained, shown
from clipjax._core.bounds import check_count
from clipjax.monitoring.metrics import states_in

_REASONS = ("nonfinite_count", "nonfinite_loss_count", "norm_spike_count", "loss_spike_count")


@explained
def raise_if_skipping(opt_state: Any, max_consecutive: int) -> None:
    """Raise an error if too many steps in a row have been skipped.

    Call it in the training loop, outside `jit`, and not at every step: it waits for the step that made the
    state.

    Args:
      opt_state: a state that contains that of :func:`clipjax.skip_nonfinite` or :func:`clipjax.skip_spikes`,
        however deeply nested, as for :func:`clipjax.metrics`.
      max_consecutive: the number of skipped steps in a row that raises the error.

    Raises:
      RuntimeError: at least `max_consecutive` steps have been skipped since the last good step. The message
        has the name of the transformation, the number of steps, and the counts by reason. Nothing is lost:
        the state, and the weights of the last good step, can still be saved.
      ValueError: `opt_state` contains no state of a transformation that skips; `max_consecutive` is below 1.
      TypeError: it is called under `jit`, where the values of the state are not known.

    This is not a callback inside the step, such as `jax.debug.callback`. An error raised in a callback would
    lose both the buffers that were donated to the step, including the weights, and the results of the step;
    and every step would call the host. To continue training instead, set `max_consecutive` of the
    transformation that skips. If several processes train together, all have the same state, so all of them
    raise.

    Example:
      >>> import clipjax, optax, jax.numpy as jnp
      >>> tx = clipjax.skip_nonfinite(optax.sgd(0.1))
      >>> w = jnp.array([1.0, 2.0])
      >>> state = tx.init(w)
      >>> for _ in range(3):
      ...     updates, state = tx.update(jnp.full(2, jnp.nan), state, w)
      >>> clipjax.raise_if_skipping(state, 4)
      >>> clipjax.raise_if_skipping(state, 3)
      Traceback (most recent call last):
      ...
      RuntimeError: skip_nonfinite: 3 steps in a row were skipped, 3 of 3 in all; nonfinite_count: 3, \
nonfinite_loss_count: 0
    """
    check_count("max_consecutive", max_consecutive, 1)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(opt_state)):
        raise TypeError("opt_state must be known: call raise_if_skipping outside jit, after the step")
    found = [(name, of) for name, of in states_in(opt_state) if "skipped_in_a_row" in of]
    if not found:
        raise ValueError(
            f"opt_state: there is no state of clipjax.skip_nonfinite or skip_spikes in {shown(opt_state)}; "
            f"pass the state that tx.init and tx.update return"
        )
    stuck = [_described(name, of) for name, of in found if _number(of, "skipped_in_a_row") >= max_consecutive]
    if stuck:
        raise RuntimeError("\n".join(stuck))


def _described(name: str, fields: Mapping[str, Any]) -> str:
    in_a_row, steps, skipped = (_number(fields, key) for key in ("skipped_in_a_row", "steps", "skipped"))
    reasons = ", ".join(f"{key}: {_number(fields, key)}" for key in _REASONS if key in fields)
    return f"{name}: {in_a_row} steps in a row were skipped, {skipped} of {steps} in all; {reasons}"


def _number(fields: Mapping[str, Any], key: str) -> int:
    """Return a counter; the largest one if `vmap` or `pmap` has stacked several states."""
    return int(np.max(jax.device_get(jax.tree.leaves(fields[key])[0])))
