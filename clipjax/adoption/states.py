"""The states in a tree, live or restored without a template."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import optax
from jax.tree_util import DictKey, keystr, tree_leaves_with_path

from clipjax._core.leaves import as_array, nodes_where
from clipjax._core.states import MetricsState, NamedState, SkipMemory

Words: TypeAlias = tuple[str, ...]  # a path as text, or the fields of a state


class Kind(NamedTuple):
    """What is known of states with certain fields."""

    needed: set[str]  # the fields that contain arrays, which a checkpoint has
    inner: set[str]  # the fields that contain other states
    # For each such state in `new`, its path and the fields that contain arrays: a label
    # of `optax.partition` without parameters has fewer of them.
    in_new: Mapping[Words, set[str]] = MappingProxyType({})


Kinds: TypeAlias = Mapping[Words, Kind]


def _contains_states(field: str) -> bool:
    """Return whether the name of a field says that it contains other states."""
    return "inner" in field or "state" in field or field in NamedState._fields


# Those of Optax. `MaskedNode`, which stands for arrays, has no fields.
_TYPES: Any = tuple(
    each
    for module in (optax, optax.contrib)
    for each in vars(module).values()
    if isinstance(each, type) and hasattr(each, "_fields") and each._fields
)


def _kinds_of_optax() -> dict[Words, Kind]:
    """Return the states of Optax's wrappers. A checkpoint has what is wrapped."""
    all_fields: list[Words] = [state._fields for state in _TYPES]
    return {
        fields: Kind(
            {x for x in fields if "inner" in x} or {*fields},
            {x for x in fields if _contains_states(x)},
        )
        for fields in all_fields
        if any(map(_contains_states, fields))
    }


OURS: Kinds = {
    MetricsState._fields: Kind({"step", "metrics"}, set()),
    SkipMemory._fields: Kind({"in_a_row"}, {"inner"}),
    NamedState._fields: Kind({*NamedState._fields}, {*NamedState._fields}),
}
OPTAX: Kinds = _kinds_of_optax()
KNOWN: Kinds = {**OURS, **OPTAX}


def is_state(node: Any) -> bool:
    """Return whether a node is a NamedTuple, as live states are."""
    return isinstance(node, tuple) and hasattr(node, "_fields")


def is_live(tree: Any) -> bool:
    """Return whether a tree has types, which no checkpoint without a template has."""

    def is_typed(node: Any) -> bool:
        is_plain = isinstance(node, Mapping) or type(node) in (list, tuple)
        if is_plain or jax.tree_util.all_leaves([node]):
            return False
        return bool(jax.tree.leaves(node))  # NNX keeps `MaskedNode`, which is empty

    return bool(nodes_where(is_typed, tree))


def kinds_in(new: Any) -> Kinds:
    """Return the kinds of the states in a tree, and of ours and of Optax's wrappers."""
    kinds: dict[Words, Kind] = {}
    for each in found_states(new, {}):
        if is_state(each.node):
            full = {key for key, x in each.node._asdict().items() if jax.tree.leaves(x)}
            known = kinds.get(each.fields) or OURS.get(each.fields) or Kind(full, set())
            needed = known.needed if each.fields in OURS else known.needed | full
            inner = known.inner | inner_fields(each.node)
            in_new = {**known.in_new, each.path: full}
            kinds[each.fields] = Kind(needed, inner, in_new)
    return kinds | {x: kind for x, kind in KNOWN.items() if x not in kinds}


class FoundState(NamedTuple):
    """A state that was found in a tree, or a single leaf that belongs to no state."""

    node: Any
    # Its type; for a leaf, that of the object around it; None for mappings.
    kind: type[Any] | None
    fields: Words  # for a leaf, the names on the way to it
    label: str  # the transformation, for a state with metrics
    # The names of `named` around it; and the labels of `optax.partition`, keys of dicts
    # and attributes, each with a slash, which no name has.
    parts: Words
    path: Words
    leaves: dict[Words, Any]  # without the leaves of states in it

    def __str__(self) -> str:
        kind = self.kind.__name__ if self.kind else ""
        what = self.label or kind or "/".join(self.fields)
        return f"{what} at {'/'.join(self.path)!r}"


def inner_fields(state: Any) -> set[str]:
    """Return the fields of a live state that contain other states.

    A field of a user's own state may have any name.
    """
    if state._fields in OURS:
        return OURS[state._fields].inner
    return {
        field
        for field, value in state._asdict().items()
        if _contains_states(field) or nodes_where(_is_known, value)
    }


def _is_known(node: Any) -> bool:
    """Return whether a node is a state of Optax or of clipjax."""
    is_ours = is_state(node) and node._fields in OURS
    return is_ours or isinstance(node, _TYPES)


def names_of(path: Any) -> Words:
    """Return the names on a path of JAX."""
    return tuple(keystr((key,), simple=True) for key in path)


class Place(NamedTuple):
    """Where a node is in a tree."""

    path: Words = ()
    names: Words = ()  # the last part of the path, without the places in chains
    parts: Words = ()  # the labels and names around the node
    label: str = ""  # the transformation whose memory the node is
    owner: type[Any] | None = None  # of the object whose attribute it is
    # The field whose value the node is, if the keys of this value are labels or names.
    labeled_by: str = ""


_LABELED = (*NamedState._fields, "inner_states")
_TOP = Place()


