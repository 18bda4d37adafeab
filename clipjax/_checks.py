"""What arguments that are no bounds may be, the weights among them, and what the errors say."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from clipjax._core import bounds, trees


def check_number(name: str, value: Any, interval: str) -> Any:
    """Return a number in an interval, which is written as in "[0, 1)"."""
    value = bounds.check_bound(name, value, -np.inf, forms="a number")
    if callable(value) or np.ndim(value):
        raise TypeError(f"{name} must be a number, got {bounds.short_repr(value)}")
    if isinstance(value, jax.core.Tracer):
        return value
    low, high = map(float, interval[1:-1].split(","))
    above = low < value if interval[0] == "(" else low <= value
    below = value < high if interval[-1] == ")" else value <= high
    if not (above and below):
        raise ValueError(
            f"{name} must be in {interval}, got {bounds.short_repr(value)}"
        )
    return value


def check_count(name: str, value: Any, least: int) -> Any:
    """Return a whole number of at least `least`."""
    if isinstance(value, jax.core.Tracer):
        return value
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be a whole number, got {bounds.short_repr(value)}"
        ) from None
    if isinstance(value, bool) or not least <= number < 2**31:
        wanted = "below 2**31" if number >= 2**31 else f"of at least {least}"
        raise ValueError(
            f"{name} must be a whole number {wanted}, got {bounds.short_repr(value)}"
        )
    return number


def check_order(low: Any, high: Any, of: Any = None) -> None:
    """Raise an error if limits that are known do not go together: `low` is above `high`, for `of`."""
    if callable(low) or callable(high):
        return
    try:
        np.broadcast_shapes(np.shape(low), np.shape(high))
    except ValueError:
        given = f"{np.shape(low)} and {np.shape(high)}"
        raise ValueError(
            f"low and high must broadcast to one shape, got {given}"
        ) from None
    if isinstance(low, jax.core.Tracer) or isinstance(high, jax.core.Tracer):
        return
    if np.any(np.asarray(low, np.float64) > np.asarray(high, np.float64)):
        where = "" if of is None else f" for {of}"
        raise ValueError(
            f"low must not be above high{where}, got low={bounds.short_repr(low)}, "
            f"high={bounds.short_repr(high)}"
        )


def check_ord(ord: Any) -> float:
    """Return the order of a norm, 2 for None, or raise an error that names it."""
    if (
        ord is None
    ):  # the default, since `optax.inject_hyperparams` would trace a number
        return 2.0
    if isinstance(ord, jax.Array):
        raise bounds.traced_error("ord", ord)
    if not bounds.is_real(ord) or np.ndim(ord):
        raise TypeError(
            "ord must be 1, 2, a number of at least 1 or infinity, got "
            f"{bounds.short_repr(ord)}"
        )
    if not ord >= 1:
        raise ValueError(f"ord must be at least 1, got {ord!r}")
    return float(ord)


def check_patterns(argument: str, patterns: Any) -> tuple[str, ...]:
    """Return one pattern or several as a tuple, or raise an error."""
    each = (patterns,) if isinstance(patterns, str) else patterns
    if (
        not isinstance(each, Sequence)
        or not each
        or not all(isinstance(p, str) for p in each)
    ):
        raise TypeError(
            f"{argument} must be one or several path patterns, got {patterns!r}"
        )
    return tuple(each)


def check_transformation(name: str, value: Any) -> Any:
    """Return a gradient transformation, or raise an error that says what it is instead."""
    if not isinstance(value, optax.GradientTransformation):
        called = f"{getattr(value, '__name__', 'it')}(...)"
        hint = (
            f": call it, as in {called}; functions of weights go into clipjax.project"
            if callable(value)
            else ""
        )
        if isinstance(value, optax.MultiSteps):
            hint = ": write .gradient_transformation() after it"
        raise TypeError(
            f"{name} must be a gradient transformation, got "
            f"{bounds.short_repr(value)}{hint}"
        )
    return value


def params_for(name: str, updates: Any, params: Any) -> Any:
    """Return the parameters, with None where the updates have None; other structures and shapes are an error."""
    if params is None:
        raise ValueError(
            f"params: {name} needs them: tx.update(updates, state, params)"
        )
    try:
        params = jax.tree.map(
            lambda u, p: None if u is None else p,
            updates,
            params,
            is_leaf=lambda x: x is None,
        )
    except ValueError as error:
        raise ValueError(
            f"params: {name} needs them in the structure of the updates: {error}"
        ) from error
    wanted, given = trees.leaves_of(updates)[0], trees.leaves_of(params)[0]
    if missing := {leaf.name for leaf in wanted} - {leaf.name for leaf in given}:
        raise ValueError(
            f"params: {name} needs one for each update, but has none for "
            f"{trees.a_few(sorted(missing))}"
        )
    for update, param in zip(wanted, given, strict=True):
        if np.shape(update.value) != np.shape(param.value):
            raise ValueError(
                f"updates: {name} got shape {np.shape(update.value)} for the "
                f"parameter {param.name!r} of shape {np.shape(param.value)}"
            )
    return params


# What a tree with all variables of a Flax model holds beside its weights: collections
# of Linen, variables of NNX, and the moments in a TrainState, whose paths end as those
# of the weights.
_NO_WEIGHTS = (
    "batch_stats",
    "cache",
    "intermediates",
    "BatchStat",
    "Cache",
    "Intermediate",
    "opt_state",
)


def check_are_weights(params: Any, wanted: Any) -> None:
    """Raise an error if a projection would change what is known not to be a weight."""

    def is_other(node: Any) -> bool:
        return type(node).__name__ in _NO_WEIGHTS and type(node).__module__.startswith(
            "flax."
        )

    other = (
        "params" in params
        if isinstance(params, Mapping)
        else hasattr(params, "opt_state")
    )
    each = zip(
        jax.tree_util.tree_leaves_with_path(params, is_leaf=is_other),
        jax.tree.leaves(wanted, is_leaf=is_other),
        strict=True,
    )
    for (path, old), new in each:
        kind = (
            type(old).__name__
            if is_other(old)
            else trees.path_name(path[:1])
            if other
            else ""
        )
        if kind in _NO_WEIGHTS and any(
            a is not b for a, b in zip(*map(jax.tree.leaves, (old, new)), strict=True)
        ):
            raise ValueError(
                f"params: {trees.path_name(path)!r}, of {kind}, is not a weight, but "
                "would be changed: pass only the weights, as in variables['params'], "
                "train_state.params or nnx.state(model, nnx.Param)"
            )
