"""Thresholds and bounds, checked when they are known and evaluated at each step."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clipjax._core.aliases import Step
from clipjax._core.leaves import Leaf, Leaves, check_patterns, of_each_leaf
from clipjax._core.messages import short_repr


class CheckedBound(NamedTuple):
    """A bound that was checked: one for all leaves, or one for each path pattern."""

    name: str  # of the argument
    least: float  # the smallest value it can have
    value: Any  # a number, an array or a schedule; or a mapping to these by pattern
    # The bound of a leaf that no pattern matches; None if such a leaf has no bound.
    other: float | None = None

    @property
    def is_by_path(self) -> bool:
        """Whether the bound differs by path."""
        return isinstance(self.value, Mapping)

    @property
    def scheduled(self) -> bool:
        """Whether the bound depends on the step."""
        return any(map(callable, self.by_name.values()))

    @property
    def by_name(self) -> dict[str, Any]:
        """The values, each by its name in errors, such as `bound['*/kernel']`."""
        if not self.is_by_path:
            return {self.name: self.value}
        return {f"{self.name}[{key!r}]": value for key, value in self.value.items()}

    def at(self, step: Step) -> Any:
        """Return the bound at a step, if it is the same for all leaves."""
        return _at(self.name, self.value, step, self.least)

    def given(self, leaves: Leaves) -> list[Any]:
        """Return for each leaf what the user gave, or None if no pattern matches it."""
        return of_each_leaf(self.name, self.value, leaves, None)

    def of(self, leaves: Leaves, step: Step) -> list[Any]:
        """Return the bound of each leaf at a step."""
        if not self.is_by_path:
            return [self.at(step)] * len(leaves.values)
        now = {
            pattern: _at(f"{self.name}[{pattern!r}]", value, step, self.least)
            for pattern, value in self.value.items()
        }
        return of_each_leaf(self.name, now, leaves, self.other)

    def fit(self, bound: Any, norms: jax.Array, leaf: Any) -> Any:
        """Return a bound that broadcasts to the norms, or elements, of a leaf."""
        return fit_bound(self.name, bound, norms, leaf)


def check_bound(
    name: str,
    bound: Any,
    least: float = 0,
    *,
    scalar: bool = False,
    forms: str = "a number, an array or a schedule",
) -> CheckedBound:
    """Check a bound that is a number, an array or a schedule.

    A known value below `least` raises an error. The value of a schedule, and a traced
    value, is raised to `least`, so that a schedule that falls below 0 clips to 0 and
    flips no sign. NaN stays NaN. A bound that is `scalar` has no shape. Errors
    say that it may have the `forms`.
    """
    if callable(bound):
        return CheckedBound(name, least, _checked_schedule(name, bound, scalar))
    return CheckedBound(name, least, _checked(name, bound, least, scalar, forms))


def check_bounds(
    name: str, bound: Any, least: float = 0, other: float | None = None
) -> CheckedBound:
    """Check a bound that may also be a mapping from path patterns to bounds."""
    if not isinstance(bound, Mapping):
        forms = "a number, an array, a schedule or a mapping"
        return check_bound(name, bound, least, forms=forms)._replace(other=other)
    values = {
        pattern: check_bound(f"{name}[{pattern!r}]", bound[pattern], least).value
        for pattern in check_patterns(name, (*bound,))
    }
    return CheckedBound(name, least, values, other)


def constant(name: str, bound: Any, least: float = 0, *, scalar: bool = False) -> Any:
    """Return a checked number or array, for functions that have no step."""
    if callable(bound) and not _is_tree(bound):
        raise TypeError(
            f"{name} must be a number or an array here, not a schedule: got "
            f"{short_repr(bound)}"
        )
    return _checked(name, bound, least, scalar, "a number or an array")


def is_real(value: Any) -> bool:
    """Return whether a value is a real number, or an array of real numbers."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        kinds = (jnp.floating, jnp.integer)
        return any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
    if isinstance(value, int):
        fits_a_float = abs(value) < 2**1000
        return fits_a_float and not isinstance(value, bool)
    return isinstance(value, float)


