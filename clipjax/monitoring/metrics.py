"""Metrics: what the transformations measured and did, read from their states."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipjax._core import states, trees
from clipjax._core.aliases import Metrics, Scalar
from clipjax._core.messages import short_repr


def metrics(opt_state: Any) -> dict[str, jax.Array]:
    """Read what clipjax's transformations did: a flat dict of scalars for any logger.

    Args:
      opt_state: an optimizer state, however its parts are nested (`chain`, `masked`,
        `partition`, `MultiSteps`, `inject_hyperparams`, …), or a tree that contains
        one, such as a Flax `TrainState`, an `nnx.Optimizer`, or what Orbax restored
        from a checkpoint without a template.

    Returns:
      A dict from `"<transformation>/<metric>"` to scalar arrays; a transformation that
      occurs again gets `_1`, `_2` and so on. Of a clip: `norm` before, `norm_after` and
      `scale` at the last step (with several norms the largest, and the smallest scale),
      `clipped_fraction` of all steps, `nonfinite_count` and `steps`.

    Raises:
      ValueError: `opt_state` contains no state of clipjax.

    Without a template, fields of a state are in the order of their names: of what
    `optax.contrib.sam`, which has two optimizers, contains twice, numbers are swapped.

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
    known = list(states_in(opt_state))
    if not known:
        raise ValueError(
            "opt_state: there is no state with metrics in "
            f"{short_repr(opt_state)}; pass the state that tx.init and "
            "tx.update return. A projection has none: add a clip, nonfinite='skip' "
            "or record_norms()"
        )
    for state in known:
        each = _metrics_of(state)
        if not each:
            continue
        name = states.name_in(each)
        numbered = (f"{name}_{i}" if i else name for i in itertools.count())
        label = next(x for x in numbered if x not in labels)
        labels.add(label)
        found |= {label + key.removeprefix(name): value for key, value in each.items()}
    return dict(sorted(found.items()))  # as those that a jitted function returns


def states_in(tree: Any) -> Iterator[states.MetricsState | states.NormsState]:
    """Yield the states in a tree, outer states before those in their memories.

    Checkpoints that are restored without a template, and NNX, make mappings of states.
    """
    for node in trees.nodes_where(_is_state, tree):
        if isinstance(node, states.NormsState):
            yield node
        elif isinstance(node, Mapping) and _is_of_norms(node):
            yield _norms_from(node)
        else:
            state = _metrics_from(node) if isinstance(node, Mapping) else node
            yield state
            yield from states_in(state.memory)


def _is_state(node: Any) -> bool:
    if isinstance(node, Mapping):
        return _is_of_norms(node) or _is_of_metrics(node)
    return isinstance(node, states.MetricsState | states.NormsState)


def _is_of_norms(node: Mapping[str, Any]) -> bool:
    """Return whether a mapping was a state of a recorder.

    Weights may have the same names, but no names without values.
    """
    needed = {"step", "norms", "text"}
    has_fields = needed <= node.keys() <= {*states.NormsState._fields}
    return has_fields and not jax.tree.leaves(node.get("names"))


def _is_of_metrics(node: Mapping[str, Any]) -> bool:
    """Return whether a mapping was a state of a transformation with metrics."""
    counts = node.get("counts")
    has_fields = node.keys() <= {*states.MetricsState._fields}
    is_counts = isinstance(counts, Mapping) and any(map(states.has_steps, counts))
    return has_fields and is_counts


def _norms_from(node: Mapping[str, Any]) -> states.NormsState:
    names = node.get("names") or _names_in(as_array(node["text"]))
    kept = node.get("kept") or {}
    return states.NormsState(
        node["step"],
        dict.fromkeys(sorted(names), ()),
        node["norms"],
        {key: states.BadSteps(**each) for key, each in kept.items()},
        node["text"],
    )


def _metrics_from(node: Mapping[str, Any]) -> states.MetricsState:
    last = node.get("last") or {}
    return states.MetricsState(last, dict(node["counts"]), node.get("memory", ()))


def _names_in(text: Any) -> list[str]:
    """Return the names of norms, of which `nnx.state` keeps the text alone."""
    if isinstance(text, jax.core.Tracer):
        raise ValueError(
            "opt_state: inside jit, nnx.state has no names of norms: pass the "
            "optimizer itself"
        )
    letters = np.asarray(text)
    return letters[(0,) * (letters.ndim - 1)].tobytes().decode().split("\n")


def _metrics_of(state: states.MetricsState | states.NormsState) -> Metrics:
    if isinstance(state, states.NormsState):
        norms, step = as_array(state.norms), as_array(state.step)
        return _read_norms(state.names, norms, step)
    last, counts = (
        {key: as_array(row) for key, row in rows.items()}
        for rows in (state.last, state.counts)
    )
    return _read(last, counts)


# Jitted, so that outside of jit no constant goes to the device, which transfer guards
# forbid.
@jax.jit
def _read(last: Metrics, counts: Metrics) -> Metrics:
    """Return the metrics of one state, in buffers that are not the state's own."""
    found = states.scalars_in(last) | states.scalars_in(counts)
    steps = f"{states.name_in(found)}/steps"
    if len(found) == 1:
        return {}
    known = jnp.maximum(found[steps], 1).astype(np.float32)
    for key in [key for key in found if key.endswith("/steps") and key != steps]:
        share = found.pop(key).astype(np.float32) / known
        found[f"{key.removesuffix('/steps')}_fraction"] = share
    return found


@jax.jit
def _read_norms(names: dict[str, tuple[()]], norms: jax.Array, step: Scalar) -> Metrics:
    found = {f"record_norms/{name}": norms[..., i] for i, name in enumerate(names)}
    return found | {"record_norms/steps": jnp.copy(step)}


def as_array(x: Any) -> jax.Array:
    """Return the array in a box of Flax NNX, or the array itself."""
    return jax.tree.leaves(x)[0]
