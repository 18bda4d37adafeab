"""The trees that are trained: parameters, gradients, and bounds that both exceed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


class Limits(NamedTuple):
    """Bounds far below the norms of a :class:`Problem`, so that every one of them is at work."""

    value: float
    rms: float
    leaf_norm: float
    global_norm: float
    radius: float


class Problem(NamedTuple):
    """One tree to train, in one dtype."""

    name: str
    dtype: str
    params: dict[str, jax.Array]
    grads: dict[str, jax.Array]
    limits: Limits

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(leaf.size for leaf in self.params.values())

    @property
    def nbytes(self) -> int:
        """The bytes of the parameters."""
        return sum(leaf.nbytes for leaf in self.params.values())


def big() -> Shapes:
    """8 matrices of 2048 x 2048: 134 MB in float32, larger than any cache."""
    return {f"kernel_{i}": (2048, 2048) for i in range(8)}


def transformer(layers: int = 12, width: int = 512) -> Shapes:
    """Attention and MLP blocks: 12 leaves a layer, of which 6 are kernels."""
    block: Shapes = {
        **{f"attention/{name}": (width, width) for name in ("query", "key", "value", "out")},
        "mlp/up/kernel": (width, 4 * width),
        "mlp/up/bias": (4 * width,),
        "mlp/down/kernel": (4 * width, width),
        "mlp/down/bias": (width,),
        **{f"norm_{i}/{name}": (width,) for i in range(2) for name in ("scale", "bias")},
    }
    return {f"layer_{i:02}/{name}": shape for i in range(layers) for name, shape in block.items()}


def small() -> Shapes:
    """500 matrices of 16 x 16: nothing but overhead."""
    return square(500, 16)


def square(leaves: int, width: int) -> Shapes:
    """Equal square matrices."""
    return {f"kernel_{i:04}": (width, width) for i in range(leaves)}


TREES: Mapping[str, Callable[[], Shapes]] = {"big": big, "transformer": transformer, "small": small}


def make(name: str, shapes: Shapes, dtype: str) -> Problem:
    """Draw parameters with units of norm 1 and gradients of standard deviation 1."""
    fan_in = {key: shape[0] if len(shape) > 1 else 1 for key, shape in shapes.items()}
    params = {
        key: _draw(i, shape, dtype, fan_in[key] ** -0.5) for i, (key, shape) in enumerate(shapes.items())
    }
    grads = {key: _draw(-1 - i, shape, dtype, 1.0) for i, (key, shape) in enumerate(shapes.items())}
    sizes = [math.prod(shape) for shape in shapes.values()]
    limits = Limits(
        value=0.5,
        rms=0.5,
        leaf_norm=0.5 * math.sqrt(min(sizes)),
        global_norm=0.5 * math.sqrt(sum(sizes)),
        radius=0.5,
    )
    return Problem(name, dtype, params, grads, limits)


def _draw(seed: int, shape: tuple[int, ...], dtype: str, scale: float) -> Any:
    return _normal(jax.random.key(seed % 2**31), shape, jnp.dtype(dtype), scale)


@jax.jit(static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any, scale: float) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)
