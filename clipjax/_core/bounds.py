"""Bounds: checked when they are known, and evaluated at each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

Number: TypeAlias = float | np.number[Any] | jax.Array
Bound: TypeAlias = ArrayLike | optax.Schedule
Ord: TypeAlias = float | np.number[Any] | None


def short_repr(value: Any, most: int = 80) -> str:
    """Return the repr of a value on one line, cut to a length that an error message can hold."""
    text = " ".join(repr(value).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def is_real(value: Any) -> bool:
    """Return whether a value is a real number, or an array of real numbers."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return any(
            jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer)
        )
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**1000  # a float holds it
    return isinstance(value, float)


def as_float(value: Any) -> Any:
    """Return a real number or array as floats, if it is not JAX's: that would take whole ones for int32, and wrap."""
    if isinstance(value, np.ndarray | np.generic):
        whole_or_long = (
            jnp.issubdtype(value.dtype, jnp.integer) or value.dtype.itemsize > 8
        )
        return value.astype(np.float64) if whole_or_long else value
    return float(value) if isinstance(value, int) else value


def check_bound(
    name: str,
    bound: Any,
    least: float = 0,
    *,
    scalar: bool = False,
    forms: str = "a number, an array or a schedule",
) -> Any:
    """Return a number, an array or a schedule, or raise an error that names it.

    Of a traced array the value is not known: it is raised to `least`, as what a
    schedule returns.
    """
    if callable(bound) and not isinstance(
        bound, optax.GradientTransformation
    ):  # a projection is callable, too
        return bound
    if not is_real(bound):
        hint = "; trees go to clipjax.functional, or to a projection, as in max_norm(3.0)(params)"
        hint = (
            hint if type(bound) in (list, tuple, dict) and "schedule" in forms else ""
        )
        raise TypeError(
            f"{name} must be {forms} of real numbers, got {short_repr(bound)}{hint}"
        )
    if scalar:
        check_fits(name, bound, (), "the norm of all leaves")
    if isinstance(bound, jax.core.Tracer):
        return _at_least(bound, least)
    value = np.asarray(
        jax.device_get(bound), np.float64
    )  # an explicit transfer, which transfer guards allow
    if not (value >= least).all():
        wanted = "not be NaN" if np.isnan(value).any() else f"be at least {least:g}"
        raise ValueError(f"{name} must {wanted}, got {short_repr(bound)}")
    return as_float(bound)


def check_constant(
    name: str, bound: Any, least: float = 0, *, scalar: bool = False
) -> Any:
    """Return a checked number or array, for functions that have no step."""
    if callable(bound):
        raise TypeError(
            f"{name} must be a number or an array here, not a schedule: got "
            f"{short_repr(bound)}"
        )
    return check_bound(name, bound, least, scalar=scalar, forms="a number or an array")


def as_schedule(
    name: str, bound: Any, least: float = 0, *, scalar: bool = False
) -> Callable[[Any], Any]:
    """Check a bound, and return the function from the step to its value, which is never below `least`.

    So a schedule that falls below 0 clips to 0, and flips no sign. NaN stays NaN.
    """
    checked = check_bound(name, bound, least, scalar=scalar)
    if not callable(bound):
        return lambda step: checked

    def evaluate(step: Any) -> Any:
        if step is None:
            raise ValueError(
                f"{name} is a schedule and needs the step: give update the state that "
                "init returned, and a projection that you call step=, as in "
                "max_norm(schedule)(params, step=step)"
            )
        value: Any = bound(step)
        if not is_real(value):
            raise TypeError(
                f"{name} must be a schedule that returns a number, but it returned "
                f"{short_repr(value)}"
            )
        if scalar:
            check_fits(name, value, (), "the norm of all leaves")
        return _at_least(as_float(value), least)

    return evaluate


def _at_least(bound: Any, least: float) -> Any:
    if least == -np.inf:
        return bound
    return (jnp if isinstance(bound, jax.Array) else np).maximum(
        bound, least
    )  # numbers stay as exact as they are


def fit_bound(name: str, bound: Any, norms: jax.Array, of: Any) -> Any:
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


def traced_error(name: str, value: Any) -> TypeError:
    """Return the error for a traced number on which the program itself depends, such as a size."""
    return TypeError(
        f"{name} must be known before compiling: pass a Python value, and name it in "
        f"static_args of optax.inject_hyperparams, got {short_repr(value)}"
    )
