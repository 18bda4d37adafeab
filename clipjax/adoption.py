"""An old optimizer state, brought into a new chain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from clipjax._core.aliases import Tree
from clipjax._core.leaves import as_array, unboxed, without_boxes
from clipjax._core.messages import a_few, short_repr
from clipjax._core.states import UNKNOWN, MetricsState, NamedState, Table
from clipjax._earlier import of_today
from clipjax.gradients.skipping import SkipMemory
from clipjax.monitoring.metrics import restored_table

_Names: TypeAlias = tuple[str, ...]  # a path, or the fields of a state
# The fields of each kind of state, and those of them that contain arrays.
_Kinds: TypeAlias = Mapping[_Names, set[str]]

_OURS: _Kinds = {
    MetricsState._fields: {"step", "metrics"},
    SkipMemory._fields: {"in_a_row"},
}

# Metrics that `clipjax.metrics` derives, and that 0.4.0 stored.
_DERIVED = ("norm_after", "skipped_last", "skipped_in_a_row")


class _State(NamedTuple):
    """A state that was found in a tree, or a single leaf that belongs to no state."""

    node: Any
    kind: str  # the name of its type; "" for a mapping and for a leaf
    fields: _Names  # for a leaf, the names on the way to it
    label: str  # the transformation, for a state with metrics
    path: _Names
    leaves: dict[_Names, Any]  # without the leaves of states in it

    def __str__(self) -> str:
        what = self.label or self.kind or "/".join(self.fields)
        return f"{what} at {'/'.join(self.path)!r}"


def adopt(old: Tree, new: Tree, *, drop: bool = False) -> Tree:
    """Bring an old optimizer state into a new chain, so that a run continues in it.

    Use it when a transformation joins or leaves a run, when a clip of Optax is replaced
    by one of clipjax, and to read a checkpoint of an earlier version of clipjax. The
    states of both chains are matched by these rules:

    1. A state is matched with a state of the same type, or of the same fields if `old`
       has mappings in place of states. A state with metrics is matched with a state of
       the same transformation. Several states of one kind are matched in the order of
       the chain, or by their paths and shapes if the two chains do not have equally
       many of them.
    2. Wrappers are looked through: the state of Adam is the same within a skip,
       `optax.MultiSteps`, `inject_hyperparams`, `named` or a chain, and outside of it.
    3. Arrays of matched states have equal paths and shapes. Only floats change their
       dtype, to the dtype in `new`. Counters, such as the steps and Adam's `count`,
       continue.
    4. Anything that only `new` has stays as `init` made it. A metric that is new begins
       at 0.
    5. Anything that only `old` has raises an error that lists it, unless `drop` is
       True.

    Args:
      old: the optimizer state of another chain; or the content of a checkpoint that is
        restored without a template, as mappings and lists, by pickle, msgpack or Orbax.
        The checkpoint may be one of clipjax 0.4.0.
      new: the state that `init` of today's transformation returns.
      drop: whether states, metrics and arrays that only `old` has are left out; False
        by default.

    Returns:
      A state with the structure, the shapes and the dtypes of `new`. If `new` is on
      several devices, the state is moved to these devices. The state and `old` may
      share arrays.

    Raises:
      TypeError: `old` or `new` is not an optimizer state of arrays, or `drop` is not a
        bool.
      ValueError: with `drop=False`, `old` has something that `new` has not. With any
        `drop`: both have states of one kind and shape, but not equally many of them, so
        that their order does not tell which is which; the shapes or the kinds of
        numbers of two arrays differ; or two matched states both have arrays that the
        other one lacks, as happens if a layer has another name.

    Call it without `drop` first, and read what the error lists: `drop=True` also leaves
    out the moments of an optimizer that `new` does not have. To start a transformation
    afresh, adopt twice: with `drop=True` into a chain without it, and from there into
    one that has it.

    See Also:
      :func:`metrics` reads the states of both chains.

    Example:
      >>> import clipjax, jax.numpy as jnp, optax
      >>> params = jnp.ones(2)
      >>> before = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
      >>> _, old = before.update(params, before.init(params))
      >>> tx = clipjax.bounded(
      ...     optax.adam(1e-3),
      ...     clip=clipjax.clip_by_global_norm(1.0),
      ...     nonfinite="skip",
      ... )
      >>> state = clipjax.adopt(old, tx.init(params))
      >>> print(optax.tree.get(state, "count"), optax.tree.get(state, "mu").round(2))
      1 [0.07 0.07]
    """
    if not isinstance(drop, bool):
        raise TypeError(f"drop must be a bool, got {short_repr(drop)}")
    _check_state("old", old)
    _check_state("new", new)
    found = list(_states_in(unboxed(new), {}))
    kinds = dict(_OURS)
    for each in found:
        if each.kind:
            full = {key for key, x in each.node._asdict().items() if jax.tree.leaves(x)}
            kinds[each.fields] = kinds.get(each.fields, full) & full
    given = [each for each in _states_in(unboxed(old), kinds) if each.leaves]
    wanted = [each for each in found if each.leaves]
    has_types = all(each.kind or () in each.leaves for each in given)
    olds, news = (_by_kind(states, has_types) for states in (given, wanted))
    values: dict[_Names, Any] = {}
    lost: list[Any] = []
    for kind, was in olds.items():
        now = news.get(kind, [])
        for pair in _pairs(was, now):
            lost += _follow(*pair, values)
        lost += [] if now else was
    if lost and not drop:
        raise ValueError(
            f"old: new has no place for {a_few(lost)}; drop=True leaves them out"
        )
    leaves = jax.tree.leaves(new)
    treedef: Any = jax.tree.structure(new)
    paths = without_boxes([path for path, _ in tree_leaves_with_path(new)])
    pairs = zip(paths, leaves, strict=True)
    return treedef.unflatten([values.get(_named(path), x) for path, x in pairs])


def _check_state(argument: str, tree: Tree) -> None:
    """Raise unless all leaves are arrays or numbers."""
    numbers = bool | int | float | complex
    leaves = [tree] if tree is None else jax.tree.leaves(tree)
    wrong = [
        x
        for x in leaves
        if isinstance(x, jax.ShapeDtypeStruct)
        or not (hasattr(x, "dtype") or isinstance(x, numbers))
    ]
    if wrong:
        raise TypeError(
            f"{argument} must be an optimizer state, as tx.init and tx.update return "
            f"it, but contains {short_repr(wrong[0])}"
        )


def _by_kind(
    states: Sequence[_State], has_types: bool
) -> dict[tuple[Any, ...], list[_State]]:
    """Return the states of each kind, in the order of the chain."""
    groups: dict[tuple[Any, ...], list[_State]] = {}
    for each in states:
        is_leaf, kind = () in each.leaves, each.kind if has_types else ""
        groups.setdefault((each.label, kind, each.fields, is_leaf), []).append(each)
    return groups


def _pairs(
    olds: Sequence[_State], news: Sequence[_State]
) -> list[tuple[_State, _State]]:
    """Match states of one kind, in the order of the chain.

    If there are not equally many, match states with the same paths and shapes.
    """
    if not news or len(olds) == len(news):
        return list(zip(olds, news, strict=False))
    pairs = []
    for was in olds:
        same, like = (
            [each for each in states if _shapes(each) == _shapes(was)]
            for states in (olds, news)
        )
        if len(same) != len(like):
            raise ValueError(
                "old: it is not known which of the old states become which of the new "
                f"ones: old has {a_few(olds)}, new has {a_few(news)}. There must be "
                "equally many of one kind and one shape"
            )
        pairs.append((was, like[[x is was for x in same].index(True)]))
    return pairs


def _shapes(state: _State) -> dict[_Names, tuple[int, ...]]:
    return {key: np.shape(x) for key, x in state.leaves.items()}


def _named(path: Any) -> _Names:
    return tuple(keystr((key,), simple=True) for key in path)


def _contains_states(field: str) -> bool:
    """Return whether a field of a wrapper's state contains other states."""
    return "inner" in field or "state" in field or field in NamedState._fields


