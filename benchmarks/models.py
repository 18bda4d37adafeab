"""Models for whole steps, with their forward and backward passes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Shapes = dict[str, tuple[int, ...]]


class Model(NamedTuple):
    """What is trained, on what."""

    shapes: Shapes
    batch: dict[str, jax.ShapeDtypeStruct]
    loss: Callable[[Any, Any], jax.Array]  # of parameters and a batch


def decoder(layers: int, width: int, rows: int, length: int, words: int) -> Model:
    """Return a transformer of stacked layers: a scan with remat, bfloat16 inside."""
    heads = width // 64
    shapes: Shapes = {
        "embedding": (words, width),
        "qkv": (layers, width, 3 * width),
        "out": (layers, width, width),
        "up": (layers, width, 4 * width),
        "down": (layers, 4 * width, width),
        "norm_1": (layers, width),
        "norm_2": (layers, width),
        "norm": (width,),
    }

    def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        size = jnp.mean(wide**2, axis=-1, keepdims=True)
        return (wide * lax.rsqrt(size + 1e-6)).astype(x.dtype) * scale.astype(x.dtype)

    @jax.checkpoint
    def block(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        w = {name: each.astype(jnp.bfloat16) for name, each in weights.items()}
        qkv = normed(x, w["norm_1"]) @ w["qkv"]
        query, key, value = jnp.split(qkv.reshape(rows, length, 3 * heads, 64), 3, 2)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + mixed.reshape(x.shape) @ w["out"]
        inner = jax.nn.gelu(normed(x, w["norm_2"]) @ w["up"])
        return x + inner @ w["down"], None

    def loss(params: Any, batch: Any) -> jax.Array:
        stacked = {
            name: x for name, x in params.items() if name not in ("embedding", "norm")
        }
        table = params["embedding"].astype(jnp.bfloat16)
        x, _ = lax.scan(block, table[batch["tokens"]], stacked)
        logits = (normed(x, params["norm"]) @ table.T).astype(jnp.float32)
        logs = jax.nn.log_softmax(logits[:, :-1])
        picked = jnp.take_along_axis(logs, batch["tokens"][:, 1:, None], axis=-1)
        return -jnp.mean(picked)

    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return Model(shapes, {"tokens": tokens}, loss)


def convnet(width: int, rows: int, pixels: int) -> Model:
    """Return a convolutional net of three layers, each with half as many pixels."""
    widths = [width, 2 * width, 4 * width]
    shapes: Shapes = {
        f"conv_{i}": (3, 3, before, after)
        for i, (before, after) in enumerate(zip([3, *widths], widths, strict=False))
    }
    shapes |= {f"scale_{i}": (each,) for i, each in enumerate(widths)}
    shapes["head"] = (widths[-1], 10)

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["images"]
        for i in range(len(widths)):
            x = lax.conv_general_dilated(
                x,
                params[f"conv_{i}"],
                (2, 2),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            mean = jnp.mean(x, axis=(0, 1, 2))
            x = jax.nn.relu((x - mean) * params[f"scale_{i}"])
        logits = jnp.mean(x, axis=(1, 2)) @ params["head"]
        logs = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(logs, batch["labels"][:, None], axis=-1))

    images = jax.ShapeDtypeStruct((rows, pixels, pixels, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return Model(shapes, {"images": images, "labels": labels}, loss)


MODELS = {
    "decoder": decoder(12, 1024, 4, 1024, 8192),  # only compiled
    "convnet": convnet(64, 32, 32),  # only compiled
    "small-decoder": decoder(4, 256, 8, 128, 1024),
    "small-convnet": convnet(16, 32, 32),
}
