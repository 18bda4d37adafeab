"""QK-clip: the logits of real attention before and after, and which weights change."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from clipjax.weights.qk_clip import qk_clip

HEADS, DIM, WIDTH = 4, 8, 16
TOKENS = np.random.default_rng(0).normal(size=(10, WIDTH))
KEY_HEADS = pytest.mark.parametrize("key_heads", [HEADS, 2, 1])

clip_to = jax.jit(
    lambda threshold, params, logits: qk_clip(threshold).apply(
        params, max_logits=logits
    )
)


def layer(key_heads: int, seed: int = 0, dtype: Any = np.float32) -> dict[str, Any]:
    """Draw the weights of a layer."""
    rng = np.random.default_rng(seed)

    def side(*heads: int) -> dict[str, Any]:
        return {
            "kernel": 2 * rng.normal(size=(WIDTH, *heads, DIM)),
            "bias": rng.normal(size=(*heads, DIM)),
        }

    sides = {"query": side(HEADS), "key": side(key_heads), "value": side(HEADS)}
    return jax.tree.map(lambda x: x.astype(dtype), sides)


def largest(params: Any) -> np.ndarray:
    """Return the largest logit of each query head, in float64."""
    one = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    q, k = (
        np.tensordot(TOKENS, one[side]["kernel"], 1) + one[side]["bias"]
        for side in ("query", "key")
    )
    k = np.repeat(k, HEADS // k.shape[1], axis=1)
    return np.einsum("thd,shd->hts", q, k).max(axis=(1, 2)) / math.sqrt(DIM)


@KEY_HEADS
def test_every_head_ends_at_or_below_the_threshold(key_heads: int) -> None:
    for seed in range(3):
        params = layer(key_heads, seed)
        before = largest(params)
        threshold = float(np.sort(before)[1:3].mean())  # two heads are outside
        params["value"]["bias"] = None
        clipped = jax.device_get(clip_to(threshold, params, before))
        after = largest(clipped)
        # Logits, factors and weights are rounded to float32.
        assert (after <= threshold * (1 + 1e-5)).all()
        assert after.max() >= threshold * (1 - 1e-5)
        if key_heads == HEADS:
            np.testing.assert_allclose(after, np.minimum(before, threshold), rtol=1e-5)
        for new, old in zip(
            jax.tree.leaves(clipped), jax.tree.leaves(params), strict=True
        ):
            assert (np.abs(new) <= np.abs(old)).all()  # no weight grows
        for name, x in params["query"].items():
            inside = (..., before <= threshold, slice(None))
            np.testing.assert_array_equal(clipped["query"][name][inside], x[inside])
        np.testing.assert_array_equal(
            clipped["value"]["kernel"], params["value"]["kernel"]
        )


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_the_factors_by_hand(dtype: Any) -> None:
    """Two groups of two heads, whose logits are 400, 1600 and 50, 200, for 100."""
    ones = jax.tree.map(np.ones_like, layer(2, dtype=dtype))
    logits = np.array([400.0, 1600.0, 50.0, 200.0])
    clipped = clip_to(100.0, ones, logits)
    root, rtol = math.sqrt(0.5), 2e-6 if dtype == np.float32 else 2**-8
    for name in ("kernel", "bias"):
        key, query = (
            np.asarray(clipped[side][name], np.float64)[..., 0]
            for side in ("key", "query")
        )
        # The first head needs 1/4, which its key gives; the second 1/16. The third
        # needs nothing.
        np.testing.assert_allclose(
            key, np.broadcast_to([0.25, root], key.shape), rtol=rtol
        )
        np.testing.assert_allclose(
            query, np.broadcast_to([1, 0.25, 1, root], query.shape), rtol=rtol
        )


def test_stacks_of_layers() -> None:
    one = layer(2)
    params = {"layers": jax.tree.map(lambda x: np.stack([x, x, x]), one)}
    logits = np.array([[400.0, 1600, 50, 200], [1, 1, 1, 1], [1, 1e6, 1, 1]])
    clip = jax.jit(qk_clip().apply)
    clipped = jax.device_get(clip(params, max_logits={"layers": logits}))
    for i, row in enumerate(logits):
        alone = clip(one, max_logits=row)
        for name in ("query", "key"):
            np.testing.assert_allclose(
                clipped["layers"][name]["kernel"][i], alone[name]["kernel"], rtol=1e-6
            )


def test_layers_by_path() -> None:
    """Nested or not; and as Flax sows: in tuples below the layer, one for each call."""
    one = layer(HEADS)
    params = {
        "block_0": {"attention": one},
        "block_1": {"attention": one, "dense": np.ones(3)},
    }
    low, high = np.full(HEADS, 1.0), np.full(HEADS, 400.0)
    for logits in (
        {"block_1": {"attention": {"logits": (low, high)}}},
        {"block_1": {"attention": high}, "block_0": {"attention": low}},
        {"block_1/attention": high},
    ):
        clipped = jax.jit(qk_clip().apply)(params, max_logits=logits)
        halved = clipped["block_1"]["attention"]["key"]["kernel"]
        np.testing.assert_allclose(halved, one["key"]["kernel"] / 2, rtol=2e-6)
        jax.tree.map(
            np.testing.assert_array_equal, clipped["block_0"]["attention"], one
        )
    for part in ("attention", "block_1", "ock_1/attention", "block_1/attention_2"):
        with pytest.raises(ValueError, match=f"max_logits: '{part}' is not the whole"):
            qk_clip().apply(params, max_logits={part: high})


def test_logits_that_clip_nothing() -> None:
    params = layer(HEADS)
    for logits in ([0.0, -5.0, -1e30, 100.0], [-math.inf, math.nan, 1.0, math.inf]):
        clipped = clip_to(100.0, params, np.float32(logits))
        jax.tree.map(np.testing.assert_array_equal, clipped, params)
    logits = np.float32([math.nan, 400, math.inf, 1])
    other = jax.device_get(clip_to(100.0, params, logits))
    np.testing.assert_allclose(
        other["query"]["kernel"][:, 1], params["query"]["kernel"][:, 1] / 2, rtol=2e-6
    )
    np.testing.assert_array_equal(
        other["query"]["kernel"][:, 2], params["query"]["kernel"][:, 2]
    )


def test_extreme_thresholds() -> None:
    logits = np.array([3e38, 1.0, 0.0, -1.0], np.float32)
    for threshold in (0.0, 1e-30):
        clipped = clip_to(threshold, layer(2), logits)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(clipped))
        largest = np.abs(clipped["key"]["kernel"][:, 0]).max()
        assert largest <= (1e-33 if threshold > 0 else 0)


def test_as_the_last_link_of_a_chain() -> None:
    params = layer(HEADS)
    logits = np.array([1.0, 400.0, 1.0, 1.0], np.float32)
    thresholds = optax.piecewise_constant_schedule(400.0, {1: 0.25})  # 400, then 100
    tx = optax.chain(optax.scale(0.0), qk_clip(thresholds))
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        grads = jax.tree.map(jnp.ones_like, params)
        updates, state = tx.update(grads, state, params, max_logits=logits, value=1.0)
        return optax.apply_updates(params, updates), state

    first, state = step(params, state)
    jax.tree.map(np.testing.assert_array_equal, first, params)
    second, state = step(first, state)
    wanted = clip_to(100.0, params, logits)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6),
        second,
        wanted,
    )
    assert isinstance(qk_clip().init(params), optax.EmptyState)


def test_explicit_mesh_axes() -> None:
    sharding = NamedSharding(jax.make_mesh((1,), ("d",)), P("d"))
    logits = jax.device_put(np.full(HEADS, 400.0, np.float32), sharding)
    clipped = qk_clip().apply(layer(2), max_logits=logits)
    np.testing.assert_allclose(
        clipped["key"]["kernel"], layer(2)["key"]["kernel"] / 2, rtol=2e-6
    )


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_the_largest_logits_of_all_devices_count_in_shard_map() -> None:
    """Batches are split over one axis of the mesh, heads over the other."""
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    params = layer(HEADS)
    logits = np.random.default_rng(1).uniform(50, 400, (4, HEADS)).astype(np.float32)
    logits[1, 0] = np.nan
    heads = jax.tree.map(lambda x: P(*[None] * (x.ndim - 2), "model"), params)
    clip = jax.shard_map(
        lambda params, logits: qk_clip().apply(params, max_logits=logits[0]),
        mesh=mesh,
        in_specs=(heads, P("data", "model")),
        out_specs=heads,
    )
    wanted = clip_to(100.0, params, np.nanmax(logits, axis=0))
    found = jax.jit(clip)(params, logits)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6), found, wanted
    )


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_split_queries_with_whole_keys_raise_in_shard_map() -> None:
    """Each device would have other keys for its queries than those that it has."""
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(AxisType.Auto,))
    params = {"query": layer(8)["query"], "key": layer(2)["key"]}
    split = jax.tree.map(lambda x: P(*[None] * (x.ndim - 2), "heads"), params["query"])
    specs = {"query": split, "key": jax.tree.map(lambda x: P(), params["key"])}
    clip = jax.shard_map(
        lambda params, logits: qk_clip().apply(params, max_logits=logits),
        mesh=mesh,
        in_specs=(specs, P("heads")),
        out_specs=specs,
    )
    with pytest.raises(ValueError, match=r"differ over \['heads'\] and its keys over"):
        jax.eval_shape(clip, params, jnp.ones(8))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_multi_head_latent_attention(dtype: Any, stacked: bool) -> None:
    """Queries are (nope, rope), keys and values share a kernel, and all heads share a
    rotary key: logits by hand.
    """
    nope, rope, values = 8, 4, 6
    rng = np.random.default_rng(3)
    shapes = {
        "wq_b": (WIDTH, HEADS, nope + rope),
        "wkv_b": (WIDTH, HEADS, nope + values),
        "wk_rope": (WIDTH, rope),
    }
    params = {
        name: {"kernel": rng.normal(size=shape).astype(dtype)}
        for name, shape in shapes.items()
    }

    def logits(params: Any) -> np.ndarray:
        one = {
            name: np.asarray(side["kernel"], np.float64)
            for name, side in params.items()
        }
        q, kv = (np.tensordot(TOKENS, one[name], 1) for name in ("wq_b", "wkv_b"))
        rotary = np.einsum("thd,sd->hts", q[..., nope:], TOKENS @ one["wk_rope"])
        return (np.einsum("thd,shd->hts", q[..., :nope], kv[..., :nope]) + rotary).max(
            axis=(1, 2)
        )

    before = logits(params)
    threshold = float(np.sort(before)[1:3].mean())  # two heads are outside
    projection = qk_clip(threshold, query="wq_b", key="wkv_b", rope=rope)
    clip = jax.jit(projection.apply)
    alone = clipped = jax.device_get(clip(params, max_logits=before))
    if stacked:
        stack = jax.tree.map(lambda x: np.stack([x, x]), {"blocks": params})
        logits_of_each = {"blocks": np.stack([before, np.zeros(HEADS)])}
        clipped = jax.device_get(clip(stack, max_logits=logits_of_each))
        jax.tree.map(
            lambda x, y: np.testing.assert_array_equal(x[1], y),
            clipped["blocks"],
            params,
        )
        clipped = jax.tree.map(lambda x: x[0], clipped["blocks"])
    # Logits are rounded to float32; in bfloat16 each weight once more.
    np.testing.assert_allclose(
        logits(clipped),
        np.minimum(before, threshold),
        rtol=1e-5 if dtype == np.float32 else 2e-2,
    )
    inside = before <= threshold
    np.testing.assert_array_equal(
        clipped["wq_b"]["kernel"][:, inside], params["wq_b"]["kernel"][:, inside]
    )
    np.testing.assert_array_equal(
        clipped["wkv_b"]["kernel"][..., nope:], params["wkv_b"]["kernel"][..., nope:]
    )
    np.testing.assert_array_equal(
        clipped["wk_rope"]["kernel"], params["wk_rope"]["kernel"]
    )
    link, zeros = optax.chain(projection), jax.tree.map(np.zeros_like, params)
    updates, _ = jax.jit(link.update)(
        zeros, link.init(params), params, max_logits=before
    )
    moved = jax.tree.map(np.add, params, updates)
    for x, y in zip(*map(jax.tree.leaves, (moved, alone)), strict=True):
        np.testing.assert_allclose(
            np.asarray(x, np.float32),
            np.asarray(y, np.float32),
            rtol=1e-6 if dtype == np.float32 else 1e-2,
        )


def test_a_stack_of_no_layers_has_nothing_to_clip():
    params = {"query": jnp.ones((0, 5, 4, 6)), "key": jnp.ones((0, 5, 2, 6))}
    clipped = clip_to(50.0, params, jnp.ones((0, 4)))
    assert jax.tree.map(jnp.shape, clipped) == jax.tree.map(jnp.shape, params)
