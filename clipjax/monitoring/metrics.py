"""Metrics: what the transformations measured and did, read from their states."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipjax._core import transformation
from clipjax._core.messages import short_repr
from clipjax.gradients.window import is_of_recorder


def metrics(opt_state: Any) -> dict[str, jax.Array]:
    """Read what clipjax's transformations did: a flat dict of scalars for any logger.

    Args:
      opt_state: an optimizer state, however its parts are nested (`chain`, `masked`,
        `partition`, `MultiSteps`, `inject_hyperparams`, …), or a tree that contains
        one, such as a Flax `TrainState` or an `nnx.Optimizer`.

    Returns:
      A dict from `"<transformation>/<metric>"` to scalar arrays; a transformation that
      occurs again gets `_1`, `_2` and so on. Of a clip: `norm` before, `norm_after` and
      `scale` at the last step (with several norms the largest, and the smallest scale),
      `clipped_fraction` of all steps, `nonfinite_count` and `steps`.

    Raises:
      ValueError: `opt_state` contains no state of clipjax.

    The arrays are copies, so that the state may be donated to the next step. A list of
    what each step returned is a history, for :func:`series` and `plots`.

    A logger that takes floats: `{key: float(x) for key, x in
    jax.device_get(metrics(state)).items()}`.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_global_norm(1.0)
      >>> grads = {"w": jnp.array([3.0, 4.0])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> print(clipjax.metrics(state)["clip_by_global_norm/norm"])
      5.0
    """
    found: dict[str, jax.Array] = {}
    labels: set[str] = set()
    states = list(states_in(opt_state))
    if not states:
        raise ValueError(
            "opt_state: there is no state with metrics in "
            f"{short_repr(opt_state)}; pass the state that tx.init and "
            "tx.update return. A projection has none: add a clip, nonfinite='skip' "
            "or record_norms()"
        )
    for state in states:
        parts = (state.last, state.totals, state.shares)
        arrays = [{key: as_array(x) for key, x in part.items()} for part in parts]
        squared = is_of_recorder(state.memory)
        each = _read(*arrays, as_array(state.step), squared=squared)
        if not each:
            continue
        name = next(iter(each)).partition("/")[0]
        numbered = (f"{name}_{i}" if i else name for i in itertools.count())
        label = next(x for x in numbered if x not in labels)
        labels.add(label)
        found |= {label + key.removeprefix(name): value for key, value in each.items()}
    return dict(sorted(found.items()))  # as those that a jitted function returns


def states_in(tree: Any) -> Iterator[transformation.MetricsState]:
    """Yield the states in a tree, outer states before those in their memories."""
    for node in jax.tree.leaves(
        tree, is_leaf=lambda node: isinstance(node, transformation.MetricsState)
    ):
        if isinstance(node, transformation.MetricsState):
            yield node
            yield from states_in(node.memory)


# Jitted, so that outside of jit no constant goes to the device, which transfer guards
# forbid.
@functools.partial(jax.jit, static_argnames="squared")
def _read(
    last: dict[str, jax.Array],
    totals: dict[str, jax.Array],
    shares: dict[str, jax.Array],
    steps: jax.Array,
    squared: bool,
) -> dict[str, jax.Array]:
    """Return the metrics of one state, in buffers that are not the state's own."""
    if squared:
        last = {key: jnp.sqrt(x) for key, x in last.items()}
    found = last | totals
    for key, count in shares.items():
        known = jnp.maximum(steps, 1).astype(np.float32)
        found[f"{key}_fraction"] = count.astype(np.float32) / known
    if found:
        name = next(iter(found)).partition("/")[0]
        found[f"{name}/steps"] = steps
    return jax.tree.map(jnp.copy, found)


def as_array(x: Any) -> jax.Array:
    """Return the array in a box of Flax NNX, or the array itself."""
    return jax.tree.leaves(x)[0]
