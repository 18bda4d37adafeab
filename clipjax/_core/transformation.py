"""From `act(updates, params, step, memory, **extra)` to an Optax transformation whose state holds metrics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax._core import bounds, trees

Act = Callable[..., tuple[Any, dict[str, jax.Array], Any]]


class MetricsState(NamedTuple):
    """The state of a transformation that has metrics; `clipjax.metrics` reads it.

    Keys are `"<transformation>/<metric>"`.
    """

    step: jax.Array  # int32: how many updates there were
    last: dict[str, jax.Array]  # metrics of the last update
    totals: dict[str, jax.Array]  # int32, of int metrics: their sums over all updates
    shares: dict[
        str, jax.Array
    ]  # int32, of bool metrics: the updates at which they were true
    memory: Any  # what the transformation itself remembers


def with_metrics(
    name: str, act: Act, remember: Callable[[Any], Any] | None = None
) -> optax.GradientTransformationExtraArgs:
    """Make a gradient transformation whose metrics :func:`clipjax.metrics` reads; every clip here is one.

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

    takes_extra = any(
        each.kind is each.VAR_KEYWORD
        for each in inspect.signature(act).parameters.values()
    )

    def named(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        for key, x in metrics.items():
            if np.ndim(x) or not (
                bounds.is_real(x)
                or isinstance(x, bool)
                or getattr(x, "dtype", "") == "bool"
            ):
                given = f"shape {np.shape(x)}" if np.ndim(x) else bounds.short_repr(x)
                raise TypeError(
                    f"act: the metric {key!r} of {name} must be a real scalar or a "
                    f"bool, got {given}"
                )
        shares = {
            f"{key}_fraction"
            for key, x in metrics.items()
            if jnp.result_type(x).kind == "b"
        }
        if taken := {"steps", "nonfinite_count", *shares} & set(metrics):
            raise ValueError(
                f"metrics: {sorted(taken)} of {name} are names that clipjax adds; "
                "choose others"
            )
        if "norm" in metrics:
            metrics = {
                **metrics,
                "nonfinite_count": (~jnp.isfinite(metrics["norm"])).astype(np.int32),
            }
        return {f"{name}/{key}": jnp.asarray(x) for key, x in metrics.items()}

    def first_metrics(params: Any, memory: Any) -> dict[str, jax.Array]:
        returned = act(params, params, jnp.zeros((), np.int32), memory)
        if not (
            isinstance(returned, tuple)
            and len(returned) == 3
            and isinstance(returned[1], Mapping)
        ):
            given = bounds.short_repr(returned)
            raise TypeError(
                f"act of {name} must return (updates, a dict of metrics, memory), got "
                f"{given}"
            )
        kinds = [
            jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(np.shape(x))}", m)
            for m in (memory, returned[2])
        ]
        # Not kinds[0] != kinds[1]: placeholders of optax.tree.map_params equal only
        # themselves.
        if (
            len({(jax.tree.structure(kind), *jax.tree.leaves(kind)) for kind in kinds})
            > 1
        ):
            raise TypeError(
                f"act of {name} must return memory in the shapes and dtypes "
                f"{kinds[0]}, got {kinds[1]}"
            )
        return named(returned[1])

    def init(params: Any) -> MetricsState:
        trees.leaves_of(params)  # raises its errors
        memory = () if remember is None else remember(params)
        return first_state(jax.eval_shape(first_metrics, params, memory), memory)

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        extra = extra if takes_extra else {}
        if state is None or isinstance(state, optax.EmptyState):
            if remember is not None:
                raise ValueError(
                    f"state: {name} needs the state that init returned, got {state!r}"
                )
            return act(updates, params, None, (), **extra)[0], state
        check_state(name, MetricsState, state)
        updates, metrics, memory = act(
            updates, params, state.step, state.memory, **extra
        )
        return updates, next_state(state, named(metrics), memory)

    return optax.GradientTransformationExtraArgs(init, update)


def first_state(metrics: dict[str, Any], memory: Any) -> MetricsState:
    """Return the state before the first step, for metrics of these dtypes.

    Each scalar is a buffer of its own, since a buffer can be donated only once.
    """
    kinds: dict[str, dict[str, jax.Array]] = {"b": {}, "i": {}, "f": {}}
    for key, x in metrics.items():
        kind = {"b": "b", "i": "i", "u": "i"}.get(np.dtype(x.dtype).kind, "f")
        kinds[kind][key] = jnp.zeros((), x.dtype if kind == "f" else np.int32)
    return MetricsState(
        jnp.zeros((), np.int32), kinds["f"], kinds["i"], kinds["b"], memory
    )


def next_state(
    state: MetricsState, metrics: dict[str, jax.Array], memory: Any
) -> MetricsState:
    """Return the state after a step with these metrics, or raise an error if it was made for others."""
    known = {*state.last, *state.totals, *state.shares}
    if known != set(metrics):
        more, less = (
            trees.a_few(sorted(x), 5) or "none"
            for x in (set(metrics) - known, known - set(metrics))
        )
        raise ValueError(
            f"state: it was made for other metrics; this step has {more} more, and "
            f"{less} less"
        )
    metrics = lax.stop_gradient(metrics)
    last = {key: metrics[key].astype(old.dtype) for key, old in state.last.items()}
    totals, shares = (
        {key: saturating_add(old, metrics[key]) for key, old in part.items()}
        for part in state[2:4]
    )
    return MetricsState(optax.safe_increment(state.step), last, totals, shares, memory)


def saturating_add(counter: jax.Array, more: jax.Array) -> jax.Array:
    """Add a number to an int32 counter, which stops at its largest value."""
    most = np.iinfo(np.int32).max
    more = (more if more.dtype.itemsize < 4 else jnp.minimum(more, most)).astype(
        np.int32
    )
    return jnp.where(counter > most - jnp.maximum(more, 0), most, counter + more)


def check_state(name: str, kind: type[Any], state: Any) -> None:
    """Raise an error if a state is not of the class that `init` returns, or has the metrics of others."""
    keys = (
        (*state.last, *state.totals, *state.shares)
        if isinstance(state, MetricsState)
        else ()
    )
    others = {key.partition("/")[0] for key in keys} - {name}
    if not isinstance(state, kind) or others:
        given = (
            f"that of {', '.join(sorted(others))}" if others else type(state).__name__
        )
        raise TypeError(
            f"state: {name} needs the state that its init returned, got {given}"
        )
