"""Layers that change the gradient in the backward pass: what their tests share, oracles in NumPy float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from tests.support.oracles import exact_tree_norm
from tests.support.trees import DTYPES

MATRIX = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


def by_column(path: str, leaf: Any) -> int | None:
    """The axes of the units: the columns of a matrix, the whole of a vector or a scalar."""
    return 0 if leaf.ndim else None


CLIPS: dict[str, Callable[..., Any]] = {
    "value": lambda x, bound=0.5, **options: clipjax.clip_gradient_by_value(x, -bound, bound, **options),
    "norm": lambda x, bound=0.5, **options: clipjax.clip_gradient_by_norm(x, bound, **options),
    "units": lambda x, bound=0.5, **options: clipjax.clip_gradient_by_norm(x, bound, by_column, **options),
    "global": lambda x, bound=0.5, **options: clipjax.clip_gradient_by_global_norm(x, bound, **options),
}
LAYERS = CLIPS | {
    "scale": lambda x: clipjax.scale_gradient(x, 0.5),
    "replace": lambda x: clipjax.replace_gradient(lambda y: y, lambda y: jax.tree.map(lambda z: z, y))(x),
}
each_clip = pytest.mark.parametrize("name", CLIPS)
each_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
each_dtype = pytest.mark.parametrize("dtype", [*DTYPES.values(), np.complex64], ids=[*DTYPES, "complex64"])


def pulled(layer: Callable[[Any], Any], cotangents: Any, primals: Any = None) -> Any:
    """What the layer makes of these cotangents; a call inside a jitted function."""
    return jax.vjp(layer, cotangents if primals is None else primals)[1](cotangents)[0]


@functools.cache
def back(layer: Callable[[Any], Any]) -> Callable[..., Any]:
    """The same compiled: a function of the cotangents, and of the primals if these are others."""
    return jax.jit(functools.partial(pulled, layer))


def weighted_sum(weights: Any, tree: Any) -> Any:
    """A loss whose gradient in `tree` is `weights`."""
    pairs = zip(jax.tree.leaves(weights), jax.tree.leaves(tree), strict=True)
    return sum(jnp.sum(a * b) for a, b in pairs)


def small_tree(seed: int) -> dict[str, Any]:
    """A matrix and a scalar, in NumPy."""
    rng = np.random.default_rng(seed)
    return {
        "kernel": rng.standard_normal((4, 3)).astype(np.float32),
        "scale": np.float32(rng.standard_normal()),
    }


def filled(shapes: Any, seed: int = 0) -> Any:
    """Arrays of these shapes: of `jax.eval_shape(model.init, …)`, without compiling the initializers."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), shapes)


def expected(name: str, tree: Any, bound: float = 0.5) -> Any:
    """The clip of a whole tree in float64, written out."""

    def shrunk(x: np.ndarray, norm: Any) -> np.ndarray:
        return x * np.minimum(1, bound / np.maximum(norm, 1e-300))

    tree = jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
    if name == "value":
        return jax.tree.map(lambda x: np.clip(x, -bound, bound), tree)
    if name == "global":
        norm = exact_tree_norm(tree)
        return jax.tree.map(lambda x: shrunk(x, norm), tree)
    if name == "norm":
        return jax.tree.map(lambda x: shrunk(x, np.linalg.norm(x)), tree)
    return jax.tree.map(
        lambda x: shrunk(x, np.linalg.norm(x, axis=0, keepdims=True) if x.ndim else abs(x)), tree
    )


def jacobian_of(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """By central differences in float64; the second axis is that of `x`."""
    steps = 1e-6 * np.eye(len(x))
    return np.stack([(function(x + d) - function(x - d)) / 2e-6 for d in steps], axis=1)


def close(got: Any, want: Any, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, want)
