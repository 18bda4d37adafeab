"""QK-clip: layouts of kernels, which logits belong to which layer, and what fits none."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
import optax
import pytest

import clipjax
from tests.support.attention import DIM, KEY_HEADS, WIDTH, clip, f32, layer, random, stacked
from tests.support.trees import same_bits


def test_fused_kernels() -> None:
    params = layer(2)
    logits = f32([400.0, 50.0, 10.0, 900.0])

    def fused(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.reshape(*x.shape[:-2], -1), tree)

    wanted = fused(clip(100.0, params, logits))
    assert same_bits(clip(100.0, fused(params), logits, head_dim=DIM), wanted)
    assert same_bits(clip(100.0, fused(params), logits, axis=-1, head_dim=DIM), wanted)


def test_kernels_that_are_transposed_and_named_otherwise() -> None:
    """As `(heads * head_dim, in)` with biases `(heads * head_dim,)`."""
    params = layer()
    logits = f32([400.0, 50.0, 10.0, 900.0])

    def turned(tree: Any) -> Any:
        return {
            f"{side}_proj": {
                "weight": tree[side]["kernel"].reshape(WIDTH, -1).T,
                "bias": tree[side]["bias"].ravel(),
            }
            for side in ("query", "key")
        }

    options = {"query": "query_proj", "key": "key_proj", "axis": 0, "head_dim": DIM}
    wanted = turned(clip(100.0, params, logits))
    assert same_bits(clip(100.0, turned(params), logits, **options), wanted)
    both = clip(
        100.0, stacked(turned(params), turned(params)), stacked(logits, np.ones_like(logits)), **options
    )
    assert same_bits(both, stacked(wanted, turned(params)))


@KEY_HEADS
def test_stacked_layers(key_heads: int | None) -> None:
    layers = [layer(key_heads, seed=10 * i) for i in range(3)]
    logits = f32([[400.0, 1, 2, 3], [1, 2, 3, 4], [500, 600, 700, 800]])
    wanted = stacked(*(clip(100.0, p, s) for p, s in zip(layers, logits, strict=True)))
    assert same_bits(clip(100.0, stacked(*layers), logits), wanted)


# --------------------------------------------------------------------------------------------------
# Where the layers are.

LOGITS = {"a": f32([400.0, 50, 10, 1]), "b": f32([1.0, 2, 300, 4])}
MAX_LOGITS: dict[str, Any] = {
    "paths": {"encoder/attention": LOGITS["a"], "decoder/attention": LOGITS["b"]},
    "nested": {"encoder": {"attention": LOGITS["a"]}, "decoder": {"attention": LOGITS["b"]}},
    "sown": {
        "encoder": {"attention": {"max": (LOGITS["a"],)}},
        "decoder": {"attention": {"max": (LOGITS["b"],)}},
    },
    "twice": {
        "params/encoder/attention": LOGITS["a"],
        "decoder": {"attention": [LOGITS["b"], LOGITS["b"] - 1]},
    },
    "not the decoder": {"encoder/attention": LOGITS["a"]},
}
PARAMS = {
    "params": {
        "encoder": {"attention": layer(seed=1), "mlp": random(2, 3)},
        "decoder": {"attention": layer(seed=2)},
    }
}


@functools.cache
def clipped_by_each() -> Any:
    tx = clipjax.qk_clip(100.0)
    every = jax.jit(lambda p, logits: {name: tx(p, max_logits=s)["params"] for name, s in logits.items()})
    return jax.device_get(every(PARAMS, MAX_LOGITS))


@pytest.mark.parametrize("name", list(MAX_LOGITS))
def test_logits_find_their_layers(name: str) -> None:
    before, clipped = PARAMS["params"], clipped_by_each()[name]
    for place, logits in (("encoder", LOGITS["a"]), ("decoder", LOGITS["b"])):
        own = before[place]["attention"]
        wanted = own if name == "not the decoder" and place == "decoder" else clip(100.0, own, logits)
        assert same_bits(clipped[place]["attention"], wanted)
        assert same_bits(wanted, own) == (wanted is own)
    assert same_bits(clipped["encoder"]["mlp"], before["encoder"]["mlp"])


# --------------------------------------------------------------------------------------------------
# What does not fit.


def call(tx: Any, params: Any, logits: Any) -> None:
    """Trace a call, which is when it raises."""
    jax.eval_shape(lambda params, logits: tx(params, max_logits=logits), params, logits)


ONES = np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("max_logits", "message"),
    [
        (ONES, "an array without a path does not name exactly one attention layer"),
        ({"c": ONES}, "'c' does not name exactly one attention layer. They are:\n  x/a\n  y/a"),
        ({"a": ONES}, "'a' does not name exactly one"),
        ({"x": ONES}, "'x' does not name exactly one"),
    ],
)
def test_logits_without_a_layer(max_logits: Any, message: str) -> None:
    params = {"x": {"a": layer()}, "y": {"a": layer()}, "z": {"query": ONES[:3]}}
    with pytest.raises(ValueError, match=message):
        call(clipjax.qk_clip(), params, max_logits)


@pytest.mark.parametrize("shape", [(), (3,), (8,), (2, 4), (1,)])
def test_logits_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"max_logits: shape .* does not fit 'query/"):
        call(clipjax.qk_clip(), layer(), np.ones(shape, np.float32))


def test_key_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="must divide"):
        call(clipjax.qk_clip(), layer(3), ONES)
    with pytest.raises(ValueError, match="in blocks of 2"):
        call(clipjax.qk_clip(axis=-1, head_dim=2), layer(), ONES)


def test_missing_arguments() -> None:
    params = layer()
    tx = clipjax.qk_clip()
    for chained in (tx, clipjax.chain(optax.adam(1e-3), tx), optax.chain(optax.adam(1e-3), tx)):
        with pytest.raises(ValueError, match="pass max_logits, as in"):
            jax.eval_shape(lambda p, chained=chained: chained.update(p, chained.init(p), p), params)
    with pytest.raises(ValueError, match="pass max_logits"):
        tx(params)
    with pytest.raises(ValueError, match="params"):
        jax.eval_shape(lambda p: tx.update(p, tx.init(p), max_logits=ONES), params)
    with pytest.raises(TypeError, match="real"):
        call(tx, params, np.ones(4, np.complex64))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"threshold": -1.0}, ValueError),
        ({"threshold": math.nan}, ValueError),
        ({"threshold": "100"}, TypeError),
        ({"query": "a/b"}, ValueError),
        ({"key": 3}, ValueError),
        ({"query": "x", "key": "x"}, ValueError),
        ({"axis": 1.5}, TypeError),
        ({"axis": "heads"}, TypeError),
        ({"head_dim": 0}, ValueError),
        ({"head_dim": True}, TypeError),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        clipjax.qk_clip(**options)
