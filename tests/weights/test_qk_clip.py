"""QK-clip: the logits of real attention, before and after, and what may not change."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import clipjax
from tests.support.trees import avals, same_bits

HEADS, DIM, WIDTH = 4, 3, 5
TOKENS = jnp.asarray(np.random.default_rng(9).standard_normal((2, 7, WIDTH)), np.float32)


def random(*shape: int, seed: int = 0, scale: float = 2.0) -> jax.Array:
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), np.float32)


def layer(key_heads: int | None = HEADS, *, seed: int = 0) -> dict[str, Any]:
    """The parameters of an attention layer; key heads None: a key without an axis for them."""
    shape = (DIM,) if key_heads is None else (key_heads, DIM)
    return {
        "query": {"kernel": random(WIDTH, HEADS, DIM, seed=seed), "bias": random(HEADS, DIM, seed=seed + 1)},
        "key": {"kernel": random(WIDTH, *shape, seed=seed + 2), "bias": random(*shape, seed=seed + 3)},
        "value": {"kernel": random(WIDTH, *shape, seed=seed + 4)},
    }


def largest(params: Any, dtype: Any = np.float64) -> np.ndarray:
    """The largest logit of each query head, over the tokens of all examples, in float64."""

    def project(side: str) -> np.ndarray:
        kernel, bias = (np.asarray(params[side][name], dtype) for name in ("kernel", "bias"))
        if kernel.ndim == 2:
            kernel, bias = kernel[:, None], bias[None]
        return np.einsum("btw,whd->bthd", np.asarray(TOKENS, dtype), kernel) + bias

    query, key = project("query"), project("key")
    key = np.repeat(key, query.shape[2] // key.shape[2], axis=2)
    return np.einsum("bthd,bshd->bhts", query, key).max(axis=(0, 2, 3)) / math.sqrt(DIM)


KEY_HEADS = pytest.mark.parametrize("key_heads", [4, 2, 1, None], ids=["MHA", "GQA", "MQA", "MQA-no-axis"])


def between(logits: np.ndarray) -> float:
    """A threshold that two of four heads are above."""
    return float(np.sort(logits)[1:3].mean())


@KEY_HEADS
@pytest.mark.parametrize("seed", range(4))
def test_every_head_ends_at_or_below_the_threshold(key_heads: int | None, seed: int) -> None:
    params = layer(key_heads, seed=10 * seed)
    before = largest(params)
    threshold = between(before)
    clipped = clipjax.qk_clip(threshold)(params, max_logits=jnp.asarray(before, np.float32))
    after = largest(clipped)
    assert (before > threshold).sum() == 2
    # The rounding of the weights, and of the logits as they were given, in float32.
    assert (after <= threshold * (1 + 1e-5)).all()
    assert after.max() >= threshold * (1 - 1e-5)  # and no more than it takes
    if key_heads == HEADS:
        np.testing.assert_allclose(after, np.minimum(before, threshold), rtol=1e-5)


@KEY_HEADS
def test_a_head_inside_stays_bit_for_bit(key_heads: int | None) -> None:
    params = layer(key_heads)
    logits = jnp.array([1.0, 400.0, 90.0, 100.0])
    clipped = clipjax.qk_clip(100.0)(params, max_logits=logits)
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
    ones = {"query": {"kernel": jnp.ones((1, 4, 1))}, "key": {"kernel": jnp.ones((1, 2, 1))}}
    clipped = clipjax.qk_clip(100.0)(ones, max_logits=jnp.array([400.0, 1600.0, 50.0, 200.0]))
    # Group 1: the key by 1/4; the first head needs 1/4 in all and has it, the second 1/16.
    # Group 2: the key by sqrt(1/2); the first head needs nothing, the second sqrt(1/2) more.
    root = math.sqrt(0.5)
    np.testing.assert_allclose(clipped["key"]["kernel"][0, :, 0], [0.25, root], rtol=1e-6)
    np.testing.assert_allclose(clipped["query"]["kernel"][0, :, 0], [1, 0.25, 1, root], rtol=1e-6)


@KEY_HEADS
def test_no_weight_grows(key_heads: int | None) -> None:
    params = layer(key_heads)
    for seed in range(20):
        logits = random(HEADS, seed=seed, scale=300.0)
        clipped = clipjax.qk_clip(100.0)(params, max_logits=logits)
        for new, old in zip(jax.tree.leaves(clipped), jax.tree.leaves(params), strict=True):
            assert (np.abs(new) <= np.abs(old)).all()


def test_nothing_to_clip_changes_nothing() -> None:
    params = layer()
    for logits in ([0.0, -5.0, -1e30, 100.0], [-math.inf, math.nan, 1.0, math.inf]):
        tx = clipjax.qk_clip(100.0)
        assert same_bits(tx(params, max_logits=jnp.array(logits)), params)
        grads = jax.tree.map(jnp.ones_like, params)
        updates, state = tx.update(grads, tx.init(params), params, max_logits=jnp.array(logits))
        assert same_bits(updates, grads)
        seen = clipjax.metrics(state)
        assert float(seen["qk_clip/clipped_fraction"]) == 0
        assert float(seen["qk_clip/scale"]) == 1
        assert int(seen["qk_clip/nonfinite_count"]) == (not np.isfinite(logits).all())


def test_a_logit_that_is_not_finite_leaves_the_other_heads_to_be_clipped() -> None:
    params = layer()
    clipped = clipjax.qk_clip(100.0)(params, max_logits=jnp.array([math.nan, 400.0, math.inf, 1.0]))
    assert np.isfinite(jax.flatten_util.ravel_pytree(clipped)[0]).all()
    for head in (0, 2, 3):
        assert same_bits(clipped["key"]["kernel"][:, head], params["key"]["kernel"][:, head])
    np.testing.assert_allclose(
        clipped["query"]["kernel"][:, 1], params["query"]["kernel"][:, 1] / 2, rtol=1e-6
    )


@pytest.mark.parametrize("threshold", [0.0, 1e-30, math.inf, lambda step: 0.0, lambda step: -1.0])
def test_hostile_thresholds(threshold: Any) -> None:
    params = layer(2)
    tx = clipjax.qk_clip(threshold)
    logits = jnp.array([3e38, 1.0, 0.0, -1.0])
    clipped = tx(params, jnp.zeros((), jnp.int32), max_logits=logits)
    assert np.isfinite(jax.flatten_util.ravel_pytree(clipped)[0]).all()
    if threshold == math.inf:
        assert same_bits(clipped, params)
    else:
        assert np.abs(clipped["key"]["kernel"][:, 0]).max() <= (1e-33 if threshold == 1e-30 else 0)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.float64])
def test_as_the_last_link(dtype: Any) -> None:
    """What `apply_updates` makes of the update is what the call makes of the updated weights."""
    with jax.enable_x64(dtype == np.float64):
        params = jax.tree.map(lambda x: x.astype(dtype), layer(2))
        grads = jax.tree.map(lambda x: random(*x.shape, seed=5).astype(dtype), params)
        tx = clipjax.chain(optax.sgd(0.125), clipjax.qk_clip(100.0))
        state = tx.init(params)
        logits = jnp.array([400.0, 50.0, 10.0, 1.0], np.float32)
        update = jax.jit(tx.update)
        updates, after = update(grads, state, params, max_logits=logits)
        assert avals(after) == avals(state)
        landed = optax.apply_updates(params, updates)
        assert avals(landed) == avals(params)
        plain = optax.apply_updates(params, jax.tree.map(lambda g: (-0.125 * g).astype(g.dtype), grads))
        wanted = clipjax.qk_clip(100.0)(plain, max_logits=logits)
        # The link ends on the inner side, by an ulp of the larger of the weight before and after at most.
        eps = float(ml_dtypes.finfo(dtype).eps)
        for new, old, goal in zip(*map(jax.tree.leaves, (landed, params, wanted)), strict=True):
            new, old, goal = (np.asarray(x, np.float64) for x in (new, old, goal))
            assert (np.abs(new - goal) <= 2 * eps * np.maximum(np.abs(old), np.abs(goal))).all()
            assert (np.abs(new) <= np.abs(goal) + (np.abs(goal) == np.abs(new))).all()
        assert same_bits(landed["key"]["kernel"][:, 1], plain["key"]["kernel"][:, 1])
        assert same_bits(landed["value"], plain["value"])


def test_in_a_training_loop_the_logits_stay_bounded() -> None:
    """Gradient ascent on the logits themselves, against a threshold."""
    threshold = 20.0

    def logits_of(params: Any) -> jax.Array:
        query = jnp.einsum("btw,whd->bthd", TOKENS, params["query"]["kernel"]) + params["query"]["bias"]
        key = jnp.einsum("btw,whd->bthd", TOKENS, params["key"]["kernel"]) + params["key"]["bias"]
        return jnp.einsum("bthd,bshd->bhts", query, key) / math.sqrt(DIM)

    def run(tx: Any) -> tuple[np.ndarray, Any]:
        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = logits_of(params)
            return -(jnp.mean(logits**2) ** 0.5), jnp.max(logits, axis=(0, 2, 3))

        def step(carry: Any, _: Any) -> Any:
            params, state = carry
            (_, most), grads = jax.value_and_grad(loss, has_aux=True)(params)
            updates, state = tx.update(grads, state, params, max_logits=most)
            return (optax.apply_updates(params, updates), state), most

        params = jax.tree.map(lambda x: 0.25 * x, layer())
        (_, state), most = jax.jit(lambda c: jax.lax.scan(step, c, None, 60))((params, tx.init(params)))
        return np.asarray(most), state

    free, _ = run(optax.with_extra_args_support(optax.adam(0.05)))
    bounded, state = run(
        clipjax.bounded(optax.adam(0.05), project=clipjax.qk_clip(threshold), nonfinite="skip")
    )
    assert free[-1].max() > 3 * threshold
    assert bounded.max() < 1.5 * threshold  # one step of Adam beyond it
    assert float(clipjax.metrics(state)["qk_clip/clipped_fraction"]) > 0.3


# --------------------------------------------------------------------------------------------------
# Layouts, and where the layers are.


def test_fused_kernels() -> None:
    params = layer(2)
    fused = jax.tree.map(lambda x: x.reshape(*x.shape[:-2], -1), params)
    logits = jnp.array([400.0, 50.0, 10.0, 900.0])
    wanted = jax.tree.map(
        lambda x: x.reshape(*x.shape[:-2], -1), clipjax.qk_clip(100.0)(params, max_logits=logits)
    )
    assert same_bits(clipjax.qk_clip(100.0, head_dim=DIM)(fused, max_logits=logits), wanted)
    assert same_bits(clipjax.qk_clip(100.0, axis=-1, head_dim=DIM)(fused, max_logits=logits), wanted)


def test_kernels_that_are_transposed_and_named_otherwise() -> None:
    """As `(heads * head_dim, in)` with biases `(heads * head_dim,)`."""
    params = layer()
    logits = jnp.array([400.0, 50.0, 10.0, 900.0])

    def turned(tree: Any) -> Any:
        return {
            f"{side}_proj": {
                "weight": tree[side]["kernel"].reshape(WIDTH, -1).T,
                "bias": tree[side]["bias"].ravel(),
            }
            for side in ("query", "key")
        }

    tx = clipjax.qk_clip(100.0, query="query_proj", key="key_proj", axis=0, head_dim=DIM)
    wanted = turned(clipjax.qk_clip(100.0)(params, max_logits=logits))
    assert same_bits(tx(turned(params), max_logits=logits), wanted)
    stack = jax.tree.map(lambda *x: jnp.stack(x), turned(params), turned(params))
    both = tx(stack, max_logits=jnp.stack([logits, jnp.ones(4)]))
    assert same_bits(both, jax.tree.map(lambda *x: jnp.stack(x), wanted, turned(params)))


@KEY_HEADS
def test_stacked_layers(key_heads: int | None) -> None:
    layers = [layer(key_heads, seed=10 * i) for i in range(3)]
    logits = jnp.array([[400.0, 1, 2, 3], [1, 2, 3, 4], [500, 600, 700, 800]])
    tx = clipjax.qk_clip(100.0)
    stack = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    wanted = jax.tree.map(
        lambda *x: jnp.stack(x), *(tx(p, max_logits=s) for p, s in zip(layers, logits, strict=True))
    )
    assert same_bits(tx(stack, max_logits=logits), wanted)


LOGITS = {"a": jnp.array([400.0, 50, 10, 1]), "b": jnp.array([1.0, 2, 300, 4])}


@pytest.mark.parametrize(
    "max_logits",
    [
        {"encoder/attention": LOGITS["a"], "decoder/attention": LOGITS["b"]},
        {"encoder": {"attention": LOGITS["a"]}, "decoder": {"attention": LOGITS["b"]}},
        {
            "encoder": {"attention": {"max": (LOGITS["a"],)}},
            "decoder": {"attention": {"max": (LOGITS["b"],)}},
        },
        {"params/encoder/attention": LOGITS["a"], "decoder": {"attention": [LOGITS["b"], LOGITS["b"] - 1]}},
    ],
    ids=["paths", "nested", "sown", "twice"],
)
def test_logits_find_their_layers(max_logits: Any) -> None:
    a, b = layer(seed=1), layer(seed=2)
    params = {"params": {"encoder": {"attention": a, "mlp": random(2, 3)}, "decoder": {"attention": b}}}
    tx = clipjax.qk_clip(100.0)
    clipped = tx(params, max_logits=max_logits)["params"]
    assert same_bits(clipped["encoder"]["attention"], tx(a, max_logits=LOGITS["a"]))
    assert same_bits(clipped["decoder"]["attention"], tx(b, max_logits=LOGITS["b"]))
    assert same_bits(clipped["encoder"]["mlp"], params["params"]["encoder"]["mlp"])


def test_layers_that_are_not_named_are_left_alone() -> None:
    params = {"a": layer(seed=1), "b": layer(seed=2)}
    clipped = clipjax.qk_clip(100.0)(params, max_logits={"a": LOGITS["a"]})
    assert same_bits(clipped["b"], params["b"])
    assert not same_bits(clipped["a"], params["a"])


@pytest.mark.parametrize(
    ("max_logits", "message"),
    [
        (jnp.ones(4), "an array names no one attention layer"),
        ({"c": jnp.ones(4)}, "'c' names no one attention layer. They are:\n  x/a\n  y/a"),
        ({"a": jnp.ones(4)}, "'a' names no one"),
        ({"x": jnp.ones(4)}, "'x' names no one"),
    ],
)
def test_logits_without_a_layer(max_logits: Any, message: str) -> None:
    params = {"x": {"a": layer()}, "y": {"a": layer()}, "z": {"query": jnp.ones(3)}}
    with pytest.raises(ValueError, match=message):
        clipjax.qk_clip()(params, max_logits=max_logits)


@pytest.mark.parametrize("shape", [(), (3,), (8,), (2, 4), (1,)])
def test_logits_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"max_logits: shape .* does not fit 'query/"):
        clipjax.qk_clip()(layer(), max_logits=jnp.ones(shape))


def test_key_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="must divide"):
        clipjax.qk_clip()(layer(3), max_logits=jnp.ones(4))
    with pytest.raises(ValueError, match="in blocks of 2"):
        clipjax.qk_clip(axis=-1, head_dim=2)(layer(), max_logits=jnp.ones(4))


def test_missing_arguments() -> None:
    params = layer()
    tx = clipjax.qk_clip()
    for chained in (tx, clipjax.chain(optax.adam(1e-3), tx), optax.chain(optax.adam(1e-3), tx)):
        with pytest.raises(ValueError, match="pass max_logits, as in"):
            chained.update(params, chained.init(params), params)
    with pytest.raises(ValueError, match="pass max_logits"):
        tx(params)
    with pytest.raises(ValueError, match="params"):
        tx.update(params, tx.init(params), max_logits=jnp.ones(4))
    with pytest.raises(TypeError, match="real"):
        tx(params, max_logits=jnp.ones(4, np.complex64))


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


# --------------------------------------------------------------------------------------------------
# With the others.


def test_it_goes_last_like_a_projection() -> None:
    with pytest.raises(ValueError, match="put projections last"):
        clipjax.chain(clipjax.qk_clip(), optax.adam(1e-3))
    params = layer()
    tx = clipjax.bounded(optax.sgd(0.1), project=[clipjax.qk_clip(), clipjax.max_norm(1.0, axes=0)])
    updates, _ = tx.update(params, tx.init(params), params, max_logits=LOGITS["a"])
    assert not clipjax.verify(optax.apply_updates(params, updates), clipjax.max_norm(1.0, axes=0))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.chain(optax.identity(), tx),
        lambda tx: optax.masked(tx, {"query": True, "key": True, "value": False}),
        lambda tx: optax.partition({"a": tx}, "a"),
        lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
        lambda tx: optax.apply_if_finite(tx, 3),
        lambda tx: clipjax.skip_nonfinite(clipjax.chain(tx)),
    ],
    ids=["chain", "masked", "partition", "MultiSteps", "apply_if_finite", "skip_nonfinite"],
)
def test_wrappers_hand_on_the_logits(wrap: Any) -> None:
    params = layer()
    still = jax.tree.map(jnp.zeros_like, params)
    alone = clipjax.qk_clip(100.0)
    wanted = optax.apply_updates(
        params, jax.jit(alone.update)(still, alone.init(params), params, max_logits=LOGITS["a"])[0]
    )
    tx = wrap(alone)
    updates, state = jax.jit(tx.update)(still, tx.init(params), params, max_logits=LOGITS["a"])
    assert same_bits(optax.apply_updates(params, updates), wanted)
    assert float(clipjax.metrics(state)["qk_clip/norm"]) == 400
    assert float(clipjax.metrics(state)["qk_clip/scale"]) == 0.25


def test_injected_hyperparameters_and_schedules() -> None:
    params = layer()
    still = jax.tree.map(jnp.zeros_like, params)
    tx = optax.inject_hyperparams(clipjax.qk_clip)(threshold=100.0)
    updates, _ = tx.update(still, tx.init(params), params, max_logits=LOGITS["a"])
    wanted = clipjax.qk_clip(100.0)(params, max_logits=LOGITS["a"])
    np.testing.assert_allclose(
        optax.apply_updates(params, updates)["key"]["kernel"], wanted["key"]["kernel"], rtol=1e-6
    )
    scheduled = clipjax.qk_clip(lambda step: 400.0 / (step + 1))
    state, after = scheduled.init(params), params
    for step in range(2):
        updates, state = scheduled.update(still, state, params, max_logits=LOGITS["a"])
        after = optax.apply_updates(params, updates)
        assert same_bits(after, params) == (step == 0)


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
    params = jax.tree.map(
        lambda x: random(*x.shape, scale=3.0), model.init(jax.random.key(0), TOKENS)["params"]
    )

    def logits(params: Any) -> Any:
        return model.apply({"params": params}, TOKENS, mutable="largest")[1]["largest"]

    before = logits(params)
    threshold = between(np.asarray(jax.tree.leaves(before)[0]))
    clipped = clipjax.qk_clip(threshold)(params, max_logits=before)
    after = np.asarray(jax.tree.leaves(logits(clipped))[0])
    np.testing.assert_allclose(after, np.minimum(jax.tree.leaves(before)[0], threshold), rtol=1e-5)


def test_an_nnx_attention_layer() -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.MultiHeadAttention(HEADS, WIDTH, qkv_features=HEADS * DIM, decode=False, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, clipjax.chain(optax.sgd(0.0), clipjax.qk_clip(100.0)), wrt=nnx.Param)
    before = jnp.copy(model.query.kernel[...])
    gradients = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    optimizer.update(model, gradients, max_logits=LOGITS["a"])
    np.testing.assert_allclose(model.query.kernel[:, 0], before[:, 0] / 2, rtol=1e-6)
    assert same_bits(model.query.kernel[:, 1:], before[:, 1:])


def test_gradients_flow_through() -> None:
    params = layer()

    def loss(params: Any) -> jax.Array:
        clipped = clipjax.qk_clip(100.0)(params, max_logits=jnp.array([400.0, 0.0, 1.0, math.nan]))
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(clipped))

    grads = jax.grad(loss)(params)
    np.testing.assert_allclose(grads["query"]["kernel"][0, :, 0], [0.5, 1, 1, 1], rtol=1e-6)


def test_state_can_be_donated() -> None:
    params = layer()
    tx = clipjax.qk_clip()
    step = jax.jit(lambda s, p: tx.update(p, s, p, max_logits=LOGITS["a"])[1], donate_argnums=0)
    state = step(step(tx.init(params), params), params)
    assert int(clipjax.metrics(state)["qk_clip/steps"]) == 2
