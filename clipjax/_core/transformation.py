"""From `act(updates, params, step, memory, **extra)` to an Optax transformation."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clipjax._core import bounds, norms, states, trees
from clipjax._core.aliases import Metrics, Tree
from clipjax._core.messages import short_repr

Act = Callable[..., tuple[Tree, Metrics, Any]]


def with_metrics(
    name: str, act: Act, remember: Callable[[Any], Any] | None = None
) -> optax.GradientTransformationExtraArgs:
    """Make a gradient transformation with metrics, as every clip here is one.

    :func:`clipjax.metrics` reads them from its state.

    Args:
      name: the first part of the names of its metrics.
      act: a function `act(updates, params, step, memory) -> (updates, metrics,
        memory)`. `metrics` is a dict of scalars, always of the same names. A float is
        logged as it was at the last step; an int as its sum over all steps; a bool as
        the share of the steps at which it was true, `clipped` as `clipped_fraction`.
        With a float named `norm`, the steps at which it is not finite are counted in
        `nonfinite_count`. If `act` takes `**extra`, it gets the keyword arguments of
        `update`; `init` gives none.
      remember: makes the memory before the first step from the parameters: arrays whose
        shapes and dtypes never change. None if there is none; then `memory` is `()`.

    Returns:
      A gradient transformation. `update` with the state None or `optax.EmptyState()`
      keeps no metrics, for an `act` that remembers nothing.

    Raises:
      TypeError: `name` is not a string without `/`, or `act` is not a function.
      ValueError: in `update`, the state is None and `act` needs a memory.

    Metrics are not differentiated.

    Example:
      >>> import clipjax, jax, jax.numpy as jnp
      >>> def act(updates, params, step, memory):
      ...     largest = jnp.max(jnp.abs(updates))
      ...     scale = 1 / jnp.maximum(largest, 1.0)
      ...     metrics = {"norm": largest, "clipped": scale < 1}
      ...     return updates * scale, metrics, memory
      >>> tx = clipjax.with_metrics("by_largest", act)
      >>> clipped, state = tx.update(jnp.array([2.0, 4.0]), tx.init(jnp.zeros(2)))
      >>> print(clipped, clipjax.metrics(state)["by_largest/norm"])
      [0.5 1. ] 4.0
    """
    if not isinstance(name, str) or not name or "/" in name:
        raise TypeError(f"name must be a str without '/', got {name!r}")
    if not callable(act):
        raise TypeError(
            f"act must be a function (updates, params, step, memory), got {act!r}"
        )
    if not (remember is None or callable(remember)):
        raise TypeError(
            f"remember must be a function of the parameters or None, got {remember!r}"
        )
    parameters = inspect.signature(act).parameters.values()
    takes_extra = any(each.kind is each.VAR_KEYWORD for each in parameters)

    def first_metrics(params: Tree, memory: Any) -> Metrics:
        returned = act(params, params, jnp.zeros((), np.int32), memory)
        _check_returned(name, returned, memory)
        return checked_metrics(name, returned[1])

    def init(params: Tree) -> states.MetricsState:
        trees.leaves_of(params)  # raises its errors
        memory = () if remember is None else remember(params)
        metrics = trees.eval_shape(first_metrics, params, memory)
        return states.first_state(name, metrics, memory)

    def update(
        updates: Tree, state: Any, params: Tree = None, **extra: Any
    ) -> tuple[Tree, Any]:
        norms.warn_if_local()
        extra = extra if takes_extra else {}
        if state is None or isinstance(state, optax.EmptyState):
            if remember is not None:
                raise ValueError(
                    f"state: {name} needs the state that init returned, got {state!r}"
                )
            return act(updates, params, None, (), **extra)[0], state
        states.check_state(name, states.MetricsState, state)
        updates, metrics, memory = act(
            updates, params, state.step, state.memory, **extra
        )
        metrics = checked_metrics(name, metrics)
        return updates, states.next_state(state, metrics, memory)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_returned(name: str, returned: Any, memory: Any) -> None:
    """Raise an error if `act` returned what a state cannot hold."""
    is_triple = isinstance(returned, tuple) and len(returned) == 3
    if not (is_triple and isinstance(returned[1], Mapping)):
        raise TypeError(
            f"act of {name} must return (updates, a dict of metrics, memory), got "
            f"{short_repr(returned)}"
        )
    wanted, given = (jax.tree.map(_kind, each) for each in (memory, returned[2]))
    # Not wanted != given: placeholders of optax.tree.map_params equal only themselves.
    each = {(jax.tree.structure(x), *jax.tree.leaves(x)) for x in (wanted, given)}
    if len(each) > 1:
        raise TypeError(
            f"act of {name} must return memory in the shapes and dtypes {wanted}, got "
            f"{given}"
        )


def _kind(x: Any) -> str:
    return f"{jnp.result_type(x)}{list(np.shape(x))}"


def checked_metrics(name: str, metrics: Metrics) -> Metrics:
    """Return metrics as arrays, with those that clipjax adds."""
    added = {"nonfinite_count"}
    for key, x in metrics.items():
        is_bool = isinstance(x, bool) or getattr(x, "dtype", "") == "bool"
        if np.ndim(x) or not (is_bool or bounds.is_real(x)):
            given = f"shape {np.shape(x)}" if np.ndim(x) else short_repr(x)
            raise TypeError(
                f"act: the metric {key!r} of {name} must be a real scalar or a bool, "
                f"got {given}"
            )
        if is_bool:
            added.add(f"{key}_fraction")
    taken = [x for x in metrics if x in added or f"/{x}".endswith("/steps")]
    if taken:
        raise ValueError(
            f"metrics: {sorted(taken)} of {name} are names that clipjax adds; choose "
            "others"
        )
    if "norm" in metrics:
        bad = ~jnp.isfinite(metrics["norm"])
        metrics = {**metrics, "nonfinite_count": bad.astype(np.int32)}
    return {str(key): jnp.asarray(x) for key, x in metrics.items()}
