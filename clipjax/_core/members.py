"""What all transformations have in common: they check their inputs and keep statistics.

A transformation is a function `act(updates, memory, params, step, **extra_args)`, which returns the updates,
a report and the new memory: everything in its state except the statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from clipjax._core.arguments import shown
from clipjax._core.axes import Axes, resolve_axes
from clipjax._core.dtypes import as_arrays, only_arrays
from clipjax._core.links import Clip
from clipjax._core.paths import leaves_with_paths, the_leaf
from clipjax._core.stats import Stats, name_of, observe, start
from clipjax._core.trees import Report
from clipjax._core.where import Where, check_where, inside, merged

Memory: TypeAlias = tuple[Any, ...]  # of arrays, and of trees of them
Acted: TypeAlias = tuple[Any, Report, Memory]
Act: TypeAlias = Callable[..., Acted]
First: TypeAlias = Callable[[Any, Stats], Memory]


def with_stats(
    kind: type[Any],
    act: Act,
    first: First = lambda *_: (),
    *,
    where: Where = None,
    needs_params: str = "",
    follows_past: bool = False,
) -> Clip:
    """Make a transformation from `act`, with statistics.

    Without a state (None, or the `EmptyState` of Optax's own clips) it acts in the same way, without
    statistics.

    Args:
      kind: the class of the state, which consists of a `Stats` and the memory.
      act: gets arrays; `step` is None if there is no state.
      first: makes the memory before the first step.
      where: the leaves that `first` and `act` get, with None in place of the others, which may be anything.
      needs_params: why params are needed, for the error without them; `act` gets those that have an update.
      follows_past: whether `act` cannot work without a state.
    """
    name, where = name_of(kind), check_where(where)

    def init(params: Any) -> Any:
        params = inside(where, params)
        stats = start(params)
        return kind(stats, *first(params, stats))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        stateless = not follows_past and (state is None or isinstance(state, optax.EmptyState))
        if not stateless:
            check_state(name, kind, state)
        given, updates = updates, as_arrays(inside(where, updates))
        if needs_params:
            params = matching(name, updates, params, needs_params)
        stats, *memory = init(given) if stateless else state
        step = None if stateless else stats.steps
        updates, report, memory = act(updates, tuple(memory), params, step, **extra_args)
        updates = updates if where is None else merged(given, updates)
        return updates, state if stateless else kind(observe(stats, report), *memory)

    return Clip(init, update)


def without_memory(axes: Axes) -> Callable[[Any, Stats], Memory]:
    """Make the `first` of a transformation without memory: it raises an error for invalid `axes`."""

    def first(params: Any, stats: Stats) -> Memory:
        del stats
        resolve_axes(axes, only_arrays(params))
        return ()

    return first


def check_state(name: str, kind: Any, state: Any) -> None:
    """Raise an error if `state` is not one that the transformation `name` made."""
    if not isinstance(state, kind):
        given = shown(state, 40) if isinstance(state, dict | list) else f"a {type(state).__name__}"
        hint = "\nTo restore a checkpoint in that form, give tx.init(params) as its target."
        raise TypeError(
            f"state: {name} takes the {kind.__name__} that its init or last update returned, as in "
            f"tx.update(grads, state, params); got {given}{hint if isinstance(state, dict | list) else ''}"
        )


def matching(name: str, updates: Any, params: Any, why: str) -> Any:
    """Return the parameters that have an update, as arrays, with None in place of the others."""
    if params is None:
        if not jax.tree.leaves(updates):
            return updates
        raise ValueError(f"params: {name} {why}: pass them, as in tx.update(grads, state, params)")
    try:
        params = jax.tree.map(lambda u, p: None if u is None else p, updates, params, is_leaf=_is_none)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"params: {name} needs the structure of the updates. {_unlike(updates, params)}"
        ) from error
    params = as_arrays(params)
    structure: Any = jax.tree.structure(params)
    if structure != jax.tree.structure(updates):  # jax.tree.map treated a subtree as a leaf
        raise ValueError(f"params: {name} needs the structure of the updates. {_unlike(updates, params)}")
    for (path, update), param in zip(leaves_with_paths(updates), jax.tree.leaves(params), strict=True):
        if jnp.shape(update) != jnp.shape(param):
            raise ValueError(
                f"params: {the_leaf(path)} has shape {jnp.shape(param)}, but its update has "
                f"{jnp.shape(update)}"
            )
    return params


def _is_none(node: Any) -> bool:
    return node is None


def _unlike(updates: Any, params: Any) -> str:
    """Describe which leaves two trees do not share."""
    of_updates, of_params = ([the_leaf(p) for p, _ in leaves_with_paths(tree)] for tree in (updates, params))
    missing = [f"{name} has an update and no parameter" for name in of_updates if name not in of_params]
    added = [f"{name} is a parameter without an update" for name in of_params if name not in of_updates]
    return "; ".join([*missing[:1], *added[:1]]) or f"Updates: {shown(updates)}; params: {shown(params)}"
