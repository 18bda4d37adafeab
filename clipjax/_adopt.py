"""An optimizer state, brought into another chain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey, keystr, tree_leaves_with_path

from clipjax._core.aliases import State, Tree
from clipjax._core.leaves import a_few, nodes_where, short_repr, unboxed
from clipjax._core.states import MetricsState, NamedState, SkipMemory, name_of

Words: TypeAlias = tuple[str, ...]  # a path as text
# What is around a state: the names of `named`, and JAX's keys for other labels.
Names: TypeAlias = tuple[Any, ...]


def adopt(
    old: State,
    *,
    into: State,
    like: State = None,
    drop: Collection[str] | Literal[True] = (),
) -> Any:
    """Bring an optimizer state into another chain, so that a run goes on in it.

    Use it when a transformation joins or leaves a run, or when one of clipjax replaces
    a clip of Optax. Moments and counters go on, and so do the hyperparameters that
    `optax.inject_hyperparams` keeps in the state: set them anew if the new chain has
    others. What only the new chain has starts as its `init` made it.

    A state of `old` takes the place of the state in `into` that has the same type (or,
    if it has metrics, is of the same transformation) and the same names around it:
    those of :func:`named`, the labels of `optax.partition`, the keys of dicts. Where
    there are several such states, the paths and shapes of their arrays decide, and then
    their order. A name may join or leave, but only for all states of a type at once.
    Wrappers do not matter, so Adam may move into a skip, or out of `optax.MultiSteps`;
    the state of a wrapper that leaves is named in `drop`.

    Args:
      old: the optimizer state so far.
      into: what `init` of the new chain returns.
      like: what `init` of the *old* chain returns, or its `jax.eval_shape`; needed if a
        checkpoint restored `old` as dicts and lists, which do not have the types of
        states. None by default.
      drop: what may be left out if `into` has no place for it: names of transformations
        and of types, as in `("skip_spikes", "ScaleByAdamState")`. A wrapper's name
        never drops what it wraps. `()`, the default, drops nothing; True drops all of
        it, moments included.

    Returns:
      A state like `into`, with the same dtypes and on the same devices. It may share
      arrays with `old` and `into`.

    Raises:
      TypeError: `old`, `into` or `like` is not a state of arrays; `old` has dicts and
        lists in place of states, and there is no `like`; `drop` is a single string.
      ValueError: `into` has no place for something that `drop` does not name; a name in
        `drop` drops nothing; it is ambiguous which state becomes which (the message
        says how many there are); two arrays differ in shape, or a layer has another
        name; a counter in `into` says that it has already been updated, as if the two
        were swapped; the paths of `like` are not those of `old`.

    See Also:
      :func:`named`, for two transformations of one kind.

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
      >>> state = clipjax.adopt(old, into=tx.init(params))
      >>> print(optax.tree.get(state, "count"), optax.tree.get(state, "mu").round(2))
      1 [0.07 0.07]
    """
    _check_drop(drop)
    _check_arrays("old", old)
    _check_arrays("into", into)
    before, fresh = unboxed(old), unboxed(into)
    if like is not None:
        before = _with_types_of(unboxed(like), before)
    elif jax.tree.leaves(before) and not _contains_states(before):
        raise TypeError(
            "old has dicts, lists or arrays in place of states, as a checkpoint "
            "without types restores them: pass like=, what init of the old chain "
            f"returns; got {short_repr(old)}"
        )
    given, wanted = (
        [each for each in _states(tree) if each.leaves] for tree in (before, fresh)
    )
    _check_is_fresh(wanted)
    news = _grouped(wanted, lambda state: state.kind)
    moved: dict[Words, Any] = {}
    lost: list[tuple[str, str]] = []  # what `drop` has to name, and its description
    for kind, olds in _grouped(given, lambda state: state.kind).items():
        pairs, left = _matched(olds, news.get(kind, []))
        lost += [(each.name, str(each)) for each in left]
        for was, now in pairs:
            if gone := _without_a_place(was, now):
                lost.append((was.name, f"{_listed(gone)} of {was}"))
            for key in [key for key in now.leaves if key in was.leaves]:
                moved[*now.path, *key] = _moved(was, now, key)
    _check_lost(lost, drop)
    leaves = [moved.get(path, x) for path, x in _leaves(fresh).items()]
    return jax.tree.unflatten(jax.tree.structure(into), leaves)


def _check_drop(drop: Any) -> None:
    is_names = isinstance(drop, Collection) and not isinstance(drop, str)
    if drop is not True and not (is_names and all(isinstance(x, str) for x in drop)):
        raise TypeError(
            "drop must be True or a tuple of names, such as ('skip_spikes',), got "
            f"{short_repr(drop)}"
        )


def _check_arrays(argument: str, tree: Tree) -> None:
    leaves = [tree] if tree is None else jax.tree.leaves(tree)
    numbers = jax.Array | np.ndarray | np.generic | bool | int | float | complex
    wrong = [x for x in leaves if not isinstance(x, numbers)]
    if wrong:
        raise TypeError(
            f"{argument} must be an optimizer state, as tx.init and tx.update return "
            f"it, but contains {short_repr(wrong[0])}"
        )


def _with_types_of(like: Tree, restored: Tree) -> Tree:
    """Return what a checkpoint restored as dicts and lists, as states."""
    wanted, found = _leaves(like), _leaves(restored)
    # Where there was a box of Flax NNX, a checkpoint has a dict with its `value`.
    places = [path if path in found else (*path, "value") for path in wanted]
    missing = [path for path, at in zip(wanted, places, strict=True) if at not in found]
    more = found.keys() - {*places}
    if missing or more:
        raise ValueError(
            "like must be what init of the old chain returns, with the paths of old: "
            f"only like has [{_listed(missing)}], only old has [{_listed(more)}]"
        )
    return jax.tree.unflatten(jax.tree.structure(like), [found[at] for at in places])


# Which states there are.


class _State(NamedTuple):
    """The arrays of a state, without those of what it wraps."""

    kind: tuple[Any, str]  # its type, and its name or that of its transformation
    names: Names
    path: Words
    leaves: dict[Words, Any]

    @property
    def name(self) -> str:
        """What errors and `drop` call it."""
        return self.kind[1]

    def __str__(self) -> str:
        where = f"at {'/'.join(self.path)!r}" if self.path else "at the top"
        return f"{self.name} {where}"


def _states(node: Tree, names: Names = (), path: Words = ()) -> Iterator[_State]:
    """Yield the states in a tree, the outer ones first.

    What is no NamedTuple contains states, as a chain or a dict of optimizers does, or
    it is the state of an optimizer that keeps its moments in a dict or an array.
    """
    if _is_named_tuple(node):
        inside = _wrapped_by(node)
        own = {
            key: x
            for key, x in _leaves(node).items()
            if not any(key[: len(start)] == start for start in inside)
        }
        yield _State(_kind_of(node), names, path, own)
        for key, (label, child) in inside.items():
            yield from _states(child, names + label, path + key)
        return
    level = tree_leaves_with_path(node, is_leaf=lambda x: x is not node)
    if type(node) is tuple or any(_contains_states(child) for _, child in level):
        for (key,), child in level:
            label = () if isinstance(node, list | tuple) else (key,)
            yield from _states(child, names + label, path + _words((key,)))
    else:
        yield _State(_kind_of(node), names, path, _leaves(node))


def _wrapped_by(state: Any) -> dict[Words, tuple[Names, Tree]]:
    """Return what a state wraps, by its path, each with the label that tells it apart.

    Only Optax's own fields are known by their names. In the states of others, a field
    wraps what is called a state.
    """
    if isinstance(state, NamedState):
        ((name, inner),) = state.named.items()
        return {("named", name): ((name,), inner)}
    if isinstance(state, MetricsState):
        memory = state.memory
        is_skip = isinstance(memory, SkipMemory)
        return {("memory", "inner"): ((), memory.inner)} if is_skip else {}
    values = state._asdict()
    if type(state).__module__.startswith("optax."):
        fields = [x for x in values if "inner" in x]
        fields = fields or [x for x in values if "state" in x]
    else:
        fields = [x for x in values if nodes_where(_is_called_state, values[x])]
    has_one = len(fields) == 1
    return {
        (field,): (() if has_one else (GetAttrKey(field),), values[field])
        for field in fields
    }


def _is_named_tuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _is_called_state(node: Any) -> bool:
    return _is_named_tuple(node) and type(node).__name__.endswith("State")


def _contains_states(tree: Tree) -> bool:
    """Return whether there are types in a tree, and not only containers of Python."""

    def is_typed(node: Any) -> bool:
        is_plain = isinstance(node, Mapping) or type(node) in (list, tuple)
        is_leaf = is_plain or jax.tree_util.all_leaves([node])
        return not is_leaf and bool(jax.tree.leaves(node))

    return bool(nodes_where(is_typed, tree))


def _kind_of(node: Any) -> tuple[Any, str]:
    if isinstance(node, MetricsState):
        return MetricsState, name_of(node)
    if jax.tree_util.all_leaves([node]):
        return jax.Array, "array"
    kind = dict if isinstance(node, Mapping) else type(node)
    return kind, kind.__name__


def _leaves(tree: Tree) -> dict[Words, Any]:
    return {_words(path): x for path, x in tree_leaves_with_path(tree)}


def _words(path: Any) -> Words:
    return tuple(keystr((key,), simple=True) for key in path)


# Which state becomes which.


def _matched(
    olds: list[_State], news: list[_State]
) -> tuple[list[tuple[_State, _State]], list[_State]]:
    """Match states of one kind by the names around them.

    Returns:
      The pairs, and the old states that become none of the new ones.
    """
    left, joined = _names_of_all(olds, news), _names_of_all(news, olds)
    # A name in place of another one stands for another part.
    ignored = set() if left and joined else left | joined

    def part(state: _State) -> Names:
        return tuple(name for name in state.names if name not in ignored)

    after = _grouped(news, part)
    pairs: list[tuple[_State, _State]] = []
    lost: list[_State] = []
    for names, was in _grouped(olds, part).items():
        found, rest = _in_order(was, after.get(names, []))
        pairs += found
        lost += rest
    return pairs, lost


def _names_of_all(states: list[_State], others: list[_State]) -> set[Any]:
    """Return names that the others lack, if each of the states has such a name."""
    known = {name for each in others for name in each.names}
    extra = [{*each.names} - known for each in states]
    return set().union(*extra) if all(extra) else set()


def _grouped(
    states: list[_State], key_of: Callable[[_State], Any]
) -> dict[Any, list[_State]]:
    groups: dict[Any, list[_State]] = {}
    for each in states:
        groups.setdefault(key_of(each), []).append(each)
    return groups


def _in_order(
    olds: list[_State], news: list[_State]
) -> tuple[list[tuple[_State, _State]], list[_State]]:
    """Match states of one kind and one part: first those with equal arrays.

    The rest is matched if there are equally many, as when a layer joins them all.

    Returns:
      The pairs, and the old states that become none of the new ones.
    """
    before, after = _grouped(olds, _shapes), _grouped(news, _shapes)
    alike = [(before.pop(x), after.pop(x)) for x in [*before] if x in after]
    rest = [[x for group in each.values() for x in group] for each in (before, after)]
    groups = [*alike, (rest[0], rest[1])] if all(rest) else alike
    for was, now in groups:
        has_order = _have_order(was) and _have_order(now)
        if len(was) != len(now) or not (has_order or len(was) == 1):
            raise _unclear(olds, news)
    pairs = [pair for was, now in groups for pair in zip(was, now, strict=True)]
    return pairs, [] if all(rest) else rest[0]


def _shapes(state: _State) -> Any:
    """Return what tells states apart; a single array has no path to tell it by."""
    return frozenset((key, np.shape(x)) for key, x in state.leaves.items() if key)


def _have_order(states: list[_State]) -> bool:
    """Return whether states follow each other in a chain.

    Labels and keys of dicts have only the order of the alphabet.
    """
    return len({tuple(x for x in y.names if type(x) is not str) for y in states}) == 1


def _unclear(olds: list[_State], news: list[_State]) -> ValueError:
    return ValueError(
        f"old has {len(olds)} of a kind ({a_few(olds)}), into has {len(news)} "
        f"({a_few(news)}), and nothing tells which becomes which. If one joins, give "
        "it a name by clipjax.named. If one leaves, adopt twice: first into a chain "
        "that has as many, each with a name, and from there into one with fewer names"
    )


# What becomes of their arrays.


def _without_a_place(was: _State, now: _State) -> list[Words]:
    """Return the paths in a state that its counterpart lacks.

    If each has paths that the other one lacks, a layer may have another name.
    """
    gone = [key for key in was.leaves if key not in now.leaves]
    fresh = [key for key in now.leaves if key not in was.leaves]
    if gone and fresh:
        raise ValueError(
            f"old: {was} has {_listed(gone)}, but {now} of into has {_listed(fresh)}. "
            "If a layer has another name, give it this name in old, too; "
            f"{_afresh(was)}"
        )
    return gone


def _afresh(state: _State) -> str:
    return (
        "to start the whole state afresh, adopt twice: first into a chain without it, "
        f"with drop=({state.name!r},), and from there into this one"
    )


def _moved(was: _State, now: _State, key: Words) -> Any:
    """Return an array of an old state in the dtype and on the devices of a new one."""
    x, like = was.leaves[key], now.leaves[key]
    here, there = (getattr(y, "dtype", None) or jnp.result_type(y) for y in (x, like))
    can_cast = here == there or any(
        jnp.issubdtype(here, kind) and jnp.issubdtype(there, kind)
        for kind in (jnp.floating, jnp.complexfloating)
    )
    if np.shape(x) != np.shape(like) or not can_cast:
        raise ValueError(
            f"old: {'/'.join(key)!r} of {was} is {here}{list(np.shape(x))}, but of "
            f"{now} in into it is {there}{list(np.shape(like))}; {_afresh(was)}"
        )
    if any(isinstance(y, jax.core.Tracer) for y in (x, like)):
        return jnp.asarray(x, there)
    if getattr(like, "committed", False):
        x = jax.device_put(x, like.sharding)
    elif getattr(x, "committed", True):
        x = _on_no_device(x)
    return x if x.dtype == there else x.astype(there)


def _on_no_device(x: Any) -> jax.Array:
    """Return an array that is tied to no device, as `init` makes counters and keys."""
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        data = jax.device_put(jax.device_get(jax.random.key_data(x)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.device_put(jax.device_get(x))


def _check_is_fresh(states: list[_State]) -> None:
    """Raise if a state has counted updates."""
    counts = {
        (*each.path, *key): x
        for each in states
        for key, x in each.leaves.items()
        if key in (("count",), ("step",))
        and jnp.issubdtype(jnp.result_type(x), jnp.integer)
        and not isinstance(x, jax.core.Tracer)
    }
    for path, count in jax.device_get(counts).items():
        if np.any(count):
            raise ValueError(
                f"into must be what init returns, but {'/'.join(path)!r} is {count}, "
                "as after updates; if the two were swapped, write adopt(old, into=new)"
            )


def _check_lost(
    lost: list[tuple[str, str]], drop: Collection[str] | Literal[True]
) -> None:
    """Raise unless `drop` names what is lost, and nothing else."""
    if drop is True:
        return
    kept = [(name, text) for name, text in lost if name not in drop]
    if kept:
        raise ValueError(
            f"old: into has no place for {a_few([text for _, text in kept])}. What may "
            f"be left out is named in drop, as in drop=({kept[0][0]!r},); if the two "
            "were swapped, write adopt(old, into=new)"
        )
    unused = sorted({*drop} - {name for name, _ in lost})
    if unused:
        raise ValueError(
            f"drop: {a_few(unused)} names nothing that only old has, which is "
            f"{a_few([text for _, text in lost]) or 'nothing at all'}"
        )


def _listed(paths: Collection[Words]) -> str:
    return a_few(["/".join(path) or "an array" for path in sorted(paths)], 5)
