"""How large a norm may be: a number, an array or a schedule, checked as early as it can be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from clipjax._norms import in_float64, wide

Schedule: TypeAlias = Callable[[Any], Any]
Bound: TypeAlias = float | jax.Array | np.ndarray | Schedule
Evaluate: TypeAlias = Callable[[Any], jax.Array]


def check_bound(name: str, bound: Any, *, minimum: float | None = 0.0) -> Any:
    """Return `bound` if it can bound something, else raise an error that quotes it.

    Numbers and concrete arrays are checked for NaN and against `minimum`. A traced array or a
    schedule is not known yet: :func:`bound_at` raises it to `minimum` when it runs.
    """
    if callable(bound) or isinstance(bound, jax.core.Tracer):
        return bound
    if isinstance(bound, bool | str | bytes) or bound is None:
        raise TypeError(f"{name} must be a number, an array or a schedule, got {bound!r}")
    values = np.asarray(bound)
    if not (jnp.issubdtype(values.dtype, jnp.floating) or jnp.issubdtype(values.dtype, jnp.integer)):
        raise TypeError(f"{name} must be real, got {bound!r}")
    values = values.astype(np.float64)
    if np.isnan(values).any():
        raise ValueError(f"{name} must not be NaN, got {bound!r}")
    if minimum is not None and (values < minimum).any():
        raise ValueError(f"{name} must be at least {minimum:g}, got {bound!r}")
    return bound


@in_float64
def _to_float64(value: Any, minimum: float | None) -> jax.Array:
    value = wide(value)
    return value if minimum is None else jnp.maximum(value, minimum)


def bound_at(name: str, bound: Any, *, minimum: float | None = 0.0) -> Evaluate:
    """Check `bound` and make it a function `step -> float64 array`.

    What only the running program knows is raised to `minimum`, so that a schedule that overshoots
    zero clips to zero and never flips a sign. NaN stays NaN, and shows.
    """
    check_bound(name, bound, minimum=minimum)

    def evaluate(step: Any) -> jax.Array:
        if not callable(bound):
            return _to_float64(bound, minimum)
        if step is None:
            raise ValueError(f"{name} is a schedule, {bound!r}: pass the step to evaluate it at")
        return _to_float64(bound(step), minimum)

    return evaluate


def check_finite_number(name: str, value: Any, *, minimum: float = -math.inf) -> float:
    """Return a plain finite number >= `minimum` as a float, or raise an error that quotes it."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not (math.isfinite(value) and value >= minimum):
        raise ValueError(f"{name} must be finite and at least {minimum:g}, got {value!r}")
    return float(value)
