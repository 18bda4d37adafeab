"""The trees that are trained: units of norm 1, gradients of standard deviation 1."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models import MODELS, Shapes


def squares(leaves: int, width: int) -> Shapes:
    """Return equal square matrices."""
    return {f"kernel_{i:04}": (width, width) for i in range(leaves)}


def gpt(layers: int = 13, width: int = 384, words: int = 4096) -> Shapes:
    """Return the leaves of a small GPT: six a layer, an embedding and a scale."""
    block: Shapes = {
        "attention/qkv": (width, 3 * width),
        "attention/out": (width, width),
        "mlp/up": (width, 4 * width),
        "mlp/down": (4 * width, width),
        "norm_1": (width,),
        "norm_2": (width,),
    }
    stack = {
        f"layer_{i:02}/{name}": shape
        for i in range(layers)
        for name, shape in block.items()
    }
    return {**stack, "embedding": (words, width), "norm": (width,)}


def heads(layers: int = 12, width: int = 1024, count: int = 16) -> Shapes:
    """Return the kernels of attention layers."""
    kernel = (width, count, width // count)
    return {
        f"layer_{i:02}/{name}/kernel": kernel
        for i in range(layers)
        for name in ("query", "key", "value")
    }


TREES: dict[str, Callable[[], Shapes]] = {
    "big": lambda: squares(8, 2048),  # larger than any cache
    "gpt": gpt,  # 25 million parameters in 80 leaves
    "small": lambda: squares(300, 16),  # nothing but overhead
    "thousand": lambda: squares(1000, 32),
    "many": lambda: squares(3000, 32),
    # Larger than a TPU's own memory, which flatters smaller trees.
    "huge": lambda: squares(12, 4096),
    "wide": lambda: gpt(12, 1024, 4096),
    "matrix": lambda: squares(1, 1024),
    "heads": heads,
    "quick": lambda: gpt(2, 128, 512),
    # Stacked layers of 1 GB, larger than any chip's own memory.
    "stacked": lambda: {
        "up": (8, 4096, 8192),
        "down": (8, 8192, 4096),
        "norm": (4096,),
    },
    **{name: lambda model=model: model.shapes for name, model in MODELS.items()},
}


def shapes_of(
    tree: str,
    dtype: Any,
    place: Callable[[str, tuple[int, ...]], Any] = lambda *_: None,
) -> Any:
    """Return the tree without values; `place(name, shape)` is the sharding of each."""
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place(name, shape))
        for name, shape in TREES[tree]().items()
    }


def inputs_of(tree: str, params: Any) -> Any:
    """Return what a step gets besides parameters and state: gradients, or a batch."""
    if tree not in MODELS:
        return params
    place = next(iter(params.values())).sharding
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        for name, x in MODELS[tree].batch.items()
    }


def values_of(tree: str, dtype: Any) -> tuple[Any, Any]:
    """Return parameters, and gradients or a batch."""
    rng, params, grads = np.random.default_rng(0), {}, {}
    for name, shape in TREES[tree]().items():
        unit = math.prod(shape[:-1]) or 1
        params[name] = jnp.asarray(
            rng.standard_normal(shape, np.float32) * unit**-0.5, dtype
        )
        grads[name] = jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
    if tree in MODELS:
        grads = {
            name: jnp.asarray(rng.integers(0, 10, x.shape), x.dtype)
            for name, x in MODELS[tree].batch.items()
        }
    return params, grads
