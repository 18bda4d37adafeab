"""The states in a tree, live or restored without a template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from clipjax._core.leaves import as_array, on_host
from clipjax._core.states import MetricsState, NamedState, SkipMemory, Table
from clipjax.adoption.earlier import of_today
from clipjax.monitoring.metrics import restored_table

Words: TypeAlias = tuple[str, ...]  # a path as text, or the fields of a state


# The fields of each kind of state, and those of them that contain arrays.
Kinds: TypeAlias = Mapping[Words, set[str]]


OURS: Kinds = {
    MetricsState._fields: {"step", "metrics"},
    SkipMemory._fields: {"in_a_row"},
    NamedState._fields: {*NamedState._fields},
}


def _kinds_of_optax() -> dict[Words, set[str]]:
    """Return the states of Optax: what a wrapper wraps, else all fields, is there."""
    every = [x for module in (optax, optax.contrib) for x in vars(module).values()]
    states = [x for x in every if isinstance(x, type) and issubclass(x, tuple)]
    all_fields: list[Words] = [getattr(state, "_fields", ()) for state in states]
    return {
        fields: {x for x in fields if "inner" in x} or {*fields}
        for fields in all_fields
        if fields
    }


OPTAX: Kinds = _kinds_of_optax()


class FoundState(NamedTuple):
    """A state that was found in a tree, or a single leaf that belongs to no state."""

    node: Any
    kind: str  # the name of its type; "" for a mapping and for a leaf
    fields: Words  # for a leaf, the names on the way to it
    label: str  # the transformation, for a state with metrics
    # The names of `named` around it; and the labels of `optax.partition`, keys of dicts
    # and attributes, each with a slash, which no name has.
    parts: Words
    path: Words
    leaves: dict[Words, Any]  # without the leaves of states in it

    def __str__(self) -> str:
        what = self.label or self.kind or "/".join(self.fields)
        return f"{what} at {'/'.join(self.path)!r}"


def names_of(path: Any) -> Words:
    """Return the names on a path of JAX."""
    return tuple(keystr((key,), simple=True) for key in path)


def _contains_states(field: str) -> bool:
    """Return whether a field of a NamedTuple contains other states."""
    return "inner" in field or "state" in field or field in NamedState._fields


def found_states(
    node: Any,
    kinds: Kinds,
    path: Words = (),
    names: Words = (),
    parts: Words = (),
    label: str = "",
) -> Iterator[FoundState]:
    """Yield the states in a tree in the order of the chain, the outer ones first.

    Args:
      node: a state, or a node that contains states: a chain, or the labels of a
        partition.
      kinds: the states that mappings may stand for.
      path: the path of the node.
      names: the last part of the path, without the places in chains.
      parts: the labels and names around the node.
      label: the transformation whose memory the node is.

    Yields:
      The states.
    """
    now = of_today(node)
    # In JAX 0.10, `flatten_one_level_with_keys` gives all children of a NamedTuple the
    # name of its first field.
    level = tree_leaves_with_path(now, is_leaf=lambda x: x is not now)
    if [path for path, _ in level] == [()]:
        yield FoundState(now, "", names, "", parts, path, {(): now})
        return
    kind, fields = _kind_of(now, kinds)
    children = {keystr(key, simple=True): child for key, child in level}
    if isinstance(now, Mapping):
        place = {key: int(key) if key.isdigit() else -1 for key in children}
        order = fields or sorted(children, key=lambda key: (place[key], key))
        children = {key: children[key] for key in order if key in children}
    own: dict[Words, Any] = {}
    inside = {}
    for key, child in children.items():
        is_memory = key == "memory" and fields == MetricsState._fields
        is_skip = is_memory and _kind_of(child, OURS)[1] == SkipMemory._fields
        if not fields or _contains_states(key) or is_skip:
            inside[key] = child
        elif key == "metrics" and fields == MetricsState._fields:
            ((label, kept),) = child.items()
            own |= {(key, name): x for name, x in _scalars_in(kept).items()}
        else:
            found = tree_leaves_with_path(child)
            own |= {(key, *names_of(below)): x for below, x in found}
    if fields:
        yield FoundState(now, kind, fields, label, parts, path, own)
    is_named = path[-1:] == NamedState._fields
    # Elsewhere, digits are places in a chain.
    is_label = not fields and (is_named or path[-1:] == ("inner_states",))
    for key, child in inside.items():
        within, after = parts, names
        if fields:
            after = ()
        elif is_label or not key.isdigit():
            within = (*parts, key if is_named else f"{key}/")
            after = names if is_label else (*names, key)
        of = label if key == "memory" else ""
        yield from found_states(child, kinds, (*path, key), after, within, of)


def _kind_of(node: Any, kinds: Kinds) -> tuple[str, Words]:
    """Return the name of the type of a state, "" for a mapping, and its fields."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node).__name__, node._fields
    keys = set(map(str, node)) if isinstance(node, Mapping) else set()
    fitting = [x for x, full in kinds.items() if keys and full <= keys <= {*x}]
    return "", min(fitting, key=len, default=())


def _scalars_in(kept: Any) -> dict[str, Any]:
    """Return metrics by their names."""
    kept = restored_table(kept)
    if not isinstance(kept, Table):
        return {key: as_array(x) for key, x in kept.items()}
    floats, ints, bools = kept.known_names
    row = jnp.asarray(on_host(kept.floats))
    scalars = {name: row[..., i] for i, name in enumerate(floats)}
    if ints or bools:
        row = jnp.asarray(on_host(kept.counts))
        counts = {name: row[..., i] for i, name in enumerate((*ints, *bools))}
        scalars |= counts | {name: counts[name].astype(np.uint32) for name in bools}
    return scalars
