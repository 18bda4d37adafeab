"""QK-clip: the logits of real attention before and after, which weights change, and by which factors."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from tests.support.attention import (
    DIM,
    HEADS,
    KEY_HEADS,
    TOKENS,
    between,
    clip,
    f32,
    largest,
    layer,
    random,
)
from tests.support.trees import flat, same_bits


@KEY_HEADS
@pytest.mark.parametrize("seed", range(4))
def test_every_head_ends_at_or_below_the_threshold(key_heads: int | None, seed: int) -> None:
    params = layer(key_heads, seed=10 * seed)
    before = largest(params)
    threshold = between(before)
    after = largest(clip(threshold, params, f32(before)))
    assert (before > threshold).sum() == 2
    # The rounding of the weights, and of the logits as they were given, in float32.
    assert (after <= threshold * (1 + 1e-5)).all()
    assert after.max() >= threshold * (1 - 1e-5)  # and no more than it takes
    if key_heads == HEADS:
        np.testing.assert_allclose(after, np.minimum(before, threshold), rtol=1e-5)


@KEY_HEADS
def test_a_head_inside_stays_bit_for_bit(key_heads: int | None) -> None:
    params = layer(key_heads)
    clipped = clip(100.0, params, f32([1.0, 400.0, 90.0, 100.0]))
    for head in (0, 2, 3):
        for name, leaf in params["query"].items():
            assert same_bits(clipped["query"][name][..., head, :], leaf[..., head, :])
    own = {4: [0, 2, 3], 2: [1], 1: [], None: []}[key_heads]
    for head in own:
        for name, leaf in params["key"].items():
            assert same_bits(clipped["key"][name][..., head, :], leaf[..., head, :])
    assert same_bits(clipped["value"], params["value"])


def test_the_factors_by_hand() -> None:
    """Two groups of two heads: logits of 400 and 1600, and of 50 and 200, for a threshold of 100."""
    ones = {side: jax.tree.map(np.ones_like, layer(2)[side]) for side in ("query", "key", "value")}
    clipped = clip(100.0, ones, f32([400.0, 1600.0, 50.0, 200.0]))
    # Group 1: the key by 1/4; the first head needs 1/4 in all and has it, the second 1/16.
    # Group 2: the key by sqrt(1/2); the first head needs nothing, the second sqrt(1/2) more.
    root = math.sqrt(0.5)
    np.testing.assert_allclose(clipped["key"]["kernel"][0, :, 0], [0.25, root], rtol=1e-6)
    np.testing.assert_allclose(clipped["query"]["kernel"][0, :, 0], [1, 0.25, 1, root], rtol=1e-6)


@KEY_HEADS
def test_no_weight_grows(key_heads: int | None) -> None:
    params = layer(key_heads)
    for seed in range(20):
        clipped = clip(100.0, params, random(HEADS, seed=seed, scale=300.0))
        assert (np.abs(flat(clipped)) <= np.abs(flat(params))).all()


def test_nothing_to_clip_changes_nothing() -> None:
    params = layer()
    tx = clipjax.qk_clip(100.0)

    @jax.jit
    def step(updates: Any, params: Any, logits: Any) -> Any:
        updates, state = tx.update(updates, tx.init(params), params, max_logits=logits)
        return updates, clipjax.metrics(state)

    for logits in ([0.0, -5.0, -1e30, 100.0], [-math.inf, math.nan, 1.0, math.inf]):
        assert same_bits(clip(100.0, params, f32(logits)), params)
        grads = jax.tree.map(np.ones_like, params)
        updates, seen = step(grads, params, f32(logits))
        assert same_bits(updates, grads)
        assert float(seen["qk_clip/clipped_fraction"]) == 0
        assert float(seen["qk_clip/scale"]) == 1
        assert int(seen["qk_clip/nonfinite_count"]) == (not np.isfinite(logits).all())


def test_a_logit_that_is_not_finite_leaves_the_other_heads_to_be_clipped() -> None:
    params = layer()
    clipped = clip(100.0, params, f32([math.nan, 400.0, math.inf, 1.0]))
    assert np.isfinite(flat(clipped)).all()
    for head in (0, 2, 3):
        assert same_bits(clipped["key"]["kernel"][:, head], params["key"]["kernel"][:, head])
    np.testing.assert_allclose(
        clipped["query"]["kernel"][:, 1], params["query"]["kernel"][:, 1] / 2, rtol=1e-6
    )


@pytest.mark.parametrize("threshold", [0.0, 1e-30, math.inf])
def test_hostile_thresholds(threshold: float) -> None:
    params = layer(2)
    clipped = clip(threshold, params, f32([3e38, 1.0, 0.0, -1.0]))
    assert np.isfinite(flat(clipped)).all()
    if threshold == math.inf:
        assert same_bits(clipped, params)
    else:
        assert np.abs(clipped["key"]["kernel"][:, 0]).max() <= (1e-33 if threshold == 1e-30 else 0)


@pytest.mark.parametrize("least", [0.0, -1.0])
def test_a_schedule_below_zero_is_zero(least: float) -> None:
    params = layer(2)
    clipped = scheduled(least, params, f32([3e38, 1.0, 0.0, -1.0]))
    assert np.isfinite(flat(clipped)).all()
    assert not np.asarray(clipped["key"]["kernel"])[:, 0].any()


@jax.jit
def scheduled(least: Any, params: Any, logits: Any) -> Any:
    return clipjax.qk_clip(lambda step: least)(params, jnp.zeros((), jnp.int32), max_logits=logits)


def test_a_flax_attention_layer() -> None:
    """The logits that Flax' own attention makes of the same inputs, sown by a function of ours."""
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            def attend(query: Any, key: Any, value: Any, **kwargs: Any) -> Any:
                logits = jnp.einsum("bthd,bshd->bhts", query, key) / math.sqrt(query.shape[-1])
                attention.sow("largest", "logits", jnp.max(logits, axis=(0, 2, 3)))
                return nn.dot_product_attention(query, key, value)

            attention = nn.MultiHeadDotProductAttention(HEADS, qkv_features=HEADS * DIM, attention_fn=attend)
            return attention(x)

    model = Model()
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]
    params = jax.tree.map(lambda x: random(*x.shape, scale=3.0), shapes)
    logits = jax.jit(lambda params: model.apply({"params": params}, TOKENS, mutable="largest")[1]["largest"])

    before = logits(params)
    threshold = between(np.asarray(jax.tree.leaves(before)[0]))
    clipped = clip(threshold, params, before)
    after = np.asarray(jax.tree.leaves(logits(clipped))[0])
    np.testing.assert_allclose(after, np.minimum(jax.tree.leaves(before)[0], threshold), rtol=1e-5)


def test_gradients_flow_through_to_the_weights_alone() -> None:
    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradient(params: Any, logits: Any) -> jax.Array:
        clipped = clipjax.qk_clip(100.0)(params, max_logits=logits)
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(clipped))

    grads, of_logits = gradient(layer(), f32([400.0, 0.0, 1.0, math.nan]))
    np.testing.assert_allclose(np.asarray(grads["query"]["kernel"])[0, :, 0], [0.5, 1, 1, 1], rtol=1e-6)
    # The logits are measured, and constants.
    np.testing.assert_array_equal(of_logits, 0.0)
