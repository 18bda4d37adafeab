"""Trees of numbers: dicts from a name, which ends with the dtype, to an array."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = ("float32", "bfloat16", "float16")
SHAPES = {"a": (3, 5), "c": (16384, 2)}


@functools.cache
def _entries(
    kind: str, exponent: int, shape: tuple[int, ...], dtype: str, seed: int
) -> jax.Array:
    rng = np.random.default_rng([seed, *shape, *dtype.encode()])
    if kind == "constant":
        x = np.broadcast_to(rng.uniform(1, 2, size=shape[-1:]), shape)
    elif kind == "inside":
        x = rng.uniform(0.5, 1, size=shape) * rng.choice([-1, 1], size=shape)
    else:
        x = rng.normal(size=shape)
        x = np.exp(x) if kind == "lognormal" else x
    scale = 0.0 if dtype == "float16" and not 0 <= exponent <= 6 else 2.0**exponent
    return jnp.asarray(x * scale, jnp.dtype(dtype))


def draw(
    kind: str,
    exponent: int,
    shapes: dict[str, Any],
    dtypes: Any = DTYPES,
    seed: int = 0,
) -> dict[str, Any]:
    """Draw entries of size 2**exponent; zeros in float16 where results would be
    subnormal or infinite there.
    """
    return {
        f"{name}_{dtype}": _entries(kind, exponent, shape, dtype, seed)
        for dtype in dtypes
        for name, shape in shapes.items()
    }


def exact(tree: Any) -> dict[str, np.ndarray]:
    """Return a tree in float64, or complex128."""
    return {
        k: np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64)
        for k, x in tree.items()
    }


def bits(x: Any) -> bytes:
    """Return an array's memory, where -0 and 0 differ and NaN equals itself."""
    return np.asarray(x).tobytes()


def changed(before: Any, after: Any) -> list[str]:
    """Name the leaves whose bits, shape or dtype changed."""
    return [
        k
        for k in before
        if bits(before[k]) != bits(after[k])
        or before[k].shape != after[k].shape
        or before[k].dtype != after[k].dtype
    ]


def fan_in_or_all(path: Any, leaf: Any) -> tuple[int, ...] | None:
    """Reduce all axes but the last, and all of a vector."""
    return tuple(range(leaf.ndim - 1)) or None


# Modules within modules, two dtypes, and a leaf without a norm.
NESTED = {
    "encoder": {
        "layer_0": {"w": np.array([[3.0, 4.0]], np.float32)},
        "layer_1": {"w": np.array([[6.0, 8.0]], np.float32)},
    },
    "head": {"w": np.full((2, 2), 1.5, np.float32), "b": np.array([2.0], np.float16)},
    "count": np.array([7]),
}