def found_states(
    node: Any, kinds: Kinds, keyed: set[Words] | None = None, at: Place = _TOP
) -> Iterator[FoundState]:
    """Yield the states in a tree in the order of the chain, the outer ones first.

    Args:
      node: a state, or a node that contains states: a chain, or the labels of a
        partition.
      kinds: the states that mappings may stand for.
      keyed: the paths of the mappings whose digits are keys, and not the places in a
        chain that a checkpoint restored; None for all.
      at: where the node is.

    Yields:
      The states.
    """
    now = node
    # In JAX 0.10, `flatten_one_level_with_keys` gives all children of a NamedTuple the
    # name of its first field.
    level = tree_leaves_with_path(now, is_leaf=lambda x: x is not now)
    if [path for path, _ in level] == [()]:
        yield FoundState(now, at.owner, at.names, "", at.parts, at.path, {(): now})
        return
    has_labels = bool(at.labeled_by) and type(now) not in (list, tuple)
    fields = () if has_labels else _fields_of(now, kinds, at.path)
    kind = type(now) if is_state(now) else None
    children = {keystr(key, simple=True): child for key, child in level}
    is_mapping = isinstance(now, Mapping)
    if is_mapping:
        order = fields or sorted(children, key=_place_of)
        children = {key: children[key] for key in order if key in children}
    inner = {*children}
    if fields:
        inner = kinds[fields].inner if fields in kinds else inner_fields(now)
    label = at.label
    own: dict[Words, Any] = {}
    inside = {}
    for key, child in children.items():
        is_memory = key == "memory" and fields == MetricsState._fields
        is_skip = is_memory and _fields_of(child, OURS, ()) == SkipMemory._fields
        if key in inner or is_skip:
            inside[key] = child
        elif key == "metrics" and fields == MetricsState._fields:
            ((label, kept),) = child.items()
            own |= {(key, name): x for name, x in _scalars_in(kept).items()}
        else:
            own |= {
                (key, *names_of(below)): x for below, x in tree_leaves_with_path(child)
            }
    if fields:
        yield FoundState(now, kind, fields, label, at.parts, at.path, own)
    # Of several states in a state, fields tell which is which; Optax's wrappers have
    # one that they wrap.
    is_wrapper = fields in OPTAX and any("inner" in key for key in inner)
    several = len(inner) > 1 and not is_wrapper
    is_box = [*children] == ["value"] and _is_leaf(children["value"])
    is_name = (at.labeled_by,) == NamedState._fields
    has_keys = is_mapping and (keyed is None or at.path in keyed)
    for key, child in inside.items():
        below = at._replace(path=(*at.path, key), label="", labeled_by="")
        if fields:
            below = below._replace(
                names=(),
                owner=kind if _is_leaf(child) else None,
                labeled_by=key if key in _LABELED else "",
            )
            if key == "memory":
                below = below._replace(label=label)
            elif several:
                below = below._replace(parts=(*at.parts, f"{key}/"))
        elif has_labels or (not is_box and (has_keys or not _is_number(key))):
            below = below._replace(
                names=at.names if has_labels else (*at.names, key),
                parts=(*at.parts, key if is_name else f"{key}/"),
                owner=at.owner if is_mapping else type(now),
            )
        yield from found_states(child, kinds, keyed, below)


def keyed_in(tree: Any) -> set[Words]:
    """Return the paths of the mappings in a live tree that have digits as keys."""
    paths = [path for path, _ in tree_leaves_with_path(tree)]
    return {
        names_of(path[:i])
        for path in paths
        for i, key in enumerate(path)
        if isinstance(key, DictKey) and _is_number(str(key.key))
    }


def _is_leaf(node: Any) -> bool:
    return bool(jax.tree_util.all_leaves([node]))


def _is_number(key: str) -> bool:
    """Return whether a key may be the place in a chain."""
    return key.isascii() and key.isdecimal()


def _without_places(path: Words) -> Words:
    """Return a path without the places in chains."""
    return tuple(key for key in path if not _is_number(key))


def _common_end(one: Words, other: Words) -> int:
    """Return how many components at the ends of two paths are the same."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])


def _place_of(key: str) -> tuple[int, str]:
    return (int(key) if _is_number(key) else -1), key


def _fields_of(node: Any, kinds: Kinds, path: Words) -> Words:
    """Return the fields of a state, or of a mapping that stands for one.

    Of several kinds that have these keys, it is the one that `new` has at this place of
    this chain, else elsewhere in this chain, else anywhere, else the one with the
    fewest fields.
    """
    if is_state(node):
        return node._fields
    if not isinstance(node, Mapping) or not node:
        return ()
    keys = set(map(str, node))
    fitting = [
        x
        for x, kind in kinds.items()
        if keys in kind.in_new.values() or kind.needed <= keys <= {*x}
    ]
    chain = _without_places(path)

    def order(fields: Words) -> tuple[int, bool, int]:
        in_new = kinds[fields].in_new
        in_chain = [other for other in in_new if _without_places(other) == chain]
        alike = max((_common_end(path, other) for other in in_chain), default=-1)
        return -alike, not in_new, len(fields)

    return min(fitting, key=order, default=())


def _scalars_in(kept: Any) -> dict[str, Any]:
    """Return metrics by their names."""
    return {key: as_array(x) for key, x in kept.items()}
