"""Numbers that users give: checked when they are known, and evaluated at each step."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def short_repr(value: Any, most: int = 80) -> str:
    """Return the repr of a value on one line, cut to a length that an error message can hold."""
    text = " ".join(repr(value).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def is_real(value: Any) -> bool:
    """Return whether a value is a real number, or an array of real numbers."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer))
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_bound(
    name: str,
    bound: Any,
    least: float = 0,
    *,
    scalar: bool = False,
    forms: str = "a number, an array or a schedule",
) -> Any:
    """Return a number, an array or a schedule, or raise an error that names it.

    Of a traced array the value is not known: it is raised to `least`, as what a schedule returns.
    """
    if isinstance(bound, optax.GradientTransformation):  # a projection is callable, too
        raise TypeError(f"{name} must be {forms}, got {short_repr(bound)}")
    if callable(bound):
        return bound
    if scalar and is_real(bound):
        check_fits(name, bound, (), "the norm of all leaves")
    if isinstance(bound, jax.core.Tracer) and is_real(bound):
        return jnp.maximum(bound, least)
    if isinstance(bound, bool | str | bytes | list | tuple | dict) or bound is None:
        hint = "; trees go to clipjax.functional, or to a projection, as in max_norm(3.0)(params)"
        hint = hint if isinstance(bound, list | tuple | dict) and "schedule" in forms else ""
        raise TypeError(f"{name} must be {forms}, got {short_repr(bound)}{hint}")
    if not is_real(bound):
        raise TypeError(f"{name} must be {forms} of real numbers, got {short_repr(bound)}")
    value = np.asarray(jax.device_get(bound))  # an explicit transfer, which transfer guards allow
    if np.isnan(value.astype(np.float64)).any():
        raise ValueError(f"{name} must not be NaN, got {short_repr(bound)}")
    if (value < least).any():
        raise ValueError(f"{name} must be at least {least:g}, got {short_repr(bound)}")
    return bound


def constant(name: str, bound: Any, least: float = 0, *, scalar: bool = False) -> Any:
    """Return a checked number or array, for functions that have no step."""
    if callable(bound):
        raise TypeError(f"{name} must be a number or an array here, not a schedule: got {short_repr(bound)}")
    return check_bound(name, bound, least, scalar=scalar, forms="a number or an array")


def as_schedule(name: str, bound: Any, least: float = 0, *, scalar: bool = False) -> Callable[[Any], Any]:
    """Check a bound, and return the function from the step to its value, which is never below `least`.

    So a schedule that falls below 0 clips to 0, and flips no sign. NaN stays NaN.
    """
    checked = check_bound(name, bound, least, scalar=scalar)
    if not callable(bound):
        return lambda step: checked

    def evaluate(step: Any) -> Any:
        if step is None:
            raise ValueError(
                f"{name} is a schedule and needs the step: pass step=, as in project(params, step=step), and to "
                "update the state that init returned"
            )
        value: Any = bound(step)
        if not is_real(value):
            raise TypeError(f"{name} must be a schedule that returns a number, but it returned {short_repr(value)}")
        if scalar:
            check_fits(name, value, (), "the norm of all leaves")
        return jnp.maximum(value, least)

    return evaluate


def not_static(name: str, value: Any) -> TypeError:
    """Return the error for a traced number on which the program itself depends, such as a size."""
    return TypeError(
        f"{name} must be known before compiling: pass a Python value, and name it in static_args of "
        f"optax.inject_hyperparams, got {short_repr(value)}"
    )


def broadcastable(name: str, bound: Any, norms: jax.Array, of: Any) -> Any:
    """Return a bound for norms: a scalar as it is, an array of the rank of the norms."""
    if np.ndim(bound) == 0:
        return bound
    check_fits(name, bound, norms.shape, of)
    return jnp.reshape(bound, (1,) * (norms.ndim - np.ndim(bound)) + np.shape(bound))


def check_fits(name: str, bound: Any, shape: tuple[int, ...], of: Any) -> None:
    """Raise an error if an array does not broadcast to a shape."""
    given = np.shape(bound)
    pairs = zip(reversed(given), reversed(shape), strict=False)
    if len(given) > len(shape) or any(b not in (1, s) for b, s in pairs):
        wanted = f"broadcast to shape {tuple(shape)}" if shape else "be a scalar"
        raise ValueError(f"{name} must {wanted}, for {of}; got shape {given}")


def check_order(low: Any, high: Any, of: Any = None) -> None:
    """Raise an error if a limit is wrong, or if both are known and `low` is above `high`, for `of`."""
    check_bound("low", low, -np.inf)
    check_bound("high", high, -np.inf)
    if not (callable(low) or callable(high)):
        try:
            np.broadcast_shapes(np.shape(low), np.shape(high))
        except ValueError:
            raise ValueError(
                f"low and high must broadcast to one shape, got {np.shape(low)} and {np.shape(high)}"
            ) from None
    known_now = not any(callable(x) or isinstance(x, jax.core.Tracer) for x in (low, high))
    if known_now and np.any(np.asarray(low, np.float64) > np.asarray(high, np.float64)):
        where = "" if of is None else f" for {of}"
        raise ValueError(f"low must not be above high{where}, got low={short_repr(low)}, high={short_repr(high)}")


def check_number(
    name: str, value: Any, low: float, high: float = np.inf, *, open_low: bool = False, open_high: bool = False
) -> Any:
    """Return a number from `low` to `high`, without the ends that are open."""
    check_bound(name, value, -np.inf, forms="a number")
    if callable(value) or np.ndim(value):
        raise TypeError(f"{name} must be a number, got {short_repr(value)}")
    if not isinstance(value, jax.core.Tracer):
        too_low = value <= low if open_low else value < low
        too_high = value >= high if open_high else value > high
        if too_low or too_high:
            start, end = "(" if open_low else "[", ")" if open_high or high == np.inf else "]"
            raise ValueError(f"{name} must be in {start}{low:g}, {high:g}{end}, got {short_repr(value)}")
    return value


def check_count(name: str, value: Any, least: int) -> Any:
    """Return a whole number of at least `least`."""
    if isinstance(value, jax.core.Tracer):
        return value
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {short_repr(value)}") from None
    if isinstance(value, bool) or number < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {short_repr(value)}")
    return number
