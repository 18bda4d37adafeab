"""Attention layers to clip the logits of, and their logits in float64."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
import pytest

import clipjax

HEADS, DIM, WIDTH = 4, 3, 5
TOKENS = np.random.default_rng(9).standard_normal((2, 7, WIDTH)).astype(np.float32)

KEY_HEADS = pytest.mark.parametrize("key_heads", [4, 2, 1, None], ids=["MHA", "GQA", "MQA", "MQA-no-axis"])


def f32(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)


def random(*shape: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return f32(scale * np.random.default_rng(seed).standard_normal(shape))


def layer(key_heads: int | None = HEADS, *, seed: int = 0) -> dict[str, Any]:
    """The parameters of an attention layer; key heads None: a key without an axis for them."""
    shape = (DIM,) if key_heads is None else (key_heads, DIM)
    return {
        "query": {"kernel": random(WIDTH, HEADS, DIM, seed=seed), "bias": random(HEADS, DIM, seed=seed + 1)},
        "key": {"kernel": random(WIDTH, *shape, seed=seed + 2), "bias": random(*shape, seed=seed + 3)},
        "value": {"kernel": random(WIDTH, *shape, seed=seed + 4)},
    }


def stacked(*trees: Any) -> Any:
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def largest(params: Any) -> np.ndarray:
    """The largest logit of each query head, over the tokens of all examples, in float64."""

    def project(side: str) -> np.ndarray:
        kernel, bias = (np.asarray(params[side][name], np.float64) for name in ("kernel", "bias"))
        if kernel.ndim == 2:
            kernel, bias = kernel[:, None], bias[None]
        return np.einsum("btw,whd->bthd", np.asarray(TOKENS, np.float64), kernel) + bias

    query, key = project("query"), project("key")
    key = np.repeat(key, query.shape[2] // key.shape[2], axis=2)
    return np.einsum("bthd,bshd->bhts", query, key).max(axis=(0, 2, 3)) / math.sqrt(DIM)


def between(logits: np.ndarray) -> float:
    """A threshold that two of four heads are above."""
    return float(np.sort(logits)[1:3].mean())


@functools.cache
def _clip(options: tuple[tuple[str, Any], ...]) -> Any:
    def call(threshold: Any, params: Any, max_logits: Any) -> Any:
        return clipjax.qk_clip(threshold, **dict(options))(params, max_logits=max_logits)

    return jax.jit(call)


def clip(threshold: float, params: Any, max_logits: Any, **options: Any) -> Any:
    """Clip by a compiled function, in NumPy's arrays: one for all thresholds of one kind of layer."""
    return jax.device_get(_clip(tuple(options.items()))(threshold, params, max_logits))
