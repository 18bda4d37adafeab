"""Metrics: what the transformations measured and did, read from their states wherever these are nested."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.stats import Stats


def metrics(opt_state: Any) -> dict[str, jax.Array]:
    """Read what clipjax' transformations did, wherever their states are nested.

    Args:
      opt_state: the state of a chain, of a wrapper around one (`masked`, `partition`, `MultiSteps`,
        `inject_hyperparams`, `nnx.Optimizer.opt_state`, …), or a tree with such states in it, as a
        Flax `TrainState`.

    Returns:
      A flat dict of scalar arrays named `<transformation>/<metric>`, as in
      `clip_by_global_norm/norm`; a name that occurs again gets `_1`, `_2`. The metrics of norms:
      `norm` before clipping and `scale` applied at the last step (of several norms the largest and
      the smallest), `steps`, `clipped_fraction` (the share of steps that clipped anything) and
      `nonfinite_count` (the steps whose norm was not finite).

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
    for state in _states(opt_state):
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(state).__name__.removesuffix("State")).lower()
        label = f"{name}_{repeats[name]}" if repeats[name] else name
        repeats[name] += 1
        for field, value in state._asdict().items():
            found |= {f"{label}/{key}": metric for key, metric in _metrics_of(field, value).items()}
    return found


def _states(tree: Any) -> Iterator[Any]:
    """The states of clipjax' transformations, each before those nested in it."""
    for node in jax.tree.leaves(tree, is_leaf=_is_state):
        if _is_state(node):
            yield node
            yield from _states(tuple(node))


def _is_state(node: Any) -> bool:
    kind = type(node)
    ours = kind.__module__.startswith("clipjax.") and kind.__name__.endswith("State")
    return ours and hasattr(kind, "_fields")


def _metrics_of(field: str, value: Any) -> dict[str, jax.Array]:
    """The metrics in one field of a state: statistics or a scalar; anything else has none."""
    arrays = jax.tree.leaves(value)  # which also takes off the variables that Flax NNX wraps arrays in
    if isinstance(value, Stats):
        stats = Stats(*arrays)
        clipped, steps = (lax.convert_element_type(n, np.float32) for n in (stats.clipped, stats.steps))
        return {
            "norm": stats.norm,
            "scale": stats.scale,
            "steps": stats.steps,
            "clipped_fraction": clipped / jnp.maximum(steps, 1),
            "nonfinite_count": stats.nonfinite,
        }
    is_scalar = not isinstance(value, dict | list | tuple) and len(arrays) == 1 and jnp.ndim(arrays[0]) == 0
    return {field: arrays[0]} if is_scalar else {}
