"""Bounds on norms: a number, an array or a schedule, checked as early as possible."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from clipjax._core.arguments import shown
from clipjax._core.axes import is_measured
from clipjax._core.dtypes import in_float64, wide
from clipjax._core.maxima import larger
from clipjax._core.paths import leaves_with_paths, the_leaf

Schedule: TypeAlias = Callable[[Any], Any]
Bound: TypeAlias = float | jax.Array | np.ndarray | Schedule
Evaluate: TypeAlias = Callable[[Any], jax.Array]


def check_bound(
    name: str,
    bound: Any,
    *,
    minimum: float | None = 0.0,
    scalar: bool = False,
    forms: str = "a number, an array or a schedule",
) -> Any:
    """Return `bound` if it is valid, else raise an error that quotes it.

    Numbers and concrete arrays are checked for NaN and against `minimum`. The values of a traced array or a
    schedule are not known yet: :func:`bound_at` raises them to `minimum` at run time.
    """
    if callable(bound) or isinstance(bound, jax.core.Tracer):
        return bound
    if isinstance(bound, bool | str | bytes | list | tuple) or bound is None:
        raise TypeError(f"{name} must be {forms}, got {shown(bound)}")
    values = np.asarray(jax.device_get(bound))  # an explicit transfer, which transfer guards allow
    if values.dtype == object:
        raise TypeError(f"{name} must be {forms}, got {shown(bound)}")
    if not (jnp.issubdtype(values.dtype, jnp.floating) or jnp.issubdtype(values.dtype, jnp.integer)):
        raise TypeError(f"{name} must be real, got {shown(bound)}")
    values = values.astype(np.float64)
    if np.isnan(values).any():
        raise ValueError(f"{name} must not be NaN, got {shown(bound)}")
    if minimum is not None and (values < minimum).any():
        raise ValueError(f"{name} must be at least {minimum:g}, got {shown(bound)}")
    if scalar:
        check_fits(name, values, (), "the norm of all leaves")
    return bound


def check_number(
    name: str, value: Any, low: float, high: float = np.inf, *, inside: bool = False, below: bool = False
) -> Any:
    """Return a number in `[low, high]`; in `[low, high)` if `below`; in `(low, high)` if `inside`.

    A traced number, as from `optax.inject_hyperparams`, has no known value and is not checked.
    """
    if callable(value):
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    check_bound(name, value, minimum=None, forms="a number")
    if isinstance(value, jax.core.Tracer):
        return value
    if np.ndim(value):
        raise ValueError(f"{name} must be one number, got {shown(value)}")
    number, left, right = float(value), "(" if inside else "[", ")" if inside or below else "]"
    if not low <= number <= high or (inside and number == low) or (right == ")" and number == high):
        raise ValueError(f"{name} must be in {left}{low:g}, {high:g}{right}, got {shown(value)}")
    return value


def check_count(name: str, value: Any, minimum: int) -> Any:
    """Return a whole number of at least `minimum`; a traced one is not checked."""
    if isinstance(value, jax.core.Tracer):
        return value
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {shown(value)}")
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be an int, got {shown(value)}") from error
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {shown(value)}")
    return value


def check_order(low: Any, high: Any, of: str = "") -> None:
    """Raise an error if a known `low` is above a known `high`; `of` names what they bound."""
    check_bound("low", low, minimum=None)
    check_bound("high", high, minimum=None)
    if any(callable(x) or isinstance(x, jax.core.Tracer) for x in (low, high)):
        return
    if np.any(np.asarray(low, np.float64) > np.asarray(high, np.float64)):
        raise ValueError(f"low must not be above high{of}, got low={shown(low)} and high={shown(high)}")


def check_fits(name: str, bound: Any, shape: tuple[int, ...], of: str) -> Any:
    """Return `bound` if it broadcasts to `shape`, else raise an error that names both."""
    fits = len(bound.shape) <= len(shape) and all(
        b in (1, s) for b, s in zip(reversed(bound.shape), reversed(shape), strict=False)
    )
    if not fits:
        wanted = "must be a scalar" if shape == () else f"must broadcast to shape {shape}"
        raise ValueError(f"{name} {wanted}, for {of}; got an array of shape {bound.shape}")
    return bound


def check_fits_leaves(name: str, bound: jax.Array, tree: Any) -> jax.Array:
    """Return `bound` if it broadcasts to every leaf that has a norm."""
    for path, leaf in leaves_with_paths(tree) if bound.ndim else ():
        if is_measured(leaf):
            check_fits(name, bound, leaf.shape, the_leaf(path))
    return bound


@in_float64
def _to_float64(value: Any, minimum: float | None) -> jax.Array:
    value = wide(value)
    return value if minimum is None else larger(value, minimum)


def bound_at(name: str, bound: Any, *, minimum: float | None = 0.0, scalar: bool = False) -> Evaluate:
    """Check `bound` and make it a function `step -> float64 array`.

    Values that are only known at run time are raised to `minimum`, so a schedule that falls below zero
    clips to zero and never flips a sign. NaN stays NaN, and so appears in the result.
    """
    check_bound(name, bound, minimum=minimum, scalar=scalar)

    def evaluate(step: Any) -> jax.Array:
        if not callable(bound):
            return _to_float64(bound, minimum)
        if step is None:
            raise ValueError(
                f"{name} is a schedule, {shown(bound)}, and needs the step: give step= to a projection that "
                f"is called, and to update the state that init returned"
            )
        return _to_float64(bound(step), minimum)

    return evaluate
