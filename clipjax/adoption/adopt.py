"""An old optimizer state, brought into a new chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves_with_path

from clipjax._core.aliases import Tree
from clipjax._core.leaves import on_host, unboxed, without_boxes
from clipjax._core.messages import a_few, short_repr
from clipjax._core.states import MetricsState
from clipjax.adoption.pairs import grouped, pairs_of
from clipjax.adoption.states import (
    OURS,
    FoundState,
    Words,
    found_states,
    is_live,
    is_state,
    keyed_in,
    kinds_in,
    names_of,
)

# Metrics that `clipjax.metrics` derives, and that 0.4.0 stored.
_DERIVED = ("norm_after", "skipped_last", "skipped_in_a_row")


def adopt(old: Tree, new: Tree, *, drop: bool = False) -> Tree:
    """Bring an old optimizer state into a new chain, so that a run continues in it.

    Use it when a transformation joins or leaves a run, when a clip of Optax is replaced
    by one of clipjax, and to read a checkpoint of an earlier version of clipjax. The
    states of both chains are matched by these rules:

    1. A state is matched with a state of the same type. If `old` has mappings in place
       of states, as a restored checkpoint does, a mapping is matched with a state whose
       fields have the names of its keys. A state with metrics is matched with a state
       of the same transformation.
    2. A state belongs to a part of the optimizer. The labels of `optax.partition`, the
       names of `named`, the keys of dicts and the attributes of objects around the
       state name this part. A state is matched only with a state of the same part. If a
       part has several states of one type, their paths and shapes tell which states
       belong together. If the paths and shapes are the same, the order of the chain
       decides. A name that only one of the two chains has is ignored, as when a chain
       gets a name, or joins a partition, unless one chain has such states both within
       names and outside of them. Two different names stand for two parts.
    3. Wrappers are ignored: the state of Adam is the same within a skip,
       `optax.MultiSteps`, `inject_hyperparams` or a chain, and outside of it.
    4. Arrays of matched states have equal paths and shapes. Floats and complex numbers
       take the dtype in `new`. Counters, such as the steps and Adam's `count`,
       continue.
    5. Anything that only `new` has stays as `init` made it. A metric that is new begins
       at 0.
    6. Anything that only `old` has raises an error that lists it, unless `drop` is
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
      ValueError: with `drop=False`, `old` has something that `new` lacks. With any
        `drop`: one of them has several states of one kind and shape, the other one has
        at least one, and neither the names of parts nor the order of the chain tell
        which is which, as if a second clip of one kind joins without :func:`named`; the
        shapes or the kinds of numbers of two arrays differ; or two matched states both
        have arrays that the other one lacks, as happens if a layer has another name.

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
    before, fresh = unboxed(old), unboxed(new)
    kinds = kinds_in(fresh)
    has_types = is_live(before)
    given, wanted = (
        [each for each in found_states(tree, kinds, keyed) if each.leaves]
        for tree, keyed in (
            (before, None if has_types else keyed_in(fresh)),
            (fresh, None),
        )
    )
    of_old, of_new = ({is_state(x.node) for x in each} for each in (given, wanted))
    lacks_states = True in of_old and of_new == {False}
    if lacks_states or any(each.fields in OURS and not each.kind for each in wanted):
        raise TypeError(
            "new must be the state that init returns, got mappings in place of states, "
            f"as nnx.state has them: {short_repr(new)}"
        )

    def kind_of(state: FoundState) -> tuple[Any, ...]:
        kind = state.kind if has_types else None
        return state.label, kind, state.fields, () in state.leaves

    olds, news = (grouped(states, kind_of) for states in (given, wanted))
    values: dict[Words, Any] = {}
    lost: list[Any] = []
    for kind, was in olds.items():
        pairs, left = pairs_of(was, news.get(kind, []))
        lost += left
        for pair in pairs:
            lost += _follow(*pair, values)
    if lost and not drop:
        raise ValueError(
            f"old: new has no place for {a_few(lost)}; drop=True leaves them out"
        )
    leaves = jax.tree.leaves(new)
    treedef: Any = jax.tree.structure(new)
    paths = without_boxes([path for path, _ in tree_leaves_with_path(new)])
    rows = zip(paths, leaves, strict=True)
    return treedef.unflatten([values.get(names_of(path), x) for path, x in rows])


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


def _follow(was: FoundState, now: FoundState, values: dict[Words, Any]) -> list[str]:
    """Add the values of the leaves of `now`; return what has no place in it."""
    is_ours = now.fields == MetricsState._fields
    # Restored without a template, a checkpoint of Flax NNX has boxes around arrays.
    boxed = {key for key in was.leaves if len(key) > 1 and key[-1] == "value"}
    boxed -= {key for key in boxed if key in now.leaves or key[0] == "metrics"}
    theirs = {key[:-1] if key in boxed else key: x for key, x in was.leaves.items()}
    derived = {("metrics", name) for name in _DERIVED}
    lost = [key for key in theirs if key not in now.leaves and key not in derived]
    fresh = [key for key in now.leaves if key not in theirs]
    if lost and fresh and not now.label:
        raise ValueError(
            f"old: {was} has {_listed(was.path, lost, theirs)}, but {now} in new has "
            f"{_listed(now.path, fresh, now.leaves)}"
        )
    after = dict(now.leaves)
    for key, like in now.leaves.items():
        if key in theirs:
            both = (*was.path, *key), (*now.path, *key)
            after[key] = _moved(theirs[key], like, *both)
    values |= {(*now.path, *key): x for key, x in after.items()}
    if is_ours:
        metrics = {key[1]: x for key, x in after.items() if key[0] == "metrics"}
        path = (*now.path, "metrics", now.label)
        values |= {(*path, name): x for name, x in metrics.items()}
    return [_listed(was.path, lost, theirs)] if lost else []


def _listed(path: Words, keys: Sequence[Words], leaves: Mapping[Words, Any]) -> str:
    """List leaves, as errors describe them."""
    texts = [f"{'/'.join((*path, *key))!r} {np.shape(leaves[key])}" for key in keys]
    return a_few(texts, 5)


def _moved(x: Any, like: Any, was: Words, now: Words) -> Any:
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
    if any(isinstance(y, jax.core.Tracer) for y in (x, like)):
        return jnp.asarray(x, there)
    if getattr(like, "committed", False):
        # An array on the host may be too large for one device.
        moved = jax.device_put(x, like.sharding)
        return moved if here == there else moved.astype(there)
    if not getattr(x, "committed", False):
        return jnp.asarray(x, there)
    # As in `new`, counters and keys are tied to no devices.
    if jnp.issubdtype(here, jax.dtypes.prng_key):
        data = jnp.asarray(on_host(jax.random.key_data(x)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jnp.asarray(on_host(x), there)
