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
        found |= {f"{label}/{key}": value for key, value in _own(state).items()}
    return found


def _is_state(node: Any) -> bool:
    """Whether a node is the state of one of our transformations: a NamedTuple whose name says so."""
    kind = type(node)
    return (
        hasattr(kind, "_fields")
        and kind.__module__.startswith("clipjax.")
        and kind.__name__.endswith("State")
    )


def _states(tree: Any) -> Iterator[Any]:
    for node in jax.tree.leaves(tree, is_leaf=_is_state):
        if _is_state(node):
            yield node
            yield from _states(tuple(node))


def _own(state: Any) -> dict[str, jax.Array]:
    """The metrics of one state, but not of those nested in it."""
    shown: dict[str, jax.Array] = {}
    for key, value in state._asdict().items():
        if isinstance(value, Stats):
            stats = Stats(*jax.tree.leaves(value))  # Flax NNX wraps each array in a variable
            clipped, steps = (lax.convert_element_type(n, np.float32) for n in (stats.clipped, stats.steps))
            shown |= {
                "norm": stats.norm,
                "scale": stats.scale,
                "steps": stats.steps,
                "clipped_fraction": clipped / jnp.maximum(steps, 1),
                "nonfinite_count": stats.nonfinite,
            }
        elif not isinstance(value, dict | list | tuple):
            arrays = jax.tree.leaves(value)
            if len(arrays) == 1 and jnp.ndim(arrays[0]) == 0:
                shown[key] = arrays[0]
    return shown
