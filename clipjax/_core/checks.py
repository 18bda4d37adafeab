"""Checks of arguments that are neither bounds nor axes."""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from clipjax._core.bounds import as_float, check_is_wide, is_real
from clipjax._core.messages import short_repr, traced_error


def check_number(name: str, value: Any, interval: str) -> Any:
    """Return a number in an interval, such as "[0, 1)"."""
    check_is_wide(name, value)
    if not is_real(value) or np.ndim(value):
        raise TypeError(
            f"{name} must be a number in {interval}, got {short_repr(value)}"
        )
    if isinstance(value, jax.core.Tracer):
        return value
    low, high = map(float, interval[1:-1].split(","))
    number = float(jax.device_get(value))
    above = low < number if interval[0] == "(" else low <= number
    below = number < high if interval[-1] == ")" else number <= high
    if not (above and below):
        raise ValueError(f"{name} must be in {interval}, got {short_repr(value)}")
    return as_float(value)


def check_count(name: str, value: Any, least: int, *, static: bool = False) -> Any:
    """Return a whole number of at least `least`.

    A `static` number is the size of something, so that it cannot be traced.
    """
    if isinstance(value, jax.Array) and static:  # a traced one fails under jit only
        raise traced_error(name, value)
    if isinstance(value, jax.core.Tracer):
        return value
    wrong = TypeError(f"{name} must be a whole number, got {short_repr(value)}")
    if isinstance(value, bool):
        raise wrong
    try:
        number = operator.index(value)
    except TypeError:
        raise wrong from None
    if not least <= number < 2**31:
        wanted = "below 2**31" if number >= 2**31 else f"of at least {least}"
        raise ValueError(
            f"{name} must be a whole number {wanted}, got {short_repr(value)}"
        )
    return number


def check_ord(ord: Any) -> float:
    """Return the order of a norm, 2 for None.

    None is the default, since `optax.inject_hyperparams` would trace a number.
    """
    if ord is None:
        return 2.0
    if isinstance(ord, jax.Array):
        raise traced_error("ord", ord)
    return float(check_number("ord", ord, "[1, inf]"))


def check_word(name: str, value: Any, words: Sequence[str]) -> None:
    """Raise if a value is not one of a list of words."""
    if not (isinstance(value, str) and value in words):
        *others, last = map(repr, words)
        raise ValueError(
            f"{name} must be {', '.join(others)} or {last}, got {short_repr(value)}"
        )


def as_list(value: Any) -> list[Any]:
    """Return the elements of a list or a plain tuple; return another value in a list.

    A gradient transformation is a tuple too, but is one value.
    """
    return list(value) if type(value) in (list, tuple) else [value]


def check_label(name: Any) -> None:
    """Raise if a value cannot be the first part of the names of metrics."""
    if not isinstance(name, str) or not name or "/" in name:
        raise TypeError(f"name must be a str without '/', and not empty, got {name!r}")


def check_transformation(name: str, value: Any) -> Any:
    """Return a gradient transformation, or say what the value is instead."""
    if isinstance(value, optax.GradientTransformation):
        return value
    hint = ""
    if isinstance(value, optax.MultiSteps):
        hint = ": write .gradient_transformation() after it"
    elif callable(value):
        hint = (
            ": call a function that makes one; a function of the weights goes into "
            "clipjax.project"
        )
    raise TypeError(
        f"{name} must be a gradient transformation, got {short_repr(value)}{hint}"
    )
