"""Bounds that follow the norms of past steps: the common code that keeps their statistics.

A method for the whole tree is a function `bound_of(norm, memory, step) -> (bound, memory)` and a function
that makes its first memory; :func:`clip_by_past` measures the norm once, asks for the bound, rescales, and
stores the memory. Methods for single leaves do these steps themselves, with :func:`remembering`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from clipjax._core.axes import is_measured
from clipjax._core.dtypes import as_arrays, in_float64, wide
from clipjax._core.members import Acted, Memory, with_stats
from clipjax._core.mesh import AxisName, placed_as
from clipjax._core.rounding import round_up
from clipjax._core.stats import Stats, count
from clipjax._core.trees import clip_tree, measure_tree
from clipjax._core.where import Where

Start: TypeAlias = Callable[[Any, Any], Memory]
BoundOf: TypeAlias = Callable[[jax.Array, Memory, jax.Array], tuple[jax.Array, Memory]]


def remembering(
    state: type[Any],
    first: Start,
    clip: Callable[[Any, Memory, jax.Array, Any], Acted],
    where: Where,
) -> optax.GradientTransformationExtraArgs:
    """Make a transformation from `clip(updates, memory, step, dtype)`; bad steps do not change its memory.

    Args:
      state: the class of the state, which has a `Stats` and then the arrays of the memory, or trees of them.
      first: makes the memory before the first step, from the parameters and the float dtype of the state.
      clip: gets and returns the floats of the memory in float64; `dtype` is the dtype in which they are
        stored.
      where: the leaves that `first` and `clip` get.
    """

    def start(params: Any, stats: Stats) -> Memory:
        return first(params, stats.norm.dtype)

    @in_float64
    def act(updates: Any, memory: Memory, params: Any, step: Any, **extra_args: Any) -> Acted:
        del params, extra_args
        dtype = next(x.dtype for x in jax.tree.leaves(memory) if _is_float(x))
        # Derivatives are taken only through this step's norm; past norms are constants.
        past = lax.stop_gradient(jax.tree.map(lambda x: wide(x) if _is_float(x) else x, memory))
        updates, report, new_memory = clip(updates, past, step, dtype)
        good = jnp.isfinite(round_up(report.norm, dtype))

        def remember(new: jax.Array, old: jax.Array) -> jax.Array:
            new = lax.convert_element_type(placed_as(old, new), old.dtype)
            return lax.stop_gradient(jnp.where(good, new, old))

        return updates, report, jax.tree.map(remember, new_memory, memory)

    return with_stats(state, act, start, where=where, follows_past=True)


def clip_by_past(
    state: type[Any], first: Start, bound_of: BoundOf, where: Where, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of the whole tree to the bound that `bound_of(norm, memory, step)` returns.

    The state has the bound of the last step, `threshold`, before the memory.
    """

    def start(params: Any, dtype: Any) -> Memory:
        return no_threshold(dtype), *first(params, dtype)

    def clip(updates: Any, memory: Memory, step: jax.Array, dtype: Any) -> Acted:
        norm = measure_tree(updates, 2.0, axis_name)
        bound, memory = bound_of(wide(round_up(norm, dtype)), memory[1:], step)
        updates, report = clip_tree(updates, bound, 2.0, axis_name, norm=norm)
        return updates, report, (round_up(bound, dtype), *memory)

    return remembering(state, start, clip, where)


def leaves_of(params: Any) -> int:
    """Count the leaves that have a norm."""
    return sum(is_measured(leaf) for leaf in jax.tree.leaves(as_arrays(params)))


def check_leaves(name: str, found: int, remembered: int) -> None:
    """Raise an error if the state was made for another number of leaves than the updates have."""
    if found != remembered:
        raise ValueError(
            f"{name}: the updates have {found} float leaves, but the parameters given to init had "
            f"{remembered}"
        )


def no_threshold(dtype: Any) -> jax.Array:
    """Return the threshold in a state before the first step."""
    return jnp.full((), jnp.inf, dtype)


def _is_float(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def no_norms() -> jax.Array:
    """Return the number of norms taken in before the first step."""
    return jnp.zeros((), jnp.int32)


def no_ring(window: Any, dtype: Any) -> jax.Array:
    """Return the ring of the last `window` norms before the first step."""
    if isinstance(window, jax.core.Tracer):
        raise TypeError(
            "window must be known when tracing, because it sets a shape: name it in static_args of "
            "optax.inject_hyperparams"
        )
    return jnp.zeros(int(window), dtype)


def length_of(ring: jax.Array, name: str, window: Any) -> int:
    """Return the length of the ring in a state, which must have been made with the same window."""
    if not isinstance(window, jax.core.Tracer) and ring.shape != (int(window),):
        raise ValueError(
            f"state: it was made with window={ring.size}, but this {name} has window={int(window)}: start "
            f"again with tx.init(params)"
        )
    return ring.shape[0]


def one_more(taken: jax.Array) -> jax.Array:
    """Count one more norm; :func:`remembering` undoes this if the norm was not finite."""
    return count(taken, jnp.ones((), bool))


def capped(bound: jax.Array, max_norm: Callable[[Any], jax.Array] | None, step: jax.Array) -> jax.Array:
    """Return the bound, or `max_norm` if there is one and it is lower."""
    return bound if max_norm is None else jnp.minimum(bound, max_norm(step))
