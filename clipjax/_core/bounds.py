"""Bounds: checked when they are known, and evaluated at each step."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from clipjax._core.messages import short_repr

Number: TypeAlias = float | np.number[Any] | jax.Array
Bound: TypeAlias = ArrayLike | optax.Schedule
Ord: TypeAlias = float | np.number[Any] | None


def is_real(value: Any) -> bool:
    """Return whether a value is a real number, or an array of real numbers."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        kinds = (jnp.floating, jnp.integer)
        return any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
    if isinstance(value, int):
        fits_a_float = abs(value) < 2**1000
        return fits_a_float and not isinstance(value, bool)
    return isinstance(value, float)


def as_float(value: Any) -> Any:
    """Return a real number or array as floats, if it is not JAX's.

    JAX would take whole numbers for int32, which wrap above 2^31.
    """
    if isinstance(value, np.ndarray | np.generic):
        is_whole = jnp.issubdtype(value.dtype, jnp.integer)
        return (
            value.astype(np.float64) if is_whole or value.dtype.itemsize > 8 else value
        )
    return float(value) if isinstance(value, int) else value


def as_constant(
    name: str, bound: Any, least: float = 0, *, scalar: bool = False
) -> Any:
    """Return a checked number or array, for functions that have no step."""
    if _is_schedule(bound):
        raise TypeError(
            f"{name} must be a number or an array here, not a schedule: got "
            f"{short_repr(bound)}"
        )
    return _checked(name, bound, least, scalar, "a number or an array")


def as_schedule(
    name: str, bound: Any, least: float = 0, *, scalar: bool = False
) -> Callable[[Any], Any]:
    """Check a bound, and return the function from the step to its value.

    The value is never below `least`, so that a schedule that falls below 0 clips to 0
    and flips no sign. NaN stays NaN.
    """
    if not _is_schedule(bound):
        forms = "a number, an array or a schedule"
        checked = _checked(name, bound, least, scalar, forms)
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


def _is_schedule(bound: Any) -> bool:
    """Return whether a bound is a function of the step.

    A projection is callable, too, and so are the gradients of an Equinox module, which
    fail for a step.
    """
    if not callable(bound) or isinstance(bound, optax.GradientTransformation):
        return False
    if jax.tree_util.all_leaves([bound]):
        return True
    try:
        jax.eval_shape(bound, jnp.zeros((), np.int32))
    except Exception:
        return False
    return True


def _checked(name: str, bound: Any, least: float, scalar: bool, forms: str) -> Any:
    """Return a number or an array, or raise an error that names it.

    Of a traced array the value is not known: it is raised to `least`, as what a
    schedule returns.
    """
    if not is_real(bound):
        is_tree = bound is not None and not jax.tree_util.all_leaves([bound])
        hint = (
            "; to clip a tree, call clipjax.functional.clip_by_global_norm(tree, "
            "max_norm) and the like, or a projection, as in max_norm(3.0)(params)"
        )
        raise TypeError(
            f"{name} must be {forms} of real numbers, got {short_repr(bound)}"
            f"{hint if is_tree else ''}"
        )
    if scalar:
        check_fits(name, bound, (), "the norm of all leaves")
    if isinstance(bound, jax.core.Tracer):
        return _at_least(bound, least)
    # An explicit transfer, which transfer guards allow.
    value = np.asarray(jax.device_get(bound), np.float64)
    if not (value >= least).all():
        wanted = "not be NaN" if np.isnan(value).any() else f"be at least {least:g}"
        raise ValueError(f"{name} must {wanted}, got {short_repr(bound)}")
    return as_float(bound)


def _at_least(bound: Any, least: float) -> Any:
    if least == -np.inf:
        return bound
    xp = jnp if isinstance(bound, jax.Array) else np  # NumPy's stay exact
    return xp.maximum(bound, least)


def fit_bound(name: str, bound: Any, x: jax.Array, of: Any) -> Any:
    """Return what broadcasts to norms or entries x: a scalar as it is, or an array."""
    if np.ndim(bound) == 0:
        return bound
    if x.ndim == 0 and np.size(bound) == 1:  # a norm whose axes were kept
        return jnp.reshape(bound, ())
    check_fits(name, bound, x.shape, of)
    return jnp.reshape(bound, (1,) * (x.ndim - np.ndim(bound)) + np.shape(bound))


def check_fits(name: str, bound: Any, shape: tuple[int, ...], of: Any) -> None:
    """Raise an error if an array does not broadcast to a shape."""
    given = np.shape(bound)
    pairs = zip(reversed(given), reversed(shape), strict=False)
    if len(given) > len(shape) or any(b not in (1, s) for b, s in pairs):
        wanted = f"broadcast to shape {tuple(shape)}" if shape else "be a scalar"
        hint = "" if shape else "; functions of trees take the tree first"
        raise ValueError(f"{name} must {wanted}, for {of}; got shape {given}{hint}")
