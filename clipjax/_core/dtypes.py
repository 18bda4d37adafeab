"""Arrays and their dtypes: in the user's mode of `jax_enable_x64` outside, and with 64 bits inside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.paths import leaves_with_paths, path_name

_P = ParamSpec("_P")
_R = TypeVar("_R")


def in_float64(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Trace `function` with 64-bit types allowed, so that norms can be float64 anywhere."""

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with jax.enable_x64(True):
            return function(*args, **kwargs)

    return wrapped


def wide(x: Any) -> jax.Array:
    """Convert to float64 (complex128), where 64-bit types are allowed."""
    x = jnp.asarray(x)
    return lax.convert_element_type(x, np.complex128 if jnp.iscomplexobj(x) else np.float64)


def norm_dtype(leaves: Sequence[Any]) -> np.dtype:
    """Return the dtype of norms for users: float64 if a leaf has 64 bits and JAX allows it, else float32."""
    dtype = np.dtype(np.float64 if any(is_wide(x.dtype) for x in leaves) else np.float32)
    return jax.dtypes.canonicalize_dtype(dtype)


def is_wide(dtype: Any) -> bool:
    """Whether a dtype is float64 or complex128."""
    return dtype in (np.float64, np.complex128)


def as_arrays(tree: Any) -> Any:
    """Convert Python numbers and 64-bit NumPy arrays to JAX arrays, with the dtypes of the user's mode.

    Under :func:`in_float64` these dtypes would not be known any more.

    Raises:
      TypeError: a leaf is not an array, such as the functions in an Equinox module.
    """

    def as_array(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray | np.generic):
            return leaf if leaf.dtype == jax.dtypes.canonicalize_dtype(leaf.dtype) else jnp.asarray(leaf)
        if is_array(leaf):
            return leaf
        if is_number(leaf):
            return jnp.asarray(leaf)
        path = next(path for path, other in leaves_with_paths(tree) if other is leaf)
        what = f"the leaf {path_name(path)!r}" if path else "the tree"
        raise TypeError(
            f"{what} is not an array but of type {type(leaf).__name__}: pass only the arrays, "
            "for an Equinox module eqx.filter(model, eqx.is_inexact_array)"
        )

    return jax.tree.map(as_array, tree)


def only_arrays(tree: Any) -> Any:
    """Replace leaves that are neither arrays nor numbers by None, such as functions in Equinox modules."""
    return as_arrays(jax.tree.map(lambda leaf: leaf if is_number(leaf) else None, tree))


def is_array(leaf: Any) -> bool:
    """Whether a leaf has a shape and a dtype, like an array; Flax layers have a dtype, but no shape."""
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def is_number(leaf: Any) -> bool:
    """Whether a leaf is an array or a Python number."""
    numbers = bool | int | float | complex
    return is_array(leaf) or hasattr(leaf, "__jax_array__") or isinstance(leaf, numbers)


def strong(x: Any) -> jax.Array:
    """Remove a weak type: under :func:`in_float64` a weak float32 plus 1.0 is a float64."""
    return jnp.asarray(x, x.dtype)


def weakly_typed_as(like: Any, x: jax.Array) -> jax.Array:
    """Give x the weak type of `like`, which arithmetic with a strongly typed bound removes."""
    if not getattr(like, "weak_type", False) or x.weak_type:
        return x
    return lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=True, sharding=None)
