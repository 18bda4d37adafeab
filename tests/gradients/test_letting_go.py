"""What happens when steps are skipped again and again: letting go, or raising on the host."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.serialization import msgpack_restore, to_bytes
from flax.training.train_state import TrainState

import clipjax
from clipjax import raise_if_skipping
from tests.support.trees import same_bits

NAN = math.nan


def run(tx: Any, values: Any, state: Any = None) -> tuple[Any, np.ndarray]:
    """The last state and the updates of steps whose gradients have these values."""

    def one(state: Any, value: Any) -> Any:
        updates, state = tx.update(value[None], state)
        return state, updates[0]

    state = tx.init(np.zeros(1, np.float32)) if state is None else state
    state, updates = jax.jit(lambda state: jax.lax.scan(one, state, np.float32(values)))(state)
    return state, np.asarray(updates)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_it_lets_go_as_optax_does(most: int) -> None:
    """Bit for bit as `optax.apply_if_finite`, whatever the order of good and bad steps."""
    rng = np.random.default_rng(most)
    bad = np.repeat(rng.random(60) < 0.5, rng.integers(1, 8, 60))
    values = np.where(bad, rng.choice([NAN, math.inf, -math.inf], len(bad)), 1.0)
    inner = optax.stateless(
        lambda updates, params: jax.tree.map(lambda u: jnp.where(jnp.isfinite(u), -u, 7), updates)
    )
    inner = optax.chain(inner, optax.scale_by_schedule(lambda count: 1.0 / (1 + count)))
    ours, updates = run(clipjax.skip_nonfinite(inner, max_consecutive=most), values)
    theirs, expected = run(optax.apply_if_finite(inner, most), values)
    assert same_bits(updates, expected)
    assert same_bits(ours.inner, theirs.inner_state)
    assert int(ours.nonfinite_count) == int(theirs.total_notfinite) == bad.sum()
    assert 0 < int(ours.skipped) == np.sum(updates == 0) < bad.sum()


def test_after_enough_skipped_steps_all_are_taken_until_one_is_fine() -> None:
    tx = clipjax.skip_nonfinite(optax.sgd(1.0), max_consecutive=2)
    state, updates = run(tx, [1, NAN, NAN, NAN, NAN, 1, NAN])
    assert list(np.isnan(updates)) == [False, False, False, True, True, False, False]
    assert list(updates[[0, 1, 2, 5, 6]]) == [-1, 0, 0, -1, 0]
    assert (int(state.skipped), int(state.nonfinite_count), int(state.skipped_in_a_row)) == (3, 5, 1)


@pytest.mark.parametrize("spike", [1e4, NAN, "loss"], ids=str)
def test_skip_spikes_lets_go(spike: Any) -> None:
    tx = clipjax.skip_spikes(optax.sgd(1.0), window=64, max_consecutive=3)
    state, _ = run(tx, np.linspace(0.9, 1.1, 40))
    taken = []
    for _ in range(6):
        grads, extra = np.float32([1 if spike == "loss" else spike]), {}
        if spike == "loss":
            extra["loss"] = NAN
        updates, state = tx.update(grads, state, **extra)
        taken.append(bool(updates[0] != 0))
    assert taken == [False] * 3 + [True] * 3
    seen = clipjax.metrics(state)
    by_reason = ("nonfinite_count", "nonfinite_loss_count", "norm_spike_count", "loss_spike_count")
    assert sorted(int(seen[f"skip_spikes/{key}"]) for key in by_reason) == [0, 0, 0, 6]
    assert (int(state.skipped), int(state.skipped_in_a_row), int(state.skipped_last)) == (3, 3, 0)
    # What is not finite does not enter the windows, though it is taken.
    assert int(state.taken) == (46 if spike == 1e4 else 40)
    _, state = tx.update(np.ones(1, np.float32), state)
    assert int(state.skipped_in_a_row) == 0


def test_the_number_may_be_injected() -> None:
    for skip in (clipjax.skip_nonfinite, clipjax.skip_spikes):
        static = ("optimizer",) if skip is clipjax.skip_nonfinite else ("optimizer", "window")
        tx = optax.inject_hyperparams(skip, static_args=static)(optax.sgd(1.0), max_consecutive=3)
        state, _ = run(tx, [NAN] * 6)
        assert int(state.inner_state.skipped) == 3
        state.hyperparams["max_consecutive"] = jnp.asarray(5)
        assert int(run(tx, [NAN] * 6, state)[0].inner_state.skipped) == 5


# --------------------------------------------------------------------------------------------------
# raise_if_skipping


class Model(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(1))


@functools.cache
def stuck(steps: int = 3) -> Any:
    return run(optax.chain(optax.identity(), clipjax.skip_nonfinite(optax.sgd(1.0))), [1.0] + [NAN] * steps)[
        0
    ]


def of_nnx() -> Any:
    model = Model()
    optimizer = nnx.Optimizer(model, clipjax.skip_nonfinite(optax.sgd(1.0)), wrt=nnx.Param)
    for value in (1.0, NAN, NAN, NAN):
        optimizer.update(model, jax.tree.map(lambda w, v=value: jnp.full_like(w, v), nnx.state(model)))
    return optimizer


def stacked() -> Any:
    """The states of two replicas under `vmap`, of which one is stuck."""
    tx = clipjax.skip_nonfinite(optax.sgd(1.0))
    states = jax.vmap(lambda _: tx.init(np.zeros(1, np.float32)))(np.arange(2))
    for values in ([1, 1], [1, NAN], [1, NAN], [1, NAN]):
        _, states = jax.vmap(tx.update)(np.float32(values)[:, None], states)
    return states


FORMS: dict[str, Callable[[], Any]] = {
    "a state": stuck,
    "masked": lambda: optax.MaskedState(stuck()),
    "accumulated": lambda: optax.MultiStepsState(*[jnp.zeros(())] * 2, stuck(), (), ()),
    "a train state": lambda: TrainState(0, None, {}, None, stuck()),
    "an nnx optimizer": of_nnx,
    "an nnx state": lambda: nnx.state(of_nnx()),
    "plain dicts": lambda: msgpack_restore(to_bytes(stuck())),
    "stacked": stacked,
}


@pytest.mark.parametrize("form", FORMS)
def test_it_raises_wherever_the_state_is_nested(form: str) -> None:
    state = FORMS[form]()
    raise_if_skipping(state, 4)
    expected = (
        r"^skip_nonfinite: 3 steps in a row were skipped, 3 of 4 in all; nonfinite_count: 3, "
        r"nonfinite_loss_count: 0$"
    )
    for most in (1, 3):
        with pytest.raises(RuntimeError, match=expected):
            raise_if_skipping(state, most)


def test_it_names_all_that_are_stuck_and_no_other() -> None:
    tx = optax.chain(
        clipjax.skip_nonfinite(optax.identity(), max_consecutive=2),
        clipjax.skip_spikes(clipjax.skip_nonfinite(optax.sgd(1.0))),
    )
    # The first lets go after two steps, but what it has skipped in a row stays until a step is fine.
    state, _ = run(tx, [1.0] + [NAN] * 6)
    with pytest.raises(RuntimeError) as error:
        raise_if_skipping(state, 2)
    assert str(error.value).splitlines() == [
        "skip_nonfinite: 2 steps in a row were skipped, 2 of 7 in all; nonfinite_count: 6, "
        "nonfinite_loss_count: 0",
        "skip_spikes: 4 steps in a row were skipped, 4 of 7 in all; nonfinite_count: 4, "
        "nonfinite_loss_count: 0, norm_spike_count: 0, loss_spike_count: 0",
    ]
    raise_if_skipping(run(tx, [1.0], state)[0], 1)


def test_nothing_is_lost_where_it_raises() -> None:
    tx = clipjax.skip_nonfinite(optax.sgd(1.0))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(w: Any, state: Any, value: Any) -> Any:
        updates, state = tx.update(jnp.full_like(w, value), state)
        return optax.apply_updates(w, updates), state

    w, state = jnp.zeros(3), tx.init(np.zeros(3, np.float32))

    def train() -> None:
        nonlocal w, state
        for value in (1.0, NAN, NAN, NAN):
            w, state = step(w, state, value)
            raise_if_skipping(state, 2)

    with pytest.raises(RuntimeError, match="2 steps in a row"):
        train()
    np.testing.assert_array_equal(w, -1)
    assert int(state.steps) == 3


def test_what_cannot_be_judged_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"^opt_state: there is no state of clipjax.skip_nonfinite or skip_s"
    ):
        raise_if_skipping(optax.adam(1e-3).init(np.zeros(1)), 3)
    with pytest.raises(ValueError, match="max_consecutive must be at least 1, got 0"):
        raise_if_skipping(stuck(), 0)
    with pytest.raises(TypeError, match="opt_state must be known: call raise_if_skipping outside jit"):
        jax.jit(lambda state: raise_if_skipping(state, 3))(stuck())