def _states_in(
    node: Any, kinds: _Kinds, path: _Names = (), names: _Names = (), label: str = ""
) -> Iterator[_State]:
    """Yield the states in a tree in the order of the chain, the outer ones first.

    Args:
      node: a state, or a node that contains states: a chain, or the labels of a
        partition.
      kinds: the states that mappings may stand for.
      path: the path of the node.
      names: the last part of the path, without the places in chains.
      label: the transformation whose memory the node is.

    Yields:
      The states.
    """
    now = of_today(node)
    # In JAX 0.10, `flatten_one_level_with_keys` gives all children of a NamedTuple the
    # name of its first field.
    level = tree_leaves_with_path(now, is_leaf=lambda x: x is not now)
    if [path for path, _ in level] == [()]:
        yield _State(now, "", names, "", path, {(): now})
        return
    kind, fields = _kind_of(now, kinds)
    children = {keystr(key, simple=True): child for key, child in level}
    if isinstance(now, Mapping):
        place = {key: int(key) if key.isdigit() else -1 for key in children}
        order = fields or sorted(children, key=lambda key: (place[key], key))
        children = {key: children[key] for key in order if key in children}
    own: dict[_Names, Any] = {}
    inside = {}
    for key, child in children.items():
        is_memory = key == "memory" and fields == MetricsState._fields
        is_skip = is_memory and _kind_of(child, _OURS)[1] == SkipMemory._fields
        if not fields or _contains_states(key) or is_skip:
            inside[key] = child
        elif key == "metrics" and fields == MetricsState._fields:
            ((label, kept),) = child.items()
            own |= {(key, name): x for name, x in _scalars_in(kept).items()}
        else:
            found = tree_leaves_with_path(child)
            own |= {(key, *_named(below)): x for below, x in found}
    if fields:
        yield _State(now, kind, fields, label, path, own)
    for key, child in inside.items():
        after = () if fields or _contains_states(key) else names
        after = after if fields or key.isdigit() else (*after, key)
        of = label if key == "memory" else ""
        yield from _states_in(child, kinds, (*path, key), after, of)


