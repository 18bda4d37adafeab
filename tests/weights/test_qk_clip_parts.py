"""QK-clip of kernels with several parts: queries, keys and values in one, and multi-head latent attention."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import clipjax
from tests.support.attention import DIM, HEADS, WIDTH, between, clip, f32, largest, layer, random, stacked
from tests.support.trees import flat, same_bits

# --------------------------------------------------------------------------------------------------
# Queries, keys and values in one kernel: each layout is one of a plain layer, and is clipped as that is.


class Fused(NamedTuple):
    """A layout of one kernel and one bias."""

    fuse: Callable[[Any, Any, Any], Any]  # of arrays (*, heads, head_dim), the last with the key's heads
    key_heads: int
    parts: list[tuple[str, int]]
    axis: Any = -1


def after_each_other(*arrays: Any) -> Any:
    return np.concatenate([x.reshape(*x.shape[:-2], -1) for x in arrays], axis=-1)


def by_group(query: Any, key: Any, value: Any) -> Any:
    """The queries of a group, its key and its value; then the next group."""
    groups = key.shape[-2]
    blocks = (x.reshape(*x.shape[:-2], groups, -1) for x in (query, key, value))
    return np.concatenate(list(blocks), axis=-1).reshape(*key.shape[:-2], -1)


ALL, TWO = HEADS * DIM, 2 * DIM
FUSED = {
    "(in, 3, heads, head_dim)": Fused(
        lambda *qkv: np.stack(qkv, axis=-3),
        HEADS,
        [("query", ALL), ("key", ALL), ("value", ALL)],
        (-3, -2, -1),
    ),
    "(in, 3 * heads * head_dim)": Fused(
        after_each_other, HEADS, [("query", ALL), ("key", ALL), ("value", ALL)]
    ),
    "(in, (heads + 2 * key heads) * head_dim)": Fused(
        after_each_other, 2, [("query", ALL), ("key", TWO), ("value", TWO)]
    ),
    "(in, heads * 3 * head_dim)": Fused(by_group, HEADS, [("query", DIM), ("key", DIM), ("value", DIM)]),
    "(in, groups * (heads / groups + 2) * head_dim)": Fused(
        by_group, 2, [("query", TWO), ("key", DIM), ("value", DIM)]
    ),
    "(3 * heads * head_dim, in)": Fused(
        lambda *qkv: np.moveaxis(after_each_other(*qkv), 0, -1),
        HEADS,
        [("query", ALL), ("key", ALL), ("value", ALL)],
        0,
    ),
    "the value in front, and a gate": Fused(
        lambda q, k, v: after_each_other(v, q, v, k),
        HEADS,
        [("value", ALL), ("query", ALL), ("value", ALL), ("key", ALL)],
    ),
}
LOGITS = f32([400.0, 50.0, 10.0, 900.0])


def plain(key_heads: int, seed: int = 0) -> Any:
    """A layer, with a bias of the value."""
    params = layer(key_heads, seed=seed)
    params["value"]["bias"] = random(key_heads, DIM, seed=seed + 5)
    return params


def fused(of: Fused, params: Any) -> Any:
    return {
        "attention": {
            "qkv": {
                name: of.fuse(*(params[side][name] for side in ("query", "key", "value")))
                for name in ("kernel", "bias")
            },
            "out": params["value"]["kernel"],
        }
    }


def options(of: Fused) -> dict[str, Any]:
    return {"axis": of.axis, "head_dim": DIM, "parts": {"qkv": of.parts}}


def clip_by(threshold: float, params: Any, logits: Any, **options: Any) -> Any:
    tx = clipjax.qk_clip(threshold, **options)
    return jax.device_get(jax.jit(lambda params, logits: tx(params, max_logits=logits))(params, logits))


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_kernel_is_clipped_as_its_parts_are(name: str) -> None:
    of = FUSED[name]
    params = plain(of.key_heads)
    wanted = fused(of, clip(100.0, params, LOGITS))
    before = fused(of, params)
    after = clip_by(100.0, before, LOGITS, **options(of))
    assert same_bits(after, wanted)
    assert not same_bits(after, before)


def test_the_logits_of_a_fused_kernel_end_at_the_threshold() -> None:
    of = FUSED["(in, groups * (heads / groups + 2) * head_dim)"]
    params = plain(2, seed=20)
    before = largest(params)
    threshold = between(before)
    qkv = clip_by(threshold, fused(of, params), f32(before), **options(of))["attention"]["qkv"]
    # Read from the fused arrays anew, group by group.
    found: dict[str, dict[str, Any]] = {"query": {}, "key": {}}
    for leaf, x in qkv.items():
        blocks = x.reshape(*x.shape[:-1], 2, 4, DIM)
        found["query"][leaf] = blocks[..., :2, :].reshape(*x.shape[:-1], HEADS, DIM)
        found["key"][leaf] = blocks[..., 2, :]
    after = largest(found)
    assert (before > threshold).sum() == 2
    assert (after <= threshold * (1 + 1e-5)).all()
    assert after.max() >= threshold * (1 - 1e-5)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_stacked_layers_of_16_bits(dtype: Any) -> None:
    of = FUSED["(in, (heads + 2 * key heads) * head_dim)"]
    layers = [jax.tree.map(lambda x: x.astype(dtype), fused(of, plain(2, seed=10 * i))) for i in range(2)]
    logits = f32([LOGITS, [1, 2, 3, 4]])
    each = [clip_by(100.0, p, s, **options(of)) for p, s in zip(layers, logits, strict=True)]
    assert same_bits(clip_by(100.0, stacked(*layers), logits, **options(of)), stacked(*each))
    assert same_bits(each[1], layers[1])
    size, before = np.abs(flat(each[0])), np.abs(flat(layers[0]))
    assert (size <= before).all()
    assert (size < before).any()


# --------------------------------------------------------------------------------------------------
# Multi-head latent attention: q = [q_nope, rotate(q_rope)], k = [k_nope, rotate(shared k_rope)].

NOPE, ROPE, VALUE, RANK = 3, 2, 4, 6
TOKENS = np.random.default_rng(11).standard_normal((2, 7, WIDTH))


def mla(seed: int = 0) -> dict[str, Any]:
    return {
        "q_a": random(WIDTH, RANK, seed=seed),
        "q_b": random(RANK, HEADS, NOPE + ROPE, seed=seed + 1),
        "kv_a": random(WIDTH, RANK + ROPE, seed=seed + 2),
        "kv_b": random(RANK, HEADS, NOPE + VALUE, seed=seed + 3),
    }


def normalized(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True))


def rotated(x: np.ndarray) -> np.ndarray:
    """Rotate the entries of each token (batch, token, heads, 2) by an angle of its own."""
    angle = 0.7 * np.arange(x.shape[1])[None, :, None]
    a, b = x[..., 0], x[..., 1]
    return np.stack([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)], axis=-1)


def logits_of(params: Any) -> np.ndarray:
    """The largest logit of each head, in float64."""
    p = {name: np.asarray(x, np.float64) for name, x in params.items()}
    query = np.einsum("btr,rhd->bthd", normalized(TOKENS @ p["q_a"]), p["q_b"])
    latent = TOKENS @ p["kv_a"]
    key = np.einsum("btr,rhd->bthd", normalized(latent[..., :RANK]), p["kv_b"])[..., :NOPE]
    shared = rotated(latent[..., None, RANK:])[:, :, 0]
    nope = np.einsum("bthd,bshd->bhts", query[..., :NOPE], key)
    rope = np.einsum("bthd,bsd->bhts", rotated(query[..., NOPE:]), shared)
    return (nope + rope).max(axis=(0, 2, 3)) / math.sqrt(NOPE + ROPE)


# As the names of layers, and what an entry (of q_b or of kv_b) is in them.
PARTS: dict[str, Any] = {
    "q_b": [("query", NOPE), ("query_rope", ROPE)],
    "kv_b": [("key", NOPE), ("value", VALUE)],
}
MLA: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "(rank, heads, dims)": ({"axis": (-2, -1)}, lambda p: p),
    "(rank, heads * dims)": (
        {},
        lambda p: {name: x.reshape(x.shape[0], -1) for name, x in p.items()},
    ),
    "(heads * dims, rank)": (
        {"axis": 0},
        lambda p: {name: x.reshape(x.shape[0], -1).T for name, x in p.items()},
    ),
    "(heads, dims, rank)": (
        {"axis": (0, 1)},
        lambda p: {name: np.moveaxis(x, 0, -1) for name, x in p.items()},
    ),
    "apart": (
        {"parts": {"q_rope": [("query_rope", ROPE)]}, "query": "q_nope", "key": "k_nope"},
        lambda p: {
            "q_nope": p["q_b"][..., :NOPE].reshape(RANK, -1),
            "q_rope": p["q_b"][..., NOPE:].reshape(RANK, -1),
            "k_nope": p["kv_b"][..., :NOPE].reshape(RANK, -1),
            "v": p["kv_b"][..., NOPE:],
            "kv_a": p["kv_a"],
        },
    ),
    "all heads of one part after those of another": (
        {
            "parts": {
                "q_b": [("query", HEADS * NOPE), ("query_rope", HEADS * ROPE)],
                "kv_b": [("key", HEADS * NOPE), ("value", HEADS * VALUE)],
            }
        },
        lambda p: (
            p | {name: after_each_other(p[name][..., :NOPE], p[name][..., NOPE:]) for name in ("q_b", "kv_b")}
        ),
    ),
}


def clip_mla(threshold: float, params: Any, logits: Any, name: str = "(rank, heads, dims)") -> Any:
    more, as_laid_out = MLA[name]
    return clip_by(
        threshold, {"mla": as_laid_out(params)}, logits, **({"head_dim": NOPE, "parts": PARTS} | more)
    )["mla"]


@pytest.mark.parametrize("seed", [0, 10, 20])
def test_the_logits_of_latent_attention_end_at_the_threshold(seed: int) -> None:
    params = mla(seed)
    before = logits_of(params)
    threshold = between(before)
    clipped = clip_mla(threshold, params, f32(before))
    after = logits_of(clipped)
    assert (before > threshold).sum() == 2
    np.testing.assert_allclose(after, np.minimum(before, threshold), rtol=1e-5)
    for head in np.flatnonzero(before <= threshold):
        assert same_bits(clipped["q_b"][:, head], params["q_b"][:, head])
        assert same_bits(clipped["kv_b"][:, head], params["kv_b"][:, head])
    # Values, and what all heads share, stay.
    assert same_bits(clipped["kv_b"][..., NOPE:], params["kv_b"][..., NOPE:])
    assert same_bits((clipped["q_a"], clipped["kv_a"]), (params["q_a"], params["kv_a"]))


def test_the_factors_of_latent_attention_by_hand() -> None:
    ones = jax.tree.map(np.ones_like, mla())
    clipped = clip_mla(100.0, ones, f32([400.0, 100.0, 1.0, -5.0]))
    np.testing.assert_allclose(clipped["q_b"][0, 0], [0.5] * NOPE + [0.25] * ROPE, rtol=1e-6)
    np.testing.assert_allclose(clipped["kv_b"][0, 0], [0.5] * NOPE + [1.0] * VALUE, rtol=1e-6)
    assert (clipped["q_b"][:, 1:] == 1).all()
    assert (clipped["kv_b"][:, 1:] == 1).all()


@pytest.mark.parametrize("name", MLA)
def test_every_layout_of_latent_attention_is_clipped_alike(name: str) -> None:
    params = mla(30)
    wanted = MLA[name][1](clip_mla(100.0, params, LOGITS))
    after = clip_mla(100.0, params, LOGITS, name)
    for leaf in wanted:
        np.testing.assert_array_equal(after[leaf], wanted[leaf])
    assert not same_bits(after, MLA[name][1](params))


def test_gradients_and_links_take_parts() -> None:
    params = {"mla": mla()}
    tx = clipjax.qk_clip(100.0, axis=(-2, -1), head_dim=NOPE, parts=PARTS)

    @jax.jit
    def run(params: Any) -> Any:
        grads = jax.grad(lambda p: sum(jnp.sum(x) for x in jax.tree.leaves(tx(p, max_logits=LOGITS))))(params)
        still = jax.tree.map(jnp.zeros_like, params)
        updates, state = tx.update(still, tx.init(params), params, max_logits=LOGITS)
        landed = jax.tree.map(jnp.add, params, updates)
        return grads, landed, clipjax.metrics(state)

    grads, landed, seen = jax.device_get(run(params))
    np.testing.assert_allclose(grads["mla"]["q_b"][0, 0], [0.5] * NOPE + [0.25] * ROPE, rtol=1e-6)
    wanted = clip_mla(100.0, params["mla"], LOGITS)
    np.testing.assert_allclose(flat(landed["mla"]), flat(wanted), rtol=1e-6)
    assert seen["qk_clip/norm"] == 900
    assert seen["qk_clip/scale"] == pytest.approx(1 / 9)


# --------------------------------------------------------------------------------------------------
# What does not fit.


def call(params: Any, logits: Any = LOGITS, **options: Any) -> None:
    tx = clipjax.qk_clip(**options)
    jax.eval_shape(lambda params, logits: tx(params, max_logits=logits), params, logits)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"parts": {"a": [("query", 3)]}}, ValueError, "parts needs head_dim"),
        ({"parts": {}}, TypeError, "parts must map components"),
        ({"parts": [("query", 3)]}, TypeError, "parts must map components"),
        ({"parts": {"a/b": [("query", 3)]}}, ValueError, "one component of a path, got 'a/b'"),
        ({"parts": {"a": {"query": 3}}}, TypeError, r"parts\['a'\] must be pairs"),
        ({"parts": {"a": []}}, TypeError, r"parts\['a'\] must be pairs"),
        ({"parts": {"a": ["query"]}}, TypeError, r"parts\['a'\] must be pairs"),
        ({"parts": {"a": [("qeury", 3)]}}, ValueError, "a role must be one of .* got 'qeury'"),
        ({"parts": {"a": [("query", 3.0)]}}, TypeError, "size of 'query' must be an int, got 3.0"),
        ({"parts": {"a": [("query", 4)]}}, ValueError, "must be a multiple of head_dim=3, got 4"),
        ({"parts": {"a": [("query", 0)]}}, ValueError, "must be a multiple of head_dim=3, got 0"),
        ({"parts": {"a": [("value", 0)]}}, ValueError, "size of 'value' must be at least 1, got 0"),
        ({"parts": {"a": [("key", 3), ("key", 3)]}}, ValueError, "each of a head's parts once"),
        ({"axis": (0, 0)}, ValueError, "several axes must ascend"),
        ({"axis": (-1, -2)}, ValueError, "several axes must ascend"),
        ({"axis": (-1, 0)}, ValueError, "several axes must ascend, and count from one end"),
        ({"axis": ()}, TypeError, "axis must be an int or several"),
        ({"axis": (0, True)}, TypeError, "axis must be an int or several"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], text: str) -> None:
    head_dim = {} if "needs" in text else {"head_dim": 3}
    with pytest.raises(error, match=text):
        clipjax.qk_clip(**head_dim, **options)


def test_several_axes_need_the_size_of_a_head() -> None:
    with pytest.raises(ValueError, match=re.escape("several axes need head_dim, the size of a head")):
        clipjax.qk_clip(axis=(-2, -1))


@pytest.mark.parametrize(
    ("parts", "axis"),
    [
        ([("query", ALL), ("key", ALL), ("value", DIM)], -1),  # repeated so often it does not end at the end
        ([("query", TWO), ("key", TWO), ("value", TWO)], (-2, -1)),  # the input's axis among them
        ([("query", DIM), ("key", TWO), ("value", ALL)], -1),  # fewer queries than logits
        ([("query", TWO), ("key", DIM), ("value", ALL)], -1),
        ([("query", ALL), ("key", ALL), ("value", ALL)], 5),
    ],
)
def test_parts_that_do_not_fit(parts: Any, axis: Any) -> None:
    params = {"qkv": {"kernel": np.ones((WIDTH, 3 * ALL), np.float32)}}
    with pytest.raises(ValueError, match=r"does not fit 'qkv/kernel' of shape \(5, 36\) with parts"):
        call(params, head_dim=DIM, axis=axis, parts={"qkv": parts})


def test_a_rotary_part_needs_a_key_for_each_query() -> None:
    params = {
        "query": np.ones((2, HEADS * DIM), np.float32),
        "key": np.ones((2, 2 * DIM), np.float32),
        "rope": np.ones((2, HEADS * ROPE), np.float32),
    }
    with pytest.raises(ValueError, match=r"'query_rope' needs a key head for each query head.* 4 .* 2 key"):
        call(params, head_dim=DIM, parts={"rope": [("query_rope", ROPE)]})
    params["key"] = params["query"]
    for entries, size in (
        (9, 3),
        (10, 10),
        (8, 3),
    ):  # not as many heads, no equal ones, and what is left over
        params["rope"] = np.ones((2, entries), np.float32)
        with pytest.raises(ValueError, match="does not fit"):
            call(params, head_dim=DIM, parts={"rope": [("query_rope", size)]})


def test_a_tree_without_the_parts() -> None:
    with pytest.raises(ValueError, match="no layer has both 'query' and 'key', nor has one of parts 'qkv'"):
        call(layer()["value"], head_dim=DIM, parts={"qkv": [("query", DIM), ("key", DIM)]})
