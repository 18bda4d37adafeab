"""Skipping that begins, or ends, in the middle of a run: the checkpoint of the other kind goes on."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.serialization import from_bytes, msgpack_restore, to_bytes
from flax.training.train_state import TrainState

import clipjax
from tests.support.trees import avals, random_tree, same_bits

PLAIN = optax.chain(clipjax.clip_by_global_norm(1.0), optax.adam(1e-2))
SKIPPING = {
    "skip_nonfinite": clipjax.skip_nonfinite(PLAIN),
    "skip_spikes": clipjax.skip_spikes(PLAIN, window=8),
    "bounded": clipjax.bounded(optax.adam(1e-2), clip=clipjax.clip_by_global_norm(1.0), nonfinite="skip"),
}
PARAMS = random_tree(0)


def run(tx: Any, params: Any, state: Any, first: int, last: int, *, jit: bool = False) -> Any:
    """Steps one by one: without `jit` operation by operation, so that what is around them rounds nothing."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step) if jit else step
    for i in range(first, last):
        params, state = step(params, state, random_tree(i, scale=1 + 0.1 * math.sin(i)))
    return params, state


@functools.cache
def without() -> Any:
    """The run without skipping, after 8 steps and after 16."""
    half = run(PLAIN, PARAMS, PLAIN.init(PARAMS), 0, 8)
    return half, run(PLAIN, *half, 8, 16)


def through_flax(state: Any, like: Any, path: Path) -> Any:
    path.write_bytes(to_bytes(state))
    return from_bytes(like, path.read_bytes())


def through_orbax(state: Any, like: Any, path: Path) -> Any:
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), state)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path.absolute(), jax.tree.map(ocp.utils.to_shape_dtype_struct, like))


@pytest.mark.parametrize("through", [through_flax, through_orbax])
@pytest.mark.parametrize("name", SKIPPING)
def test_a_run_without_skipping_goes_on_with_it_and_back(name: str, through: Any, tmp_path: Path) -> None:
    tx, ((params, state), end) = SKIPPING[name], without()
    restored = through(state, PLAIN.init(PARAMS), tmp_path / "without")
    fresh = tx.init(params)
    begun = fresh._replace(inner=restored)
    assert avals(begun) == avals(fresh)
    after, skipping = run(tx, params, begun, 8, 16)
    assert same_bits((after, skipping.inner), end)
    assert (int(skipping.steps), int(skipping.skipped)) == (8, 0)
    # As one program with the rest of the step, XLA may round otherwise.
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7),
        run(tx, params, begun, 8, 16, jit=True)[0],
        after,
    )
    # And back, from a checkpoint with skipping.
    halfway, middle = run(tx, params, begun, 8, 12)
    kept = through(middle, tx.init(params), tmp_path / "with")
    assert same_bits(kept, middle)
    assert same_bits(run(PLAIN, halfway, kept.inner, 12, 16), end)


@pytest.mark.parametrize("name", SKIPPING)
def test_the_metrics_of_a_checkpoint_restored_without_a_target(name: str, tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    for inner in (PLAIN, optax.sgd(0.1)):  # the second has no state of its own
        tx = clipjax.skip_spikes(inner) if name == "skip_spikes" else clipjax.skip_nonfinite(inner)
        bad = jax.tree.map(lambda x: jnp.full_like(x, math.nan), PARAMS)
        state = tx.init(PARAMS)
        for _ in range(3):
            _, state = tx.update(bad, state, PARAMS)
        path = (tmp_path / str(inner is PLAIN)).absolute()
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, state)
        with ocp.StandardCheckpointer() as checkpointer:
            of_orbax = checkpointer.restore(path)
        for restored in (of_orbax, msgpack_restore(to_bytes(state))):
            assert isinstance(restored, dict)
            assert same_bits(clipjax.metrics(restored), clipjax.metrics(state))
            with pytest.raises(RuntimeError, match="3 steps in a row"):
                clipjax.raise_if_skipping(restored, 3)


# --------------------------------------------------------------------------------------------------
# How a loss comes to `update` in Flax.


