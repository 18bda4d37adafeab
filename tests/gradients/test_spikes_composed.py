"""skip_spikes around and inside of other transformations, on several devices, and its arguments."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.support.trees import avals, random_tree

NAN, INF = math.nan, math.inf


def train(tx: Any, steps: int, bad: dict[int, float]) -> tuple[Any, Any]:
    """Steps of one scan on a quadratic, some of whose gradients are multiplied."""
    factors = np.ones(steps, np.float32)
    for at, factor in bad.items():
        factors[at] = factor
    params = random_tree(1)

    def one(carry: Any, factor: Any) -> Any:
        params, state = carry
        grads = jax.tree.map(lambda p: factor * (p + jnp.sign(p)), params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    state = tx.init(params)
    carry = jax.jit(lambda carry: jax.lax.scan(one, carry, jnp.asarray(factors))[0])((params, state))
    assert avals(carry[1]) == avals(state)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(carry[0]))
    return carry


BAD = {0: NAN, 20: 1e4, 21: INF, 30: 1e4}


def test_around_bounded() -> None:
    tx = clipjax.skip_spikes(
        clipjax.bounded(
            optax.adam(1e-2),
            clip=clipjax.clip_by_global_norm(1.0),
            project=clipjax.max_norm(0.5),
            nonfinite="propagate",
        ),
        window=16,
    )
    params, state = train(tx, 40, BAD)
    seen = clipjax.metrics(state)
    assert (int(seen["skip_spikes/skipped"]), int(seen["skip_spikes/nonfinite_count"])) == (4, 2)
    assert int(seen["clip_by_global_norm/steps"]) == 36
    assert int(seen["clip_by_global_norm/nonfinite_count"]) == 0
    assert np.linalg.norm(np.asarray(params["dense"]["kernel"], np.float64), axis=0).max() <= 0.5


def test_inside_and_around_multi_steps() -> None:
    # Judged as accumulated: of 5 pairs of steps before the bad one, 4 are enough.
    tx = optax.MultiSteps(clipjax.skip_spikes(optax.sgd(1e-2), window=8), 2).gradient_transformation()
    _, state = train(tx, 20, {11: 1e4})
    seen = clipjax.metrics(state)
    assert (int(seen["skip_spikes/steps"]), int(seen["skip_spikes/skipped"])) == (10, 1)
    # Judged one by one: the bad one is left out of the accumulation.
    tx = clipjax.skip_spikes(optax.MultiSteps(optax.sgd(1e-2), 2).gradient_transformation(), window=8)
    _, state = train(tx, 21, {11: 1e4})
    seen = clipjax.metrics(state)
    assert (int(seen["skip_spikes/steps"]), int(seen["skip_spikes/skipped"])) == (21, 1)
    assert int(state.inner.gradient_step) == 10


def test_masked_judges_what_is_left() -> None:
    inner = clipjax.skip_spikes(optax.sgd(0.01), window=8)
    tx = optax.masked(inner, {"dense": True, "scale": False})
    params = random_tree(1)
    state, update = tx.init(params), jax.jit(tx.update)
    for i in range(10):
        grads = jax.tree.map(np.asarray, random_tree(i))
        grads["scale"] = np.float32(NAN if i == 9 else 1e6)
        _, state = update(grads, state, params)
    assert int(state.inner_state.skipped) == 0
    grads["dense"] = jax.tree.map(lambda g: np.float32(1e6) * g, grads["dense"])
    updates, state = update(grads, state, params)
    assert int(state.inner_state.skipped) == 1
    assert not np.any(updates["dense"]["kernel"])


def test_devices_skip_together() -> None:
    tx = clipjax.skip_spikes(optax.identity(), window=4, axis_name="devices")
    whole = clipjax.skip_spikes(optax.identity(), window=4)
    states = jax.vmap(lambda _: tx.init(np.zeros(2, np.float32)))(np.arange(3))
    state = whole.init(np.zeros((3, 2), np.float32))
    shares = np.random.default_rng(0).random((3, 2)).astype(np.float32)
    update, update_whole = jax.jit(jax.vmap(tx.update, axis_name="devices")), jax.jit(whole.update)
    for i, factor in enumerate([1.0, 1.1, 0.9, 500.0, 1.0, NAN]):
        grads = shares.copy()
        grads[i % 3] *= factor  # on one device only
        updates, states = update(grads, states)
        expected, state = update_whole(grads, state)
        np.testing.assert_array_equal(updates, expected)
        for field in ("skipped", "taken", "nonfinite_count"):
            assert list(getattr(states, field)) == 3 * [int(getattr(state, field))]
    assert int(state.skipped) == 2


def test_extra_arguments_reach_the_optimizer() -> None:
    def update(updates: Any, state: Any, params: Any = None, *, factor: Any) -> Any:
        return jax.tree.map(lambda u: factor * u, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx, one = clipjax.skip_spikes(inner), np.ones((), np.float32)
    assert float(jax.jit(tx.update)(one, tx.init(one), factor=3.0)[0]) == 3


def test_the_state_holds_the_window_and_no_more() -> None:
    state = clipjax.skip_spikes(optax.identity(), window=100).init(np.zeros(2, np.float32))
    rings = [field for field, leaf in state._asdict().items() if np.shape(leaf) == (100,)]
    assert rings == ["norms", "losses"]
    assert set(clipjax.metrics(state)) == {
        f"skip_spikes/{field}" for field in state._fields if field not in (*rings, "inner")
    }
    assert clipjax.metrics(state)["skip_spikes/skipped_last"].dtype == np.int32


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"window": 1.5}, TypeError, "window must be an int, got 1.5"),
        ({"window": True}, TypeError, "window must be an int, got True"),
        ({"warmup_steps": 0}, ValueError, "warmup_steps must be at least 1, got 0"),
        ({"warmup_steps": 129}, ValueError, "warmup_steps must be at most window=128, got 129"),
        ({"max_consecutive": 0}, ValueError, "max_consecutive must be at least 1, got 0"),
        ({"max_consecutive": 2.0}, TypeError, "max_consecutive must be an int, got 2.0"),
        ({"z_threshold": -1}, ValueError, "z_threshold must be at least 0, got -1"),
        ({"optimizer": 1.0}, TypeError, "optimizer must be an optax.GradientTransformation, got 1.0"),
        ({"optimizer": clipjax.max_norm(1.0)}, ValueError, "optimizer: .* projects weights"),
    ],
)
def test_what_cannot_work_is_an_error(options: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        clipjax.skip_spikes(**{"optimizer": optax.identity(), **options})
