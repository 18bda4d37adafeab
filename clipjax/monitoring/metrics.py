"""Metrics: what the transformations measured and did, read from their states wherever these are nested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.arguments import explained, shown
from clipjax._core.stats import Stats, name_of
from clipjax.gradients.nonfinite import SkipNonfiniteState, ZeroNonfiniteState
from clipjax.gradients.spikes import SkipSpikesState


@explained
def metrics(opt_state: Any) -> dict[str, jax.Array]:
    """Read what clipjax' transformations did, wherever their states are nested.

    Args:
      opt_state: the state of a chain, of a wrapper around one (`masked`, `partition`, `MultiSteps`,
        `inject_hyperparams`, …); a tree with such states in it, as a Flax `TrainState`, an `nnx.Optimizer` or
        its `nnx.State`; or the plain dicts and lists that Orbax and `flax.serialization` restore.

    Returns:
      A flat dict of scalar arrays named `<transformation>/<metric>`, as in
      `clip_by_global_norm/norm`; a name that occurs again gets `_1`, `_2`. The metrics of norms:
      `norm` before clipping and `scale` applied at the last step (of several norms the largest and
      the smallest), `steps`, `clipped_fraction` (the share of steps that clipped anything) and
      `nonfinite_count` (the steps whose norm was not finite). What skips steps has `skipped_last` (1 if
      the last step was, else 0), `skipped`, `skipped_in_a_row` and a count for each reason.

    Raises:
      ValueError: there is no state of clipjax in it.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_global_norm(1.0)
      >>> grads = {"w": jnp.array([3.0, 4.0])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> print(clipjax.metrics(state)["clip_by_global_norm/norm"])
      5.0
    """
    found: dict[str, jax.Array] = {}
    repeats: Counter[str] = Counter()
    for name, fields in states_in(opt_state):
        label = f"{name}_{repeats[name]}" if repeats[name] else name
        repeats[name] += 1
        for field, value in fields.items():
            found |= {f"{label}/{key}": metric for key, metric in _metrics_of(field, value).items()}
    if not repeats:
        raise ValueError(
            f"opt_state: there is no state of a clipjax transformation in {shown(opt_state)}; it is what "
            f"tx.init and tx.update return"
        )
    return found


def states_in(tree: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The names and fields of the states of clipjax' transformations, each before those nested in it."""
    for node in jax.tree.leaves(tree, is_leaf=lambda node: _is_state(node) or isinstance(node, Mapping)):
        if _is_state(node):
            yield name_of(type(node)), node._asdict()
            yield from states_in(tuple(node))
        elif isinstance(node, Mapping):
            if name := _name_of_fields(node):
                yield name, node
            for value in node.values():  # in their own order, which JAX sorts
                yield from states_in(value)


def _is_state(node: Any) -> bool:
    kind = type(node)
    ours = kind.__module__.startswith("clipjax.") and kind.__name__.endswith("State")
    return ours and hasattr(kind, "_fields")


def _name_of_fields(fields: Mapping[Any, Any]) -> str:
    """The transformation whose state has become a dict; nothing if it is another one."""
    for kind in (ZeroNonfiniteState, SkipNonfiniteState, SkipSpikesState):
        if set(fields) ^ set(kind._fields) <= {"inner"}:  # left out by Flax and Orbax where it is empty
            return name_of(kind)
    return next((key for key, value in fields.items() if _is_stats(value)), "")


def _is_stats(value: Any) -> bool:
    return isinstance(value, Stats) or (isinstance(value, Mapping) and set(value) == set(Stats._fields))


def _metrics_of(field: str, value: Any) -> dict[str, jax.Array]:
    """The metrics in one field of a state: statistics or a scalar; anything else has none."""
    if _is_stats(value):
        ordered = [value[name] for name in Stats._fields] if isinstance(value, Mapping) else value
        # Flax NNX wraps arrays in variables, which this takes off.
        stats = Stats(*jax.tree.leaves(ordered))
        clipped, steps = (lax.convert_element_type(n, np.float32) for n in (stats.clipped, stats.steps))
        return {
            "norm": stats.norm,
            "scale": stats.factor,
            "steps": stats.steps,
            "clipped_fraction": clipped / jnp.maximum(steps, 1),
            "nonfinite_count": stats.nonfinite,
        }
    arrays = [] if isinstance(value, Mapping | Sequence) else jax.tree.leaves(value)
    return {field: arrays[0]} if len(arrays) == 1 and jnp.ndim(arrays[0]) == 0 else {}
