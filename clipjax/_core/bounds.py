"""Arguments that are numbers, checked when they are known: bounds, counts, orders.

A bound may also be a schedule, or a mapping from path patterns, and is evaluated at
each step.
"""

import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clipjax._core.aliases import Step
from clipjax._core.leaves import Leaf, Leaves, check_patterns, of_each_leaf, short_repr


def is_real(value: Any) -> bool:
    """Return whether a value is a real number, or an array of real numbers."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        is_wide = value.dtype.itemsize > 1 or value.dtype.kind in "iu"
        return is_wide and (value.dtype.kind in "iuf" or value.dtype == jnp.bfloat16)
    if type(value) is int:
        return abs(value) <= sys.float_info.max
    return isinstance(value, float)


def number(
    name: str, value: Any, interval: str, *, scalar: bool = True, more: str = ""
) -> Any:
    """Return a real number in an interval, such as "[0, 1)", or raise an error.

    If it need not be `scalar`, it may be an array of such numbers. Errors say what
    `more` it may be. Whole numbers of Python and NumPy become floats, since JAX would
    take them for int32, which wraps above 2^31. A traced number is raised to the lower
    end of the interval, so that a negative threshold clips to 0 and flips no sign.
    """
    if not is_real(value) or (scalar and np.ndim(value)):
        form = "a number" if scalar else "a number or an array"
        raise TypeError(
            f"{name} must be {form} in {interval}{more}, got {short_repr(value)}"
        )
    low, high = map(float, interval[1:-1].split(","))
    if isinstance(value, jax.core.Tracer):
        return _at_least(_as_float(value), low)
    # The transfer is explicit, which transfer guards allow.
    known = np.asarray(jax.device_get(value), np.float64)
    above = low < known if interval[0] == "(" else low <= known
    below = known < high if interval[-1] == ")" else known <= high
    if not np.all(above & below):
        raise ValueError(f"{name} must be in {interval}, got {short_repr(value)}")
    return _as_float(value)


def _as_float(value: Any) -> Any:
    if np.ndim(value) == 0 and not isinstance(value, jax.Array):
        return float(value)  # NumPy's float64 would widen float32 where x64 is enabled
    # Python's float is float64 to NumPy, and what is usual to JAX.
    return value.astype(float) if value.dtype.kind in "iu" else value


def _at_least(value: Any, low: float) -> Any:
    if low == -np.inf:
        return value
    xp = jnp if isinstance(value, jax.Array) else np  # NumPy's floats stay exact
    return xp.maximum(value, low)


class CheckedBound(NamedTuple):
    """A bound that was checked: one for all leaves, or one for each path pattern."""

    name: str  # of the argument
    low: float  # the smallest value it can have
    value: Any  # a number, an array or a schedule; or a mapping to these by pattern
    # The bound of a leaf that no pattern matches; None if such a leaf has no bound.
    other: float | None = None
    is_scalar: bool = False

    @property
    def is_by_path(self) -> bool:
        """Whether the bound differs by path."""
        return isinstance(self.value, Mapping)

    @property
    def scheduled(self) -> bool:
        """Whether the bound depends on the step."""
        values = self.value.values() if self.is_by_path else [self.value]
        return any(map(callable, values))

    def at(self, step: Step) -> Any:
        """Return the bound at a step, if it is the same for all leaves."""
        return self._at(self.value, step)

    def given(self, leaves: Leaves) -> list[Any]:
        """Return for each leaf what the user gave, or None if no pattern matches it."""
        return of_each_leaf(self.name, self.value, leaves, None)

    def of(self, leaves: Leaves, step: Step) -> list[Any]:
        """Return the bound of each leaf at a step."""
        if not self.is_by_path:
            return [self.at(step)] * len(leaves.values)
        now = {pattern: self._at(value, step) for pattern, value in self.value.items()}
        return of_each_leaf(self.name, now, leaves, self.other)

    def fit(self, bound: Any, norms: jax.Array, leaf: Any) -> Any:
        """Return a bound that broadcasts to the norms, or elements, of a leaf."""
        return fit_bound(self.name, bound, norms, leaf)

    def _at(self, value: Any, step: Step) -> Any:
        if not callable(value):
            return value
        if step is None:
            raise ValueError(
                f"{self.name} is a schedule and needs the step: pass the state that "
                "init returned to update, or step= to .apply of a projection and to "
                "violations, as in max_norm(schedule).apply(params, step=step)"
            )
        now = value(step)
        if not is_real(now) or (self.is_scalar and np.ndim(now)):
            raise TypeError(
                f"{self.name} must be a schedule that returns a number, but it "
                f"returned {short_repr(now)}"
            )
        return _at_least(_as_float(now), self.low)


def check_bound(
    name: str, bound: Any, interval: str = "[0, inf]", *, scalar: bool = False
) -> CheckedBound:
    """Check a bound that is a number, an array or a schedule.

    A schedule is raised to the lower end of the interval, as traced numbers are. A
    bound that is `scalar` has no shape.
    """
    low = float(interval[1:].split(",")[0])
    if not callable(bound):
        bound = number(name, bound, interval, scalar=scalar, more=", or a schedule")
    return CheckedBound(name, low, bound, is_scalar=scalar)


def check_bounds(
    name: str, bound: Any, interval: str = "[0, inf]", other: float | None = None
) -> CheckedBound:
    """Check a bound that may also be a mapping from path patterns to bounds."""
    if not isinstance(bound, Mapping):
        return check_bound(name, bound, interval)._replace(other=other)
    checked = {
        pattern: check_bound(f"{name}[{pattern!r}]", bound[pattern], interval)
        for pattern in check_patterns(name, (*bound,))
    }
    values = {pattern: each.value for pattern, each in checked.items()}
    low = float(interval[1:].split(",")[0])
    return CheckedBound(name, low, values, other)


def are_given(bounds: Sequence[CheckedBound], leaves: Leaves) -> list[bool]:
    """Return for each leaf whether one of several bounds is given for it."""
    of_leaves = zip(*(each.given(leaves) for each in bounds), strict=True)
    return [any(value is not None for value in values) for values in of_leaves]


def fit_bound(name: str, bound: Any, x: jax.Array, of: Any) -> Any:
    """Return a bound that broadcasts to norms or elements x: a scalar, or an array."""
    if np.ndim(bound) == 0:
        return bound
    if x.ndim == 0 and np.size(bound) == 1:  # a norm whose axes were kept
        return jnp.reshape(bound, ())
    check_fits(name, bound, x.shape, of)
    return jnp.reshape(bound, (1,) * (x.ndim - np.ndim(bound)) + np.shape(bound))


def check_fits(name: str, bound: Any, shape: tuple[int, ...], of: Any) -> None:
    """Raise if an array does not broadcast to a shape."""
    given = np.shape(bound)
    pairs = zip(reversed(given), reversed(shape), strict=False)
    if len(given) > len(shape) or any(b not in (1, s) for b, s in pairs):
        wanted = f"broadcast to shape {tuple(shape)}" if shape else "be a scalar"
        raise ValueError(f"{name} must {wanted}, for {of}; got shape {given}")


def check_order(low: Any, high: Any, of: Leaf | None = None) -> None:
    """Raise if a known `low` is above `high`, or if their shapes do not fit together.

    Schedules, traced numbers and mappings from path patterns are not compared here.
    """
    if any(callable(value) or isinstance(value, Mapping) for value in (low, high)):
        return
    shapes = np.shape(low), np.shape(high)
    try:
        np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"low and high must broadcast to one shape, got {shapes[0]} and {shapes[1]}"
        ) from None
    if any(isinstance(value, jax.core.Tracer) for value in (low, high)):
        return
    if np.any(np.greater(*jax.device_get((low, high)))):
        where = "" if of is None else f" for {of}"
        raise ValueError(
            f"low must not be above high{where}, got low={short_repr(low)}, "
            f"high={short_repr(high)}"
        )


def check_order_by_path(
    low: CheckedBound, high: CheckedBound, leaves: Leaves, chosen: Sequence[bool]
) -> None:
    """Raise as :func:`check_order`, where mappings give the bounds of leaves."""
    if not (low.is_by_path or high.is_by_path):
        return
    rows = zip(leaves.each, low.given(leaves), high.given(leaves), chosen, strict=True)
    for leaf, lowest, highest, is_chosen in rows:
        if is_chosen and lowest is not None and highest is not None:
            check_order(lowest, highest, leaf)


def check_count(name: str, value: Any, least: int, *, static: bool = False) -> Any:
    """Return a whole number of at least `least`.

    A `static` number is the size of something, so that it cannot be traced.
    """
    if isinstance(value, jax.Array) and static:  # a traced one fails under jit only
        raise traced_error(name, value)
    if isinstance(value, jax.core.Tracer):
        return value
    try:
        count = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = None
    if count is None:
        raise TypeError(f"{name} must be an int, got {short_repr(value)}")
    if not least <= count < 2**31:
        raise ValueError(
            f"{name} must be a whole number in [{least}, 2**31), got "
            f"{short_repr(value)}"
        )
    return count


def check_ord(ord: Any) -> float:
    """Return the order of a norm, 2 for None.

    None is the default, since `optax.inject_hyperparams` would trace a number.
    """
    if ord is None:
        return 2.0
    if isinstance(ord, jax.Array):
        raise traced_error("ord", ord)
    return float(number("ord", ord, "[1, inf]"))


def check_word(name: str, value: Any, words: Sequence[str]) -> None:
    """Raise if a value is not one of a list of words."""
    if not (isinstance(value, str) and value in words):
        *others, last = map(repr, words)
        raise ValueError(
            f"{name} must be {', '.join(others)} or {last}, got {short_repr(value)}"
        )


def check_flag(name: str, value: Any) -> None:
    """Raise if a value is no bool: the text "False" would count as true."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a bool, got {short_repr(value)}")


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
    """Return a gradient transformation, or say what to write instead of the value."""
    if isinstance(value, optax.GradientTransformation):
        return value
    hint = ""
    if isinstance(value, optax.MultiSteps):
        hint = ": write .gradient_transformation() after it"
    elif callable(value):
        hint = (
            ": call it, as in optax.adam(1e-3); a function of the weights goes into "
            "clipjax.project"
        )
    elif name == "clip" and is_real(value):
        hint = f": write clipjax.clip_by_global_norm({value})"
    raise TypeError(
        f"{name} must be a gradient transformation, got {short_repr(value)}{hint}"
    )


def traced_error(name: str, value: Any) -> TypeError:
    """Return the error for a traced number on which the program itself depends."""
    return TypeError(
        f"{name} must be known before compiling: pass a Python value; with "
        "optax.inject_hyperparams, name it in static_args; got "
        f"{short_repr(value)}"
    )
