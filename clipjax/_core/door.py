"""The door: trees are taken apart, `act` gets leaves, and the state logs metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Never

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clipjax._core.aliases import Memory, State, Step, Tree
from clipjax._core.bounds import check_label, is_real
from clipjax._core.leaves import Leaves, check_within, flatten, shapes_of, short_repr
from clipjax._core.norms import warn_if_local
from clipjax._core.states import (
    MetricsState,
    as_logged,
    check_state,
    next_metrics,
)

# act(updates: Leaves, params: Tree, step, memory, **extra) -> (tree, metrics, memory);
# that of a user gets a tree in place of the leaves
Act = Callable[..., tuple[Any, Any, Any]]


def transformation(
    name: str,
    act: Act,
    remember: Callable[[Leaves], Any] | None = None,
    measure: Callable[..., Any] | None = None,
    *,
    fixed_names: bool = True,
) -> optax.GradientTransformationExtraArgs:
    """Make a transformation from what it does to leaves.

    Args:
      name: the first part of the names of its metrics.
      act: a function `act(updates, params, step, memory, **extra)` that returns a tree
        of updates, a dict of metrics, and the next memory. The parameters are a tree,
        or None.
      remember: a function that makes the memory before the first step from the leaves
        of the parameters.
      measure: a function `measure(updates, params, step, memory)` that returns the
        metrics alone, if they are known without the rest of `act`: `init` needs their
        shapes.
      fixed_names: whether the names of the metrics are the same for every tree.

    Returns:
      The transformation.
    """
    measured = measure or (lambda *args: act(*args)[1])

    def init(params: Tree) -> MetricsState:
        leaves = flatten(params)
        memory = () if remember is None else remember(leaves)

        def first(weights: Leaves) -> Any:
            tree = weights.rebuild(weights.values)
            step = jnp.zeros((), np.int32)
            return as_logged(measured(weights, tree, step, memory))

        shapes = shapes_of(first, leaves)
        metrics: Any = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        if not (fixed_names or leaves.values or leaves.absent):
            # `optax.tree.map_params` calls `init` with a placeholder without leaves,
            # for which names are not known. A single leaf stands for all metrics.
            metrics = jnp.zeros((), np.float32)
        return MetricsState(jnp.zeros((), np.int32), {name: metrics}, memory)

    def update(
        updates: Tree, state: State, params: Tree = None, *args: Never, **extra: Any
    ) -> tuple[Tree, Any]:
        if args:
            raise TypeError(
                "update takes the loss by name: update(grads, state, params, "
                f"loss=loss), got {short_repr(args[0])}"
            )
        warn_if_local()
        check_within(updates, params)
        leaves = flatten(updates)
        is_stateless = state is None or isinstance(state, optax.EmptyState)
        if is_stateless and remember is None:
            return act(leaves, params, None, (), **extra)[0], state
        check_state(name, state)
        changed, metrics, memory = act(
            leaves, params, state.step, state.memory, **extra
        )
        kept = next_metrics(name, state.metrics[name], as_logged(metrics))
        step = optax.safe_increment(jnp.asarray(state.step))
        return changed, MetricsState(step, {name: kept}, memory)

    return optax.GradientTransformationExtraArgs(init, update)


def with_metrics(
    name: str, act: Act, remember: Callable[[Any], Any] | None = None
) -> optax.GradientTransformationExtraArgs:
    """Make a gradient transformation with metrics from a function of your own.

    Use it to write a clip that :func:`clipjax.metrics` reads, and that works with
    everything else in clipjax.

    Args:
      name: the first part of the names of the metrics, a string without `/`.
      act: a function `act(updates, params, step, memory, **extra) -> (updates, metrics,
        memory)`. `step` counts the updates before this one, and is None without a
        state. `metrics` is a dict of scalars with the same names at every step.
        `extra` are all keyword arguments of `update`, such as `loss`, so `act` takes
        `**extra` even if it reads none of them; `init` calls `act` without any.
      remember: a function that takes the parameters, and returns the memory before the
        first step: arrays whose shapes and dtypes never change. None, the default,
        means that `act` has no memory, and that its argument `memory` is `()`.

    Returns:
      A gradient transformation. If `act` has no memory, `update` also accepts None or
      `optax.EmptyState()` in place of a state, and then keeps no metrics.

    Raises:
      TypeError: `name` is not a string without `/`, or `act` is not a function; in
        `init` or `update`, `act` returns a metric that is not a real scalar, or a
        memory of another shape or dtype.
      ValueError: in `init`, a metric has a name that clipjax adds, such as `steps`; in
        `update`, the state is None and `act` needs a memory.

    A float in `metrics` is logged as it was at the last step, an int as its sum over
    all steps, and a bool as the fraction of the steps at which it was true: `clipped`
    becomes `clipped_fraction`. For a float named `norm`, the number of steps at which
    it is not finite is logged as `nonfinite_count`. If there is also a float `scale`,
    :func:`metrics` adds the product of `norm` and `scale` as `norm_after`. The names
    may depend on the tree, so that each leaf can have a metric of its own. Derivatives
    treat the metrics as constants.

    See Also:
      :func:`metrics` reads them; :func:`project` makes a projection of your own.

    Example:
      >>> import clipjax, jax, jax.numpy as jnp
      >>> def act(updates, params, step, memory, **extra):
      ...     largest = jnp.max(jnp.abs(updates))
      ...     scale = 1 / jnp.maximum(largest, 1.0)
      ...     metrics = {"norm": largest, "clipped": scale < 1}
      ...     return updates * scale, metrics, memory
      >>> tx = clipjax.with_metrics("by_largest", act)
      >>> clipped, state = tx.update(jnp.array([2.0, 4.0]), tx.init(jnp.zeros(2)))
      >>> print(clipped, clipjax.metrics(state)["by_largest/norm"])
      [0.5 1. ] 4.0
    """
    check_label(name)
    if not callable(act):
        raise TypeError(
            "act must be a function (updates, params, step, memory, **extra), got "
            f"{act!r}"
        )
    if not (remember is None or callable(remember)):
        raise TypeError(
            f"remember must be a function of the parameters or None, got {remember!r}"
        )

    def act_on_leaves(
        updates: Leaves, params: Tree, step: Step, memory: Memory, /, **extra: Any
    ) -> Any:
        tree = updates.rebuild(updates.values)
        returned = act(tree, params, step, memory, **extra)
        _check_returned(name, returned, memory)
        changed, metrics, memory = returned
        return changed, _checked_metrics(name, metrics), memory

    return transformation(
        name,
        act_on_leaves,
        remember and (lambda leaves: remember(leaves.rebuild(leaves.values))),
        fixed_names=False,
    )


def _check_returned(name: str, returned: Any, memory: Memory) -> None:
    """Raise if `act` returned something that a state cannot hold."""
    is_triple = isinstance(returned, tuple) and len(returned) == 3
    if not (is_triple and isinstance(returned[1], Mapping)):
        raise TypeError(
            f"act of {name} must return (updates, a dict of metrics, memory), got "
            f"{short_repr(returned)}"
        )
    wanted, given = (jax.tree.map(_kind, tree) for tree in (memory, returned[2]))
    # Not `wanted != given`, since placeholders of optax.tree.map_params are only equal
    # to themselves.
    kinds = {(jax.tree.structure(x), *jax.tree.leaves(x)) for x in (wanted, given)}
    if len(kinds) > 1:
        raise TypeError(
            f"act of {name} must return memory in the shapes and dtypes {wanted}, got "
            f"{given}"
        )


def _kind(x: Any) -> str:
    return f"{jnp.result_type(x)}{list(np.shape(x))}"


def _checked_metrics(name: str, metrics: Mapping[Any, Any]) -> dict[str, jax.Array]:
    """Return the metrics that a user's function returned, as arrays."""
    added = {"nonfinite_count"}
    for key, x in metrics.items():
        is_bool = isinstance(x, bool) or getattr(x, "dtype", "") == "bool"
        if np.ndim(x) or not (is_bool or is_real(x)):
            given = f"shape {np.shape(x)}" if np.ndim(x) else short_repr(x)
            raise TypeError(
                f"act: the metric {key!r} of {name} must be a real scalar or a bool, "
                f"got {given}"
            )
        if is_bool:
            added.add(f"{key}_fraction")
    taken = [key for key in metrics if key in added or f"/{key}".endswith("/steps")]
    if taken:
        raise ValueError(
            f"metrics: {sorted(taken)} of {name} are names that clipjax adds; choose "
            "others"
        )
    return {str(key): jnp.asarray(x) for key, x in metrics.items()}
