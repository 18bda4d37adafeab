"""Metrics: what the transformations measured and did, read from their states at any depth of nesting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.arguments import explained, shown
from clipjax._core.mesh import placed_as
from clipjax._core.stats import Stats, name_of
from clipjax.gradients.groups import OfGroup
from clipjax.gradients.nonfinite import SkipNonfiniteState, ZeroNonfiniteState
from clipjax.gradients.spikes import SkipSpikesState
from clipjax.monitoring.records import Recorded


@explained
def metrics(opt_state: Any) -> dict[str, jax.Array]:
    """Read what clipjax's transformations did, however deeply their states are nested.

    Args:
      opt_state: the state of a chain or of a wrapper around one (`masked`, `partition`, `MultiSteps`,
        `inject_hyperparams`, …); a tree that contains such states, such as a Flax `TrainState`, an
        `nnx.Optimizer` or its `nnx.State`; or the plain dicts and lists that Orbax and `flax.serialization`
        restore.

    Returns:
      A flat dict of scalar arrays named `<transformation>/<metric>`, as in `clip_by_global_norm/norm`; a
      transformation that occurs again gets `_1`, `_2` and so on. A clip has the metrics `norm` before
      clipping, `norm_after` and `scale` at the last step (with several norms, the largest norms and the
      smallest scale), `steps`, `clipped_fraction` (the share of steps that clipped anything) and
      `nonfinite_count` (the steps whose norm was not finite). A transformation that skips steps has
      `skipped_last` (1 if the last step was skipped, else 0), `skipped`, `skipped_in_a_row` and a count for
      each reason. For a logger that takes floats, and for JSON: `{name: float(x) for name, x in
      jax.device_get(metrics(state)).items()}`.

    Raises:
      ValueError: `opt_state` contains no state of clipjax.

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
        for group, value in (fields.get("groups") or {}).items():
            of_group = _metrics_of_group(value, found[f"{label}/steps"])
            found |= {f"{label}/{key}/{group}{layer}": metric for key, layer, metric in of_group}
    if not repeats:
        raise ValueError(
            f"opt_state: there is no state of a clipjax transformation in {shown(opt_state)}; pass the state "
            f"that tx.init and tx.update return"
        )
    return found


def states_in(tree: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the names and fields of the states of clipjax's transformations, outer states first."""
    for node in jax.tree.leaves(tree, is_leaf=lambda node: _is_state(node) or isinstance(node, Mapping)):
        if _is_state(node):
            yield name_of(type(node)), node._asdict()
            yield from states_in(tuple(node))
        elif isinstance(node, Mapping):
            if name := _name_of_fields(node):
                yield name, node
            for key in sorted(node, key=_rank):  # JAX does not keep the original order
                yield from states_in(node[key])


def _rank(key: Any) -> tuple[int, str]:
    """Return a sort key for the keys of a dict: text, but numbers for the positions in a restored tuple."""
    return (int(key) if str(key).isdigit() else -1, str(key))


def _is_state(node: Any) -> bool:
    kind = type(node)
    ours = kind.__module__.startswith("clipjax.") and kind.__name__.endswith("State")
    return ours and hasattr(kind, "_fields")


def _name_of_fields(fields: Mapping[Any, Any]) -> str:
    """Return the transformation whose state has become this dict, or "" if it is not one of clipjax."""
    for kind in (ZeroNonfiniteState, SkipNonfiniteState, SkipSpikesState):
        if set(fields) ^ set(kind._fields) <= {"inner"}:  # Flax and Orbax leave it out if it is empty
            return name_of(kind)
    return next((key for key, value in fields.items() if _is(Stats, value) or _is(Recorded, value)), "")


def _is(kind: type[Any], value: Any) -> bool:
    """Return whether a value is a named tuple of this class, or a mapping made from one."""
    return isinstance(value, kind) or (isinstance(value, Mapping) and set(value) == set(kind._fields))


def _ordered(kind: type[Any], value: Any) -> list[Any]:
    """Return the fields of a named tuple, or of the mapping made from it, in the order of its class."""
    return [value[name] for name in kind._fields] if isinstance(value, Mapping) else list(value)


def _metrics_of(field: str, value: Any) -> dict[str, jax.Array]:
    """Return the metrics in one field of a state: statistics or a scalar; other fields have none."""
    if _is(Stats, value):
        # Flax NNX wraps arrays in variables; `jax.tree.leaves` unwraps them.
        stats = Stats(*jax.tree.leaves(_ordered(Stats, value)))
        return {
            "norm": stats.norm,
            "norm_after": stats.after,
            "scale": stats.factor,
            "steps": stats.steps,
            "clipped_fraction": _share(stats.clipped, stats.steps),
            "nonfinite_count": stats.nonfinite,
        }
    if _is(Recorded, value):
        steps, nonfinite, norms = _ordered(Recorded, value)
        each = [(f"{of}/{group}".strip("/"), x) for of, found in norms.items() for group, x in found.items()]
        named = {"steps": steps, "nonfinite_count": nonfinite, **dict(each)}
        return {name: jax.tree.leaves(x)[0] for name, x in named.items()}
    arrays = [] if isinstance(value, Mapping | Sequence) else jax.tree.leaves(value)
    return {field: arrays[0]} if len(arrays) == 1 and jnp.ndim(arrays[0]) == 0 else {}


def _metrics_of_group(value: Any, steps: jax.Array) -> Iterator[tuple[str, str, jax.Array]]:
    """Yield the name, the layer and the value of each metric of a group; layers only if it is a stack."""
    norm, after, factor, clipped = jax.tree.leaves(_ordered(OfGroup, value))
    metrics = {"norm": norm, "norm_after": after, "scale": factor, "clipped_fraction": _share(clipped, steps)}
    for key, metric in metrics.items():
        if jnp.ndim(metric) > jnp.ndim(steps):  # `steps` has axes of its own under `jax.vmap`
            whole = placed_as(np.zeros(metric.shape), metric)
            yield from ((key, f"/{layer}", whole[..., layer]) for layer in range(whole.shape[-1]))
        else:
            yield key, "", metric


def _share(events: jax.Array, steps: jax.Array) -> jax.Array:
    events, steps = (lax.convert_element_type(n, np.float32) for n in (events, steps))
    steps = jnp.maximum(steps, 1)
    return events / steps.reshape(steps.shape + (1,) * (events.ndim - steps.ndim))
