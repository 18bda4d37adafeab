"""Optax's wrappers, and the states and containers of Flax, Equinox, Haiku and Orbax."""

import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.support import nnx_modes

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


def test_optimizers_that_wrap_others_train() -> None:
    def trained(tx: Any) -> float:
        def step(carry: Any, _: Any) -> Any:
            params, state = carry
            grads = jax.grad(lambda p: jnp.sum((p["w"] - 1) ** 2))(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, state), _ = jax.jit(
            lambda p: jax.lax.scan(step, (p, tx.init(p)), length=60)
        )(PARAMS)
        assert clipjax.metrics(state)["clip_by_global_norm/steps"] > 0
        return float(jnp.max(jnp.abs(params["w"] - 1)))

    from optax.contrib import muon, schedule_free

    half = optax.chain(clipjax.clip_by_global_norm(0.5), optax.sgd(0.2))
    assert trained(schedule_free(half, 0.2, b1=0.5)) < 0.3
    assert trained(optax.chain(clipjax.clip_by_global_norm(0.5), muon(0.05))) < 0.3
    fast = optax.LookaheadParams.init_synced(PARAMS)
    tx = optax.lookahead(half, sync_period=3, slow_step_size=0.5)
    state, grads = tx.init(fast), GRADS
    updates, state = jax.jit(tx.update)(grads, state, fast)
    np.testing.assert_allclose(updates.fast["w"], -0.1 * W / 13, rtol=3e-6)
    assert clipjax.metrics(state)["clip_by_global_norm/steps"] == 1


def test_states_can_be_mapped_by_what_they_hold() -> None:
    tx = clipjax.bounded(
        optax.adam(0.1),
        clip=[clipjax.zclip(), CLIP],
        project=PROJECTION,
        nonfinite="skip",
        accumulate=2,
    )
    kinds = optax.tree.map_params(
        tx, lambda x: "p", tx.init(PARAMS), transform_non_params=lambda x: "n"
    )
    # Of two leaves two moments, and the mean of gradients.
    assert jax.tree.leaves(kinds).count("p") == 6


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


@pytest.mark.parametrize("modes", nnx_modes.MODES)
def test_nnx_optimizers_train_and_show_metrics(modes: Any) -> None:
    nnx = pytest.importorskip("flax.nnx")
    from clipjax.flax import unit_axes

    with nnx_modes.without(modes):
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


def test_equinox_and_haiku_parameters() -> None:
    eqx, hk = pytest.importorskip("equinox"), pytest.importorskip("haiku")
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    tx = optax.chain(CLIP, optax.sgd(1.0), clipjax.max_norm(0.5, axes=1))
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model: Any, state: Any) -> Any:
        grads = eqx.filter_grad(lambda model: jnp.sum(jax.vmap(model)(W) ** 2))(model)
        updates, state = tx.update(
            grads, state, eqx.filter(model, eqx.is_inexact_array)
        )
        return eqx.apply_updates(model, updates), state

    model, state = step(model, state)
    assert clipjax.metrics(state)["clip_by_global_norm/steps"] == 1
    assert np.linalg.norm(model.layers[0].weight, axis=1).max() <= 0.5 * (1 + 1e-6)
    with pytest.raises(TypeError, match="pass only the arrays, of an Equinox module"):
        tx.init(model)

    params = hk.transform(lambda x: hk.Linear(3)(x)).init(jax.random.key(0), W)
    masked = optax.masked(CLIP, clipjax.matching("linear/w"))
    updates, state = masked.update(params, masked.init(params))
    np.testing.assert_array_equal(updates["linear"]["b"], params["linear"]["b"])
    assert clipjax.max_norm(0.5).apply(params)["linear"]["w"].shape == (2, 3)


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


def test_an_optax_checkpoint_is_resumed(tmp_path: Path) -> None:
    """Either by a clip whose state is Optax's, or with the clip's own state put in."""
    ocp = pytest.importorskip("orbax.checkpoint")
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    like_optax = optax.GradientTransformation(
        lambda params: optax.EmptyState(), CLIP.update
    )
    resuming = optax.chain(like_optax, optax.adam(0.1))
    ours = optax.chain(CLIP, optax.adam(0.1))

    def trained(tx: Any, state: Any, params: Any) -> Any:
        def step(carry: Any, i: Any) -> Any:
            params, state = carry
            grads = jax.tree.map(lambda w: (3 - i) * (w - 1), params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), np.arange(5))[0]

    params, old = jax.jit(lambda p: trained(theirs, theirs.init(p), p))(PARAMS)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", old)
        checkpointer.wait_until_finished()
        target = jax.eval_shape(resuming.init, PARAMS)
        restored = checkpointer.restore(tmp_path / "state", target)
        with pytest.raises(ValueError, match="mismatch"):
            checkpointer.restore(tmp_path / "state", jax.eval_shape(ours.init, PARAMS))

    @jax.jit
    def further(state: Any) -> Any:
        by_hand = (CLIP.init(PARAMS), *state[1:])
        return [
            trained(tx, each, params)
            for tx, each in ((theirs, state), (resuming, state), (ours, by_hand))
        ]

    expected, found, measured = further(restored)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for each in (found, measured):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6),
            (each[0], each[1][1:]),
            (expected[0], expected[1][1:]),
        )
    assert clipjax.metrics(measured[1])["clip_by_global_norm/steps"] == 5


def test_orbax_version_1_restores_a_bad_step(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint.experimental.v1")
    if not hasattr(ocp, "save"):
        pytest.skip("this Orbax has other names for save and load")
    tx = optax.chain(
        clipjax.record_norms("leaf", keep=4),
        clipjax.bounded(optax.adam(0.1), clip=CLIP, nonfinite="skip"),
    )
    update, state = jax.jit(tx.update), tx.init(PARAMS)
    for size in (1, np.nan, 1):
        _, state = update(jax.tree.map(lambda x, s=size: s * x, GRADS), state, PARAMS)
    ocp.save(tmp_path / "state", state)
    restored = ocp.load(tmp_path / "state", tx.init(PARAMS))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for each in (restored, update(GRADS, restored, PARAMS)[1]):
        (bad,) = clipjax.bad_steps(each)
        assert str(bad).startswith("step 1: norm nan; no group is finite")
    pairs = (
        (restored, state),
        (
            update(GRADS, restored, PARAMS),
            update(GRADS, state, PARAMS),
        ),
    )
    for a, b in pairs:
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert isinstance(x, jax.Array)
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_a_projection_is_printed_as_it_is_written() -> None:
    assert repr(clipjax.max_norm(1.0, axes=0)) == "clipjax.max_norm(1.0, axes=0)"
