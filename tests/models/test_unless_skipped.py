"""Running statistics that a NaN would poison, in Linen, NNX and Equinox."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import clipjax

NAN = float("nan")
TX = clipjax.bounded(
    optax.sgd(0.1), clip=clipjax.clip_by_global_norm(1.0), nonfinite="skip"
)
X = np.random.default_rng(0).normal(size=(3, 8, 4)).astype(np.float32)
X[1, 0, 0] = NAN


def same(a: Any, b: Any) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in leaves)


def test_linen_keeps_the_statistics_of_the_last_good_step() -> None:
    model = nn.BatchNorm(use_running_average=False)
    variables = model.init(jax.random.key(0), X[0])

    @jax.jit
    def step(params: Any, stats: Any, state: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            variables = {"params": params, "batch_stats": stats}
            y, new = model.apply(variables, x, mutable=["batch_stats"])
            return jnp.mean((y - 1) ** 2), new["batch_stats"]

        (loss, new), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, state = TX.update(grads, state, params, loss=loss)
        new = clipjax.unless_skipped(state, new=new, old=stats)
        return optax.apply_updates(params, updates), new, state

    params, stats = variables["params"], variables["batch_stats"]
    state, before = TX.init(params), []
    for x in X:
        before.append((params, stats))
        params, stats, state = step(params, stats, state, x)
    first, second, third = before
    assert not same(first, second)
    assert same(second, third)  # the second batch changed nothing
    assert not same(third, (params, stats))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((params, stats)))


def test_nnx_keeps_them() -> None:
    model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> None:
        old = jax.tree.map(jnp.copy, nnx.state(model, nnx.BatchStat))
        loss_of = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))
        loss, grads = loss_of(model)
        optimizer.update(model, grads, loss=loss)
        new = nnx.state(model, nnx.BatchStat)
        nnx.update(model, clipjax.unless_skipped(optimizer, new=new, old=old))

    step(model, optimizer, X[0])
    good = jax.device_get(nnx.to_pure_dict(nnx.state(model)))
    step(model, optimizer, X[1])
    assert same(good, jax.device_get(nnx.to_pure_dict(nnx.state(model))))
    step(model, optimizer, X[2])
    after = jax.device_get(nnx.to_pure_dict(nnx.state(model)))
    assert not same(good, after)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))


def test_equinox_keeps_them() -> None:
    norm, stats = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
        4, axis_name="batch", mode="batch"
    )
    params, static = eqx.partition(norm, eqx.is_inexact_array)

    @eqx.filter_jit
    def step(params: Any, stats: Any, state: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            model = eqx.combine(params, static)
            mapped = jax.vmap(
                model, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
            )
            y, new = mapped(x, stats)
            return jnp.mean((y - 1) ** 2), new

        (loss, new), grads = eqx.filter_value_and_grad(loss_of, has_aux=True)(params)
        updates, state = TX.update(grads, state, params, loss=loss)
        new = clipjax.unless_skipped(state, new=new, old=stats)
        return eqx.apply_updates(params, updates), new, state

    state = TX.init(params)
    params, stats, state = step(params, stats, state, X[0])
    kept = step(params, stats, state, X[1])
    assert same((params, stats), kept[:2])
    params, after, _ = step(*kept, X[2])
    assert not same(stats, after)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((params, after)))


def test_any_skip_counts_and_two_of_them_may_disagree() -> None:
    skip = clipjax.skip_nonfinite
    parts = {name: skip(optax.sgd(0.1)) for name in ("a", "b")}
    tx = optax.partition(parts, {"a": "a", "b": "b"})
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    _, fine = tx.update(params, tx.init(params), params)
    _, half = tx.update(params | {"b": NAN * params["b"]}, fine, params)
    for state, wanted in ((fine, 1), (half, 0)):
        chosen = clipjax.unless_skipped(state, new={"n": 1}, old={"n": 0})
        assert chosen["n"] == wanted


def test_a_restored_skip_of_an_optimizer_without_a_state_is_known() -> None:
    """A checkpoint has no place for a state that is empty."""
    tx = clipjax.skip_nonfinite(optax.sgd(0.1))
    _, state = tx.update(jnp.float32(NAN), tx.init(jnp.zeros(())))
    step, metrics, memory = state
    memory = {"in_a_row": memory.in_a_row}
    restored = {"step": step, "metrics": metrics, "memory": memory}
    assert clipjax.metrics(restored)["skip_nonfinite/skipped_last"] == 1
    assert clipjax.unless_skipped(restored, new=1.0, old=0.0) == 0
