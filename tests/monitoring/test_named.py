"""Names in front of metrics, in every nest and from checkpoints."""

from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax

GRADS = {"gen": np.float32([3.0, 4.0]), "critic": np.float32([6.0, 8.0])}


def clipped(name: str, bound: float) -> Any:
    clips = [clipjax.clip_by_global_norm(b) for b in (bound, 2 * bound)]
    named = [clipjax.named(f"clip{i}", clip) for i, clip in enumerate(clips)]
    return clipjax.named(name, clipjax.bounded(optax.adam(0.1), clip=named))


def test_parts_of_a_partition_have_metrics_of_their_own() -> None:
    """Their order, and how often a name occurs, no longer matter."""
    parts = {name: clipped(name, 5.0) for name in GRADS}
    tx = optax.partition(parts, {name: name for name in GRADS})

    @jax.jit
    def step(grads: Any) -> Any:
        _, state = tx.update(grads, tx.init(grads), grads)
        return state, clipjax.metrics(state)

    state, inside = step(GRADS)
    found = clipjax.metrics(state)
    assert found.keys() == inside.keys()
    norms = {"gen/clip0": 5, "gen/clip1": 5, "critic/clip0": 10, "critic/clip1": 5}
    for name, norm in norms.items():
        key = f"{name}/clip_by_global_norm/norm"
        np.testing.assert_allclose(found[key], norm, rtol=2e-6)
    assert {key.split("/")[0] for key in found} == {"gen", "critic"}
    restored = flax.serialization.msgpack_restore(flax.serialization.to_bytes(state))
    assert clipjax.metrics({"step": 3, "state": restored}).keys() == found.keys()


def test_a_history_takes_such_names() -> None:
    tx = clipped("gen", 4.0)
    history, state = [], tx.init(GRADS["gen"])
    for size in (1.0, 2.0, 3.0):
        _, state = tx.update(size * GRADS["gen"], state, GRADS["gen"])
        history.append(clipjax.metrics(state))
    found = clipjax.series(history, "gen/clip0/clip_by_global_norm")
    np.testing.assert_allclose(found, [5, 10, 15], rtol=1e-6)
    rules = {"named": clipjax.named("mine", clipjax.zclip()), "plain": clipjax.zclip()}
    named, plain = clipjax.suggest([1.0, 2.0, 3.0] * 50, rules).values()
    assert named == plain


def test_what_is_named_does_the_same() -> None:
    params = jax.tree.map(jnp.asarray, GRADS)
    plain = optax.chain(clipjax.zclip(), optax.adam(0.1))
    for tx in (
        clipjax.named("a", plain),
        clipjax.named("a", clipjax.named("b", plain)),
    ):
        states = tx.init(params), plain.init(params)
        for size in (1.0, 2.0):
            grads = jax.tree.map(lambda x, size=size: size * x, params)
            (ours, after), (theirs, alone) = (
                each.update(grads, state, params)
                for each, state in zip((tx, plain), states, strict=True)
            )
            states = after, alone
            jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    optax.tree.map_params(tx, lambda x: 2 * x, states[0])
    assert optax.tree.get(states[0], "threshold") == optax.tree.get(alone, "threshold")


def test_a_named_recorder_may_come_after_a_projection() -> None:
    log = clipjax.named("weights", clipjax.record_norms(of="params"))
    tx = optax.chain(optax.sgd(0.1), clipjax.max_norm(1.0), log)
    params = {"w": jnp.ones((2, 2))}
    _, state = tx.update(params, tx.init(params), params)
    assert clipjax.metrics(state)["weights/record_norms/params"] == 2
    with pytest.raises(TypeError, match="projection"):
        clipjax.violations(params, clipjax.named("weights", clipjax.max_norm(1.0)))


def test_a_long_chain_keeps_its_order_in_a_checkpoint_without_types() -> None:
    """Where the tuple is a mapping from "0", "1", "10", "11", "2", …"""
    first, second = clipjax.clip_by_global_norm(1.0), clipjax.clip_by_global_norm(5.0)
    tx = optax.chain(*[optax.identity()] * 2, first, *[optax.scale(2.0)] * 7, second)
    weights = jnp.ones(2)
    _, state = tx.update(weights, tx.init(weights))
    restored = flax.serialization.msgpack_restore(flax.serialization.to_bytes(state))
    assert clipjax.metrics(restored) == clipjax.metrics(state)
    # Flax NNX leaves out what is empty, and Orbax makes mappings of its variables.
    some = {key: x for key, x in restored.items() if jax.tree.leaves(x)}
    boxed = jax.tree.map(lambda x: {"value": x}, {"opt_state": some})
    assert len(some) < len(restored)
    assert clipjax.metrics([boxed]) == clipjax.metrics(state)


def test_value_may_be_a_name() -> None:
    """Although the variables of Flax NNX are restored as {"value": array}."""
    tx = clipjax.named("value", clipjax.record_norms(keep=1, name="value"))
    _, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    restored = flax.serialization.msgpack_restore(flax.serialization.to_bytes(state))
    for tree in ({"value": state}, restored):
        assert clipjax.metrics(tree) == clipjax.metrics(state)
        assert clipjax.bad_steps(tree) == []
