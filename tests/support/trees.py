"""Trees to test with, and ways to compare them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}


def random_tree(seed: int = 0, dtype: Any = np.float32, scale: float = 1.0) -> dict[str, Any]:
    """A small tree as of a model: kernels, a bias, a scalar."""
    rng = np.random.default_rng(seed)

    def leaf(*shape: int) -> jax.Array:
        return jnp.asarray((scale * rng.standard_normal(shape)).astype(dtype))

    return {
        "dense": {"bias": leaf(3), "kernel": leaf(4, 3)},
        "scale": leaf(),
    }


def bits(tree: Any) -> Any:
    """The leaves as bit patterns, so that -0.0 and NaN compare, with all that a leaf's type says."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        return (array.shape, str(array.dtype), array.tobytes())

    return jax.tree.map(of, tree)


def same_bits(a: Any, b: Any) -> bool:
    return bits(a) == bits(b)


def within_one_ulp(a: Any, b: Any) -> bool:
    """Whether two arrays agree to one unit in the last place, entry by entry."""
    a, b = np.asarray(a), np.asarray(b)
    return bool(np.all(np.abs(a.astype(np.float64) - b) <= np.spacing(np.maximum(np.abs(a), np.abs(b)))))


def avals(tree: Any) -> Any:
    """Structure, shapes, dtypes and weak types."""

    def of(leaf: Any) -> Any:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None:
            leaf = jnp.asarray(leaf)
        return (np.shape(leaf), str(leaf.dtype), bool(getattr(leaf, "weak_type", False)))

    return jax.tree.structure(tree), [of(leaf) for leaf in jax.tree.leaves(tree)]


def floats(tree: Any) -> list[np.ndarray]:
    """The real and complex leaves as float64 or complex128 arrays."""
    found = []
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact):
            array = np.asarray(leaf)
            found.append(array.astype(np.complex128 if np.iscomplexobj(array) else np.float64))
    return found


def flat(tree: Any) -> np.ndarray:
    parts = [x.ravel() for x in floats(tree)]
    return np.concatenate(parts) if parts else np.zeros(0)