@pytest.mark.parametrize("loss", [1.0, math.nan])
def test_a_train_state_is_given_its_loss_by_hand(loss: float) -> None:
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=SKIPPING["skip_nonfinite"])
    with pytest.raises(TypeError, match="loss"):
        state.apply_gradients(grads=PARAMS, loss=loss)

    @jax.jit
    def step(state: Any, grads: Any, loss: Any) -> Any:
        updates, opt_state = state.tx.update(grads, state.opt_state, state.params, loss=loss)
        params = optax.apply_updates(state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state)

    after = step(state, random_tree(1), loss)
    assert same_bits(after.params, PARAMS) == math.isnan(loss)
    assert clipjax.metrics(after)["skip_nonfinite/nonfinite_loss_count"] == math.isnan(loss)


@pytest.mark.parametrize("name", SKIPPING)
def test_an_nnx_optimizer_passes_the_loss_on(name: str) -> None:
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, SKIPPING[name], wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> None:
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads, loss=jnp.where(x[0, 0] > 1, math.inf, loss))

    for x, skipped in ((1.0, 0), (2.0, 1), (1.0, 1)):
        before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
        step(model, optimizer, jnp.full((4, 3), x))
        seen = clipjax.metrics(optimizer)
        assert same_bits(nnx.state(model, nnx.Param), before) == (x == 2)
        key = next(key for key in seen if key.endswith("/nonfinite_loss_count"))
        assert seen[key] == skipped


# --------------------------------------------------------------------------------------------------
# Around and inside of accumulation.


def accumulate(tx: Any, steps: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """The parameters and the state after steps of (grads, loss)."""
    update, params, state = jax.jit(tx.update), PARAMS, tx.init(PARAMS)
    for grads, loss in steps:
        updates, state = update(grads, state, params, loss=loss)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", SKIPPING)
def test_inside_of_accumulation_the_last_loss_of_each_round_counts(name: str) -> None:
    tx = optax.MultiSteps(SKIPPING[name], 2)
    grads = [random_tree(i) for i in range(6)]
    good, _ = accumulate(tx, [(grads[i], 1.0) for i in (0, 1, 4, 5)])
    for where, skipped in ((2, 0), (3, 1)):
        losses = [math.nan if i == where else 1.0 for i in range(6)]
        params, state = accumulate(tx, list(zip(grads, losses, strict=True)))
        assert (
            clipjax.metrics(state)[f"{'skip_nonfinite' if name == 'bounded' else name}/nonfinite_loss_count"]
            == skipped
        )
        # The accumulator starts anew after the round that was left out.
        assert same_bits(params, good) == (skipped == 1)


@pytest.mark.parametrize("name", ["skip_nonfinite", "skip_spikes"])
def test_around_accumulation_a_bad_micro_batch_is_left_out(name: str) -> None:
    kind = getattr(clipjax, name)
    tx = kind(optax.MultiSteps(PLAIN, 2).gradient_transformation())
    grads = [random_tree(i) for i in range(4)]
    good, clean = accumulate(tx, [(each, 1.0) for each in grads])
    bad = jax.tree.map(lambda x: jnp.full_like(x, math.nan), grads[0])
    for spoilt in ((bad, 1.0), (grads[3], math.nan)):
        steps = [(each, 1.0) for each in grads]
        params, state = accumulate(tx, [steps[0], spoilt, *steps[1:]])
        assert same_bits(params, good)
        assert same_bits(state.inner, clean.inner)
        assert int(state.skipped) == 1


def test_an_optax_chain_around_accumulation_drops_the_loss() -> None:
    """As it does with all extra arguments: `MultiSteps` is called itself, or is inside of what skips."""
    inside = optax.MultiSteps(clipjax.skip_nonfinite(PLAIN), 1)
    for tx, seen in ((inside, 1), (optax.chain(inside.gradient_transformation(), optax.identity()), 0)):
        _, state = accumulate(tx, [(random_tree(1), math.nan)])
        assert clipjax.metrics(state)["skip_nonfinite/skipped"] == seen