def _kind_of(node: Any, kinds: _Kinds) -> tuple[str, _Names]:
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
    row = jnp.asarray(as_array(kept.floats))
    scalars = {name: row[..., i] for i, name in enumerate(floats)}
    if ints or bools:
        row = jnp.asarray(as_array(kept.counts))
        counts = {name: row[..., i] for i, name in enumerate((*ints, *bools))}
        scalars |= counts | {name: counts[name].astype(np.uint32) for name in bools}
    return scalars


def _follow(was: _State, now: _State, values: dict[_Names, Any]) -> list[str]:
    """Add the values of the leaves of `now`; return what has no place in it."""
    # Restored without a template, a checkpoint of Flax NNX has boxes around arrays.
    boxed = {key for key in was.leaves if len(key) > 1 and key[-1] == "value"}
    boxed -= {key for key in boxed if key in now.leaves or key[0] == "metrics"}
    theirs = {key[:-1] if key in boxed else key: x for key, x in was.leaves.items()}
    if now.label == "record_norms":
        theirs = _with_columns(theirs, now.leaves)
    derived = {("metrics", name) for name in _DERIVED}
    lost = [key for key in theirs if key not in now.leaves and key not in derived]
    fresh = [key for key in now.leaves if key not in theirs]
    if lost and fresh and not now.label:
        raise ValueError(
            f"old: {was} has {_listed(was.path, lost, theirs)}, but {now} in new has "
            f"{_listed(now.path, fresh, now.leaves)}"
        )
    after = dict(now.leaves)
    for key in filter(theirs.__contains__, now.leaves):
        both = (*was.path, *key), (*now.path, *key)
        after[key] = _moved(theirs[key], now.leaves[key], *both)
    values |= {(*now.path, *key): x for key, x in after.items()}
    if now.fields == MetricsState._fields:
        kept = now.node.metrics[now.label]
        metrics = {key[1]: x for key, x in after.items() if key[0] == "metrics"}
        arrays = _in_arrays(kept, metrics) if isinstance(kept, Table) else metrics
        path = (*now.path, "metrics", now.label)
        values |= {(*path, name): x for name, x in arrays.items()}
    return [_listed(was.path, lost, theirs)] if lost else []


def _in_arrays(kept: Table, metrics: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Return the arrays of a table, joined from single metrics."""
    floats, *counted = kept.known_names
    names = {
        "floats": floats,
        "counts": tuple(name for each in counted for name in each),
    }
    return {
        field: jnp.stack(
            [metrics[name].astype(getattr(kept, field).dtype) for name in of_field], -1
        )
        for field, of_field in names.items()
        if of_field
    }


def _listed(path: _Names, keys: Sequence[_Names], leaves: Mapping[_Names, Any]) -> str:
    """List leaves, as errors describe them."""
    texts = [f"{'/'.join((*path, *key))!r} {np.shape(leaves[key])}" for key in keys]
    return a_few(texts, 5)


def _moved(x: Any, like: Any, was: _Names, now: _Names) -> Any:
    """Return an array of `old` in the dtype and on the devices of one of `new`."""
    here, there = (getattr(y, "dtype", None) or jnp.result_type(y) for y in (x, like))
    can_cast = here == there or any(
        jnp.issubdtype(here, kind) and jnp.issubdtype(there, kind)
        for kind in (jnp.floating, jnp.complexfloating)
    )
    if np.shape(x) != np.shape(like) or not can_cast:
        raise ValueError(
            f"old: {'/'.join(was)!r} is {here}{list(np.shape(x))}, and in new "
            f"{'/'.join(now)!r} is {there}{list(np.shape(like))}; to start it afresh, "
            "adopt twice, first into a chain without it, with drop=True"
        )
    is_known = isinstance(like, jax.Array) and not isinstance(like, jax.core.Tracer)
    if not (is_known and len(like.sharding.device_set) > 1):
        return jnp.asarray(x, there)
    # An array that a checkpoint restores to the host may be too large for one device.
    array = jnp.asarray(x, there) if isinstance(x, jax.Array) else np.asarray(x, there)
    return jax.device_put(array, like.sharding)


def _with_columns(
    theirs: Mapping[_Names, Any], ours: Mapping[_Names, Any]
) -> dict[_Names, Any]:
    """Return the leaves of `record_norms` with the columns of bad steps in a new order.

    At old steps, the norms with new names are not known.
    """
    was, now = (
        [key[1] for key in leaves if key[0] == "metrics"] for leaves in (theirs, ours)
    )
    place = {name: 3 + i for i, name in enumerate(was)}
    columns = [0, 1, 2, *(place.get(name, -1) for name in now)]

    def ordered(rows: Any) -> jax.Array:
        unknown = jnp.full_like(rows[..., :1], UNKNOWN)
        padded = jnp.concatenate([rows, unknown], axis=-1)
        return padded[..., np.array(columns)]

    return {
        key: ordered(jnp.asarray(x)) if key[-1] == "rows" and was != now else x
        for key, x in theirs.items()
    }