def check_is_wide(name: str, value: Any) -> None:
    """Raise for an array that `optax.inject_hyperparams` made too narrow.

    It gives hyperparameters the dtype of the leaves, which may have 8 bits or be
    complex.
    """
    if not isinstance(value, jax.Array):
        return
    is_narrow = jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize < 2
    if is_narrow or jnp.iscomplexobj(value):
        raise TypeError(
            f"{name} must be of real numbers of 16 bits or more, got {value.dtype}. "
            "optax.inject_hyperparams gives hyperparameters the dtype of the leaves: "
            "pass hyperparam_dtype=jnp.float32 to it"
        )


def in_float64(value: Any) -> np.ndarray:
    """Return known numbers, by an explicit transfer, which transfer guards allow."""
    return np.asarray(jax.device_get(value), np.float64)


def as_float(value: Any) -> Any:
    """Return a real number or NumPy array as floats; return an array of JAX as it is.

    JAX would take whole numbers for int32, which wraps above 2^31.
    """
    if isinstance(value, np.ndarray | np.generic):
        is_whole = jnp.issubdtype(value.dtype, jnp.integer)
        is_long = value.dtype.itemsize > 8
        return value.astype(np.float64) if is_whole or is_long else value
    return float(value) if isinstance(value, int) else value


def _is_tree(value: Any) -> bool:
    """Return whether a value is a tree of arrays, but not an array itself."""
    nodes = jax.tree.leaves(value)
    arrays = [x for x in nodes if isinstance(x, jax.Array | np.ndarray)]
    return any(x is not value for x in arrays)


def _checked_schedule(name: str, schedule: Any, scalar: bool) -> Any:
    """Return a schedule that checks each value that it returns."""
    # A tree of gradients may be callable, as that of a callable module is. A schedule
    # may hold numbers, but no arrays.
    leaves = jax.tree.leaves(schedule)
    if any(isinstance(x, jax.Array | np.ndarray) and x.ndim for x in leaves):
        raise _form_error(name, schedule, "a number, an array or a schedule")

    def at(step: Step) -> Any:
        value = schedule(step)
        if not is_real(value):
            raise TypeError(
                f"{name} must be a schedule that returns a number, but it returned "
                f"{short_repr(value)}"
            )
        if scalar:
            check_fits(name, value, (), "one norm")
        return value

    return at


def _at(name: str, value: Any, step: Step, least: float) -> Any:
    if not callable(value):
        return value
    if step is None:
        raise ValueError(
            f"{name} is a schedule and needs the step: pass the state that init "
            "returned to update, or step= to .apply of a projection and to "
            "violations, as in max_norm(schedule).apply(params, step=step)"
        )
    return _at_least(as_float(value(step)), least)


def _form_error(name: str, bound: Any, forms: str) -> TypeError:
    hint = (
        "; a tree comes first, and the bound second, in functions that clip a tree, as "
        "in clipjax.functional.clip_by_global_norm(tree, max_norm), and a projection "
        "takes the tree in .apply, as in max_norm(3.0).apply(params)"
    )
    return TypeError(
        f"{name} must be {forms} of real numbers, got {short_repr(bound)}"
        f"{hint if _is_tree(bound) else ''}"
    )


def _checked(name: str, bound: Any, least: float, scalar: bool, forms: str) -> Any:
    """Return a number or an array, or raise an error that names it.

    The value of a traced array is not known: the array is raised to `least`, as the
    values of schedules are.
    """
    check_is_wide(name, bound)
    if not is_real(bound):
        raise _form_error(name, bound, forms)
    if scalar:
        check_fits(name, bound, (), "one norm")
    if isinstance(bound, jax.core.Tracer):
        return _at_least(bound, least)
    value = in_float64(bound)
    if not (value >= least).all():
        wanted = "not be NaN" if np.isnan(value).any() else f"be at least {least:g}"
        raise ValueError(f"{name} must {wanted}, got {short_repr(bound)}")
    return as_float(bound)


def _at_least(bound: Any, least: float) -> Any:
    if least == -np.inf:
        return bound
    xp = jnp if isinstance(bound, jax.Array) else np  # NumPy's floats stay exact
    return xp.maximum(bound, least)


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
    """Raise if `low` is above `high`, or if their shapes do not fit together.

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
    if isinstance(low, jax.core.Tracer) or isinstance(high, jax.core.Tracer):
        return
    if np.any(in_float64(low) > in_float64(high)):
        where = "" if of is None else f" for {of}"
        raise ValueError(
            f"low must not be above high{where}, got low={short_repr(low)}, "
            f"high={short_repr(high)}"
        )
