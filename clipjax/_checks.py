"""What arguments may be that are neither bounds nor axes."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from clipjax._core import bounds
from clipjax._core.messages import short_repr, traced_error


def check_number(name: str, value: Any, interval: str) -> Any:
    """Return a number in an interval, which is written as in "[0, 1)"."""
    if not bounds.is_real(value) or np.ndim(value):
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
    return bounds.as_float(value)


def check_count(name: str, value: Any, least: int, *, static: bool = False) -> Any:
    """Return a whole number of at least `least`.

    A `static` one is the size of something, so that it cannot be traced.
    """
    if isinstance(value, jax.Array) and static:  # a traced one fails under jit only
        raise traced_error(name, value)
    if isinstance(value, jax.core.Tracer):
        return value
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be a whole number, got {short_repr(value)}"
        ) from None
    if isinstance(value, bool) or not least <= number < 2**31:
        wanted = "below 2**31" if number >= 2**31 else f"of at least {least}"
        raise ValueError(
            f"{name} must be a whole number {wanted}, got {short_repr(value)}"
        )
    return number


def check_order(low: Any, high: Any, of: Any = None) -> None:
    """Raise an error if `low` is above `high`, or their shapes do not fit together.

    Schedules, traced numbers and mappings from path patterns are not compared here.
    """
    if any(callable(limit) or isinstance(limit, Mapping) for limit in (low, high)):
        return
    shapes = np.shape(low), np.shape(high)
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"low and high must broadcast to one shape, got {shapes[0]} and {shapes[1]}"
        ) from None
    if isinstance(low, jax.core.Tracer) or isinstance(high, jax.core.Tracer):
        return
    if np.any(np.asarray(low, np.float64) > np.asarray(high, np.float64)):
        where = "" if of is None else f" for {of}"
        raise ValueError(
            f"low must not be above high{where}, got low={short_repr(low)}, "
            f"high={short_repr(high)}"
        )


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
    """Raise an error if a value is not one of a list of words."""
    if not (isinstance(value, str) and value in words):
        *others, last = map(repr, words)
        raise ValueError(
            f"{name} must be {', '.join(others)} or {last}, got {short_repr(value)}"
        )


def check_patterns(argument: str, patterns: Any) -> tuple[str, ...]:
    """Return one pattern or several as a tuple."""
    each = (patterns,) if isinstance(patterns, str) else patterns
    is_sequence = isinstance(each, Sequence) and len(each) > 0
    if not is_sequence or not all(isinstance(pattern, str) for pattern in each):
        raise TypeError(
            f"{argument} must be one or several path patterns, got {patterns!r}"
        )
    return tuple(each)


def as_list(value: Any) -> list[Any]:
    """Return the elements of a list or a plain tuple, or one value.

    Gradient transformations are tuples, too.
    """
    return list(value) if type(value) in (list, tuple) else [value]


def check_transformation(name: str, value: Any) -> Any:
    """Return a gradient transformation, or say what the value is instead."""
    if isinstance(value, optax.GradientTransformation):
        return value
    hint = ""
    if isinstance(value, optax.MultiSteps):
        hint = ": write .gradient_transformation() after it"
    elif str(getattr(value, "__module__", "")).startswith(("clipjax", "optax")):
        hint = f": call it, as in {getattr(value, '__name__', 'it')}(...)"
    elif callable(value):
        hint = "; functions of weights go into clipjax.project"
    raise TypeError(
        f"{name} must be a gradient transformation, got {short_repr(value)}{hint}"
    )
