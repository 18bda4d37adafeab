"""Optax's wrappers, and the states and containers of Flax and Orbax."""

import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax

W = np.array([[3.0, 4.0], [0.0, 12.0]], np.float32)
PARAMS = {"w": W / 20, "b": np.zeros(2, np.float32)}
GRADS = {"w": W, "b": np.zeros(2, np.float32)}
CLIP, PROJECTION = clipjax.clip_by_global_norm(1.0), clipjax.max_norm(0.5)
TX = optax.chain(CLIP, optax.sgd(1.0))
INJECTED = optax.inject_hyperparams(clipjax.clip_by_global_norm)
WRAPPERS: dict[str, Any] = {
    "MultiSteps": optax.MultiSteps(TX, 1).gradient_transformation(),
    "masked": optax.masked(TX, clipjax.matching("w")),
    "partition": optax.partition(
        {"a": TX, "b": optax.set_to_zero()}, {"w": "a", "b": "b"}
    ),
    "inject_hyperparams": optax.chain(INJECTED(max_norm=1.0), optax.scale(-1.0)),
    "injected schedule": optax.chain(
        INJECTED(lambda step: 1.0 + step), optax.scale(-1.0)
    ),
    "apply_if_finite": optax.apply_if_finite(TX, 3),
    "named_chain": optax.named_chain(("clip", CLIP), ("step", optax.sgd(1.0))),
    "flatten": optax.flatten(TX),
    "conditionally": optax.transforms.conditionally_transform(
        TX, lambda step: step >= 0
    ),
    "skip": clipjax.skip_nonfinite(TX),
    "bounded": clipjax.bounded(optax.sgd(1.0), clip=CLIP, nonfinite="zero"),
}


def test_wrappers_of_optax_take_the_same_step_and_show_metrics() -> None:
    @jax.jit
    def steps() -> Any:
        return {
            name: tx.update(GRADS, tx.init(PARAMS), PARAMS)
            for name, tx in WRAPPERS.items()
        }

    for name, (updates, state) in steps().items():
        np.testing.assert_allclose(updates["w"], -W / 13, rtol=3e-6, err_msg=name)
        found = clipjax.metrics(state)
        np.testing.assert_allclose(
            found["clip_by_global_norm/norm"], 13.0, rtol=1e-6, err_msg=name
        )


def test_the_memory_of_each_leaf_is_mapped_like_a_parameter() -> None:
    adagc = clipjax.adagc()
    kinds = optax.tree.map_params(
        adagc, lambda x: "p", adagc.init(PARAMS), transform_non_params=lambda x: "n"
    )
    assert jax.tree.leaves(kinds.memory.gammas) == ["p", "p"]
    nn = pytest.importorskip("flax.linen")
    # One value for each box.
    boxed = {"w": nn.Partitioned(PARAMS["w"], names=(None, "x"))}
    found = optax.tree.map_params(
        adagc, lambda _, spec: spec, adagc.init(boxed), nn.get_partition_spec(boxed)
    )
    assert found.memory.gammas == nn.get_partition_spec(boxed)


def test_the_memory_of_each_leaf_is_not_sharded_like_a_flax_parameter() -> None:
    nn = pytest.importorskip("flax.linen")
    boxed = {
        "kernel": nn.Partitioned(jnp.ones((4, 3)), ("data", "model")),
        "bias": jnp.ones(3),
    }
    specs = nn.get_partition_spec(clipjax.adagc().init(boxed))
    assert jax.tree.leaves(specs.memory.gammas) == [jax.sharding.PartitionSpec()] * 2
    # Masked boxes are empty.
    for patterns, shapes in (
        (["kernel"], [()]),
        (["bias"], [()]),
        (["*"], [(), ()]),
    ):
        tx = optax.masked(clipjax.adagc(), clipjax.matching(*patterns))
        _, state = tx.update(boxed, tx.init(boxed))
        assert [
            x.shape for x in jax.tree.leaves(state.inner_state.memory.gammas)
        ] == shapes


def test_the_function_of_a_projection_under_transformations_of_jax() -> None:
    apply = PROJECTION.apply
    expected = jax.jit(apply)(PARAMS)

    @jax.jit
    def branches(i: Any, params: Any) -> Any:
        chosen = jax.lax.switch(i, [apply, lambda p: p], params)
        kept = jax.lax.cond(i == 0, apply, lambda p: p, params)
        return (
            chosen,
            kept,
            jax.checkpoint(apply)(params),
            jax.vmap(apply)({"w": jnp.stack([W / 20] * 2)}),
        )

    chosen, kept, checked, many = branches(0, PARAMS)
    for found in (chosen, kept, checked):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected
        )
    np.testing.assert_allclose(many["w"][1], expected["w"], rtol=1e-6)
    np.testing.assert_array_equal(branches(1, PARAMS)[0]["w"], PARAMS["w"])
    for function in (apply, jax.jit(apply)):
        projected = clipjax.project(function).apply(PARAMS)
        jax.tree.map(np.testing.assert_array_equal, projected, apply(PARAMS))


def test_flax_states_train_and_show_metrics() -> None:
    pytest.importorskip("flax")
    from flax.training.train_state import TrainState

    tx = clipjax.bounded(
        optax.sgd(1.0), clip=CLIP, project=PROJECTION, nonfinite="skip"
    )
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    state = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))(
        state, GRADS
    )
    assert clipjax.metrics(state)["clip_by_global_norm/norm"] == 13
    assert np.linalg.norm(state.params["w"], axis=0).max() <= 0.5 * (1 + 1e-6)


def test_nnx_optimizers_train_and_show_metrics() -> None:
    nnx = pytest.importorskip("flax.nnx")
    from clipjax.flax import unit_axes

    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    projection = clipjax.max_norm(0.5, axes=unit_axes(model))
    tx = clipjax.bounded(
        optax.sgd(1.0), clip=CLIP, project=projection, nonfinite="skip"
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        grads = nnx.grad(lambda model: jnp.sum(model(jnp.asarray(W)) ** 2))(model)
        optimizer.update(model, grads)

    step(model, optimizer)
    assert clipjax.metrics(optimizer)["clip_by_global_norm/steps"] == 1
    norms = np.linalg.norm(model.kernel[...], axis=0)
    assert norms.max() <= 0.5 * (1 + 1e-6)


def test_a_state_of_numpy_arrays_works_without_jit() -> None:
    for tx in (
        clipjax.autoclip(),
        clipjax.zclip(),
        clipjax.adagc(),
        clipjax.skip_spikes(optax.sgd(0.1)),
    ):
        state = jax.tree.map(np.asarray, tx.init(PARAMS))
        jax.tree.map(
            np.testing.assert_array_equal,
            tx.update(GRADS, state)[0],
            tx.update(GRADS, tx.init(PARAMS))[0],
        )


def test_orbax_restores_a_state(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    tx = clipjax.bounded(
        optax.adam(0.1),
        clip=[clipjax.autoclip(window=4), clipjax.adagc()],
        nonfinite="skip",
        accumulate=2,
    )
    _, state = jax.jit(tx.update)(GRADS, tx.init(PARAMS), PARAMS)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            tmp_path / "state", jax.eval_shape(tx.init, PARAMS)
        )
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert clipjax.metrics(restored).keys() == clipjax.metrics(state).keys()
    jax.tree.map(
        np.testing.assert_array_equal, pickle.loads(pickle.dumps(state)), state
    )
