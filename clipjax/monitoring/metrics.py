"""Metrics: what the transformations measured and did, read from their states."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipjax._core.aliases import Metrics, Scalar, Tree
from clipjax._core.leaves import nodes_where, short_repr, unboxed
from clipjax._core.states import (
    MetricsState,
    NamedState,
    SkipMemory,
    name_of,
)


def metrics(opt_state: Tree) -> dict[str, jax.Array]:
    """Read what clipjax's transformations did, as a flat dict of scalars.

    Use it after each step, inside or outside of `jit`, and give the result to any
    logger. One that takes floats gets `{key: float(x) for key, x in
    jax.device_get(metrics(state)).items()}`. A list of the results of all steps is a
    history, which :func:`series` and `plots` take.

    Args:
      opt_state: an optimizer state, however its parts are nested (`chain`, `masked`,
        `partition`, `MultiSteps`, `inject_hyperparams`, …), or anything that contains
        one, such as a Flax `TrainState`, an `nnx.Optimizer`, or a checkpoint, also as
        dicts and lists.

    Returns:
      A dict from `"<transformation>/<metric>"` to scalar arrays, where the second
      transformation of a kind is `<transformation>_1`. For the last step, a clip has
      `norm` (before the clip), `norm_after` and the factor `scale`. For all steps, it
      has `clipped_fraction`, the fraction of them that were clipped, `nonfinite_count`,
      the number of those at which a norm was not finite, and `steps`, the number of
      all. If a clip measures several norms, `norm` is the largest and `scale` the
      smallest factor.

    Raises:
      ValueError: `opt_state` contains no state with metrics.

    When the last step was skipped, whatever the skip wraps did not see it, so its
    values of the last step are NaN, and its counts and fractions stay.
    (`jax_debug_nans` would stop at such a NaN, so with it these values are those of the
    step before.) The skip's own metrics are those of the skipped step. The arrays are
    copies, because the state may be donated to the next step.

    See Also:
      :func:`series` reads one metric of a run; :func:`named` tells transformations of
      one kind apart; :func:`record_norms` adds norms.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_global_norm(1.0)
      >>> grads = {"w": jnp.array([3.0, 4.0])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> print(clipjax.metrics(state)["clip_by_global_norm/norm"])
      5.0
    """
    known = labeled_states_in(opt_state)
    if not known:
        raise ValueError(
            "opt_state: there is no state with metrics in "
            f"{short_repr(opt_state)}; pass the state that tx.init and "
            "tx.update return. Projections and Optax's own transformations have none: "
            "add a clip of clipjax, nonfinite='skip' or record_norms(), and go on from "
            "the state of another chain by clipjax.adopt(old, into=tx.init(params))"
        )
    found = {
        f"{label}/{key}": value
        for label, each in known.items()
        for key, value in _read(each).items()
    }
    return dict(sorted(found.items()))  # sorted, as a jitted function returns them


class Found(NamedTuple):
    """A state that was found in a tree."""

    prefix: str  # what :func:`named` puts before its name
    state: MetricsState
    # How many steps in a row each skip around it skipped, which froze it.
    skips: tuple[jax.Array, ...]


def labeled_states_in(tree: Tree) -> dict[str, Found]:
    """Return the states in a tree by what their metrics begin with."""
    labeled: dict[str, Found] = {}
    for found in states_in(tree):
        name = found.prefix + name_of(found.state)
        numbered = (f"{name}_{i}" if i else name for i in itertools.count())
        labeled[next(x for x in numbered if x not in labeled)] = found
    return labeled


def states_in(tree: Tree) -> list[Found]:
    """Return the states in a tree, outer states before those in their memories."""
    return list(_states_in(unboxed(tree), "", ()))


def _states_in(
    tree: Tree, prefix: str, skips: tuple[jax.Array, ...]
) -> Iterator[Found]:
    def is_known(node: Any) -> bool:
        return bool(_was_tuple(node) or _named_state(node) or _metrics_state(node))

    for node in nodes_where(is_known, tree):
        if _was_tuple(node):
            yield from _states_in(
                [node[i] for i in sorted(node, key=int)], prefix, skips
            )
        elif named := _named_state(node):
            ((name, inner),) = named.named.items()
            yield from _states_in(inner, f"{prefix}{name}/", skips)
        elif state := _metrics_state(node):
            yield Found(prefix, state, skips)
            in_a_row = _in_a_row(state)
            within = skips if in_a_row is None else (*skips, in_a_row)
            yield from _states_in(state.memory, prefix, within)


def restored(kind: Any, needed: Iterable[str], node: Any) -> Any:
    """Return a state of one kind, or made from a mapping in its place; else None.

    NNX, and checkpoints that are restored without a template, make mappings of states,
    and may leave out what is empty: all but the fields that are `needed`.
    """
    if not isinstance(node, Mapping):
        return node if isinstance(node, kind) else None
    if not {*needed} <= node.keys() <= {*kind._fields}:
        return None
    return kind(**{field: node.get(field, ()) for field in kind._fields})


def _was_box(node: Any) -> bool:
    """Whether a node is a variable of Flax NNX that was restored as a mapping."""
    is_single = isinstance(node, Mapping) and node.keys() == {"value"}
    return is_single and not isinstance(node["value"], Mapping)


def _was_tuple(node: Any) -> bool:
    """Whether a node is a tuple that was restored as a mapping from its indices.

    These are texts, of which "10" comes before "2", and lack those of empty states.
    """
    is_mapping = isinstance(node, Mapping) and len(node) > 0
    return is_mapping and all(isinstance(k, str) and k.isdecimal() for k in node)


def _named_state(node: Any) -> NamedState | None:
    found = restored(NamedState, ["named"], node)
    return found if found and _has_one(found.named) else None


def _metrics_state(node: Any) -> MetricsState | None:
    if isinstance(node, Mapping) and _was_box(node.get("step")):
        node = jax.tree.map(
            lambda x: x["value"] if _was_box(x) else x, node, is_leaf=_was_box
        )
    found = restored(MetricsState, ["step", "metrics"], node)
    is_ours = found is not None and _has_one(found.metrics)
    if is_ours and isinstance(node, Mapping):
        # The metrics of other programs are a mapping from names to numbers.
        is_ours = all(isinstance(x, Mapping) for x in found.metrics.values())
    return found if is_ours else None


def _has_one(named: Any) -> bool:
    return isinstance(named, Mapping) and len(named) == 1


def logged_in(state: MetricsState) -> Mapping[str, jax.Array]:
    """Return the metrics in a state, none if it is of a tree without leaves."""
    (kept,) = state.metrics.values()
    return kept if isinstance(kept, Mapping) else {}


def _read(found: Found) -> Metrics:
    """Return the metrics of one state."""
    state = found.state
    config: Any = jax.config  # its type names this flag from JAX 0.12 on
    # There, NaN would raise where nothing is wrong.
    skips = () if config.jax_debug_nans else found.skips
    return _from_scalars(state.step, dict(logged_in(state)), _in_a_row(state), skips)


def skipped_in(opt_state: Tree) -> list[jax.Array]:
    """Return for each skip in a state whether its last step was skipped."""
    counts = [_in_a_row(found.state) for found in states_in(opt_state)]
    return [count > 0 for count in counts if count is not None]


def _in_a_row(state: MetricsState) -> Any:
    """Return the count of skipped steps that a skip remembers, None for other states.

    The memory of a user's own transformation may have a field with the same name.
    """
    skip = restored(SkipMemory, ["in_a_row"], state.memory)
    return skip.in_a_row if skip and "skipped" in logged_in(state) else None


# Jitted, since outside of jit constants would be transferred to the device, which
# transfer guards forbid.
@jax.jit
def _from_scalars(
    step: Scalar, kept: Metrics, in_a_row: Any, skips: tuple[jax.Array, ...]
) -> Metrics:
    """Return metrics from the scalars in a state, in buffers of their own."""
    found = {"steps": jnp.copy(step)}
    of_last = {
        key: x for key, x in kept.items() if jnp.issubdtype(x.dtype, jnp.floating)
    }
    if in_a_row is not None:
        of_last["skipped_last"] = (in_a_row > 0).astype(np.float32)
        found["skipped_in_a_row"] = jnp.abs(in_a_row).astype(np.float32)
    if {"norm", "scale"} <= of_last.keys():
        of_last.setdefault("norm_after", of_last["norm"] * of_last["scale"])
    for key, x in kept.items():
        if x.dtype == np.uint32:
            steps = jnp.maximum(step, 1).astype(np.float32)
            found[f"{key}_fraction"] = x.astype(np.float32) / steps
        elif key not in of_last:
            found[key] = jnp.copy(x)
    # A skip froze the values of the step before it.
    is_frozen: Any = False
    for count in skips:
        is_frozen |= count > 0
    return found | {key: jnp.where(is_frozen, jnp.nan, x) for key, x in of_last.items()}
