"""Define the data and the model of sharded.py: sums, and a transformer with sharding annotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

CHARACTERS = "0123456789+=\n"
VOCABULARY = PLACES = 16  # more than needed, so that they split evenly over devices
ANSWER = len("47+85=")  # no model can predict the characters before the answer


def sums() -> np.ndarray:
    """Return every sum of two numbers below 100, in random order, as characters `(10000, 10)`."""
    lines = [f"{a:02}+{b:02}={a + b:03}\n" for a in range(100) for b in range(100)]
    rows = np.array([[CHARACTERS.index(character) for character in line] for line in lines], np.int32)
    # The order is the same for every seed, so that seeds can be compared.
    return np.random.default_rng(0).permutation(rows)


def split(init: Callable[..., jax.Array], *axes: str | None) -> Callable[..., jax.Array]:
    """Annotate an initializer with the mesh axes over which its parameter is split."""
    return nnx.with_partitioning(init, axes)


class Block(nnx.Module):
    """Attention and two dense layers, each split over "model" by its outputs or by its inputs."""

    def __init__(self, width: int, heads: int, dtype: Any, rngs: nnx.Rngs) -> None:
        """Draw the weights."""
        init = jax.nn.initializers.lecun_normal()
        like: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype, "use_bias": False, "rngs": rngs}
        self.norm_1, self.norm_2 = (_norm(width, dtype, rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(
            heads,
            width,
            kernel_init=split(init, "data", "model", None),
            out_kernel_init=split(init, "model", None, "data"),
            decode=False,
            **like,
        )
        self.wide = nnx.Linear(width, 4 * width, kernel_init=split(init, "data", "model"), **like)
        self.narrow = nnx.Linear(4 * width, width, kernel_init=split(init, "model", "data"), **like)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Map `(batch, places, width)` to the same."""
        x = x + _by_example(self.attention(self.norm_1(x), mask=mask))
        return x + _by_example(self.narrow(nnx.gelu(self.wide(self.norm_2(x)))))


class Model(nnx.Module):
    """A transformer that predicts the next character."""

    def __init__(self, width: int, heads: int, layers: int, dtype: Any, rngs: nnx.Rngs) -> None:
        """Draw the weights."""
        like: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        table = split(jax.nn.initializers.normal(0.1), "model", "data")
        self.token = nnx.Embed(VOCABULARY, width, embedding_init=table, **like)
        self.place = nnx.Embed(PLACES, width, embedding_init=table, **like)
        self.blocks = nnx.List([Block(width, heads, dtype, rngs) for _ in range(layers)])
        self.norm = _norm(width, dtype, rngs)
        init = split(jax.nn.initializers.lecun_normal(), "data", "model")
        self.head = nnx.Linear(width, VOCABULARY, kernel_init=init, use_bias=False, **like)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map characters `(batch, places)` to float32 logits `(batch, places, VOCABULARY)`."""
        x = _by_example(self.token(tokens) + self.place(jnp.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x, nnx.make_causal_mask(tokens))
        return self.head(self.norm(x)).astype(jnp.float32)


def _norm(width: int, dtype: Any, rngs: nnx.Rngs) -> nnx.RMSNorm:
    scale_init = split(jax.nn.initializers.ones, "data")
    return nnx.RMSNorm(width, dtype=dtype, param_dtype=dtype, scale_init=scale_init, rngs=rngs)


def _by_example(x: jax.Array) -> jax.Array:
    """Keep activations split by example, so that the weights are gathered instead, layer by layer."""
    return jax.lax.with_sharding_constraint(x, P("data"))
