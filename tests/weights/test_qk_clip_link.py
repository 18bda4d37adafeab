"""QK-clip as the last link of a chain: what the sum ends at, wrappers, schedules, and a training loop."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import clipjax
from tests.support.attention import DIM, HEADS, TOKENS, WIDTH, clip, f32, layer, random
from tests.support.trees import avals, same_bits

LOGITS = f32([400.0, 50, 10, 1])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, np.float64])
def test_as_the_last_link(dtype: Any) -> None:
    """What `apply_updates` makes of the update are the updated weights times the factors, and no larger."""
    tx = clipjax.chain(optax.sgd(0.125), clipjax.qk_clip(100.0))
    params = jax.tree.map(lambda x: x.astype(dtype), layer(2))
    grads = jax.tree.map(lambda x: random(*x.shape, seed=5).astype(dtype), params)

    @jax.jit
    def step(grads: Any, state: Any, params: Any) -> Any:
        updates, after = tx.update(grads, state, params, max_logits=LOGITS)
        return optax.apply_updates(params, updates), after

    with jax.enable_x64(dtype == np.float64):
        state = tx.init(params)
        landed, after = step(grads, state, params)
        assert avals(after) == avals(state)
        assert avals(landed) == avals(params)
        landed = jax.device_get(landed)
    plain = jax.tree.map(lambda p, g: p - g / dtype(8), params, grads)
    # The first head's logits of 400 come down to 100: by half each of its query and its key.
    wanted = jax.tree.map(lambda p: p.astype(np.float64), plain)
    for side in ("query", "key"):
        for leaf in wanted[side].values():
            leaf[..., 0, :] /= 2
    # The link ends on the inner side, by an ulp of the larger of the weight before and after at most, and by
    # what the factor is too small by so that the product is never rounded up.
    eps = float(ml_dtypes.finfo(dtype).eps)
    slack = 2.0**-50 if dtype == np.float64 else 2.0**-23
    for new, old, goal in zip(*map(jax.tree.leaves, (landed, params, wanted)), strict=True):
        new, old = (np.asarray(x, np.float64) for x in (new, old))
        room = 2 * eps * np.maximum(np.abs(old), np.abs(goal)) + slack * np.abs(goal)
        assert (np.abs(new - goal) <= room).all()
        assert (np.abs(new) <= np.abs(goal)).all()
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
        (_, state), most = jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), None, 60))(params)
        return np.asarray(most), state

    free, _ = run(optax.with_extra_args_support(optax.adam(0.05)))
    bounded, state = run(
        clipjax.bounded(optax.adam(0.05), project=clipjax.qk_clip(threshold), nonfinite="skip")
    )
    assert free[-1].max() > 3 * threshold
    assert bounded.max() < 1.5 * threshold  # one step of Adam beyond it
    assert float(clipjax.metrics(state)["qk_clip/clipped_fraction"]) > 0.3


def test_it_goes_last_like_a_projection() -> None:
    with pytest.raises(ValueError, match="put projections last"):
        clipjax.chain(clipjax.qk_clip(), optax.adam(1e-3))
    ball = clipjax.max_norm(1.0, axes=0)
    tx = clipjax.bounded(optax.sgd(0.1), project=[clipjax.qk_clip(), ball])

    @jax.jit
    def step(params: Any) -> Any:
        updates, _ = tx.update(params, tx.init(params), params, max_logits=LOGITS)
        return optax.apply_updates(params, updates)

    kernels = {side: {"kernel": layer()[side]["kernel"]} for side in ("query", "key")}
    assert not clipjax.verify(step(kernels), ball)


# --------------------------------------------------------------------------------------------------
# Inside wrappers.

WRAPPERS = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.identity(), tx),
    "masked": lambda tx: optax.masked(tx, {"query": True, "key": True, "value": False}),
    "partition": lambda tx: optax.partition({"a": tx}, "a"),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "skip_nonfinite": lambda tx: clipjax.skip_nonfinite(clipjax.chain(tx)),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(clipjax.qk_clip)(threshold=100.0),
}


@functools.cache
def stepped_in_each() -> Any:
    def step(tx: Any, params: Any, logits: Any) -> Any:
        still = jax.tree.map(jnp.zeros_like, params)
        updates, state = tx.update(still, tx.init(params), params, max_logits=logits)
        return optax.apply_updates(params, updates), clipjax.metrics(state)

    every = {name: wrap(clipjax.qk_clip(100.0)) for name, wrap in WRAPPERS.items()}
    return jax.jit(lambda *given: {name: step(tx, *given) for name, tx in every.items()})(layer(), LOGITS)


@pytest.mark.parametrize("name", list(WRAPPERS))
def test_wrappers_hand_on_the_logits(name: str) -> None:
    found = stepped_in_each()
    after, seen = found[name]
    assert same_bits(after, found["alone"][0])
    assert not same_bits(after, layer())
    if name != "inject_hyperparams":
        assert float(seen["qk_clip/norm"]) == 400
        assert float(seen["qk_clip/scale"]) == 0.25


def test_the_link_ends_where_the_call_does() -> None:
    after, _ = stepped_in_each()["alone"]
    wanted = clip(100.0, layer(), LOGITS)
    np.testing.assert_allclose(after["key"]["kernel"], wanted["key"]["kernel"], rtol=1e-6)


def test_a_schedule_takes_the_step_and_the_state_can_be_donated() -> None:
    params = layer()
    tx = clipjax.qk_clip(lambda step: 400.0 / (step + 1))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, params: Any) -> Any:
        still = jax.tree.map(jnp.zeros_like, params)
        updates, state = tx.update(still, state, params, max_logits=LOGITS)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for i in range(2):
        after, state = step(state, params)
        assert same_bits(after, params) == (i == 0)
    assert int(clipjax.metrics(state)["qk_clip/steps"]) == 2


def test_an_nnx_attention_layer() -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.jit(
        lambda: nnx.MultiHeadAttention(HEADS, WIDTH, qkv_features=HEADS * DIM, decode=False, rngs=nnx.Rngs(0))
    )()
    optimizer = nnx.Optimizer(model, clipjax.chain(optax.sgd(0.0), clipjax.qk_clip(100.0)), wrt=nnx.Param)
    before = np.array(model.query.kernel[...])
    gradients = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads, max_logits=LOGITS))(
        model, optimizer, gradients
    )
    after = np.asarray(model.query.kernel[...])
    np.testing.assert_allclose(after[:, 0], before[:, 0] / 2, rtol=1e-6)
    assert same_bits(after[:, 1:], before[:, 1:])
