"""What all clips that follow past norms guarantee, whatever their rule."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.gradients.norm_runs import (
    PARAMS,
    gradients_of,
    metric,
    norms_of,
    norms_with_spikes,
    runs,
)
from tests.support.trees import fan_in_or_all

# Short warm-ups, so that few steps take each rule through all that it does.
RULES: dict[str, Any] = {
    "autoclip": clipjax.autoclip(90.0, window=8),
    "clip_by_quantile": clipjax.clip_by_quantile(),
    "zclip": clipjax.zclip(warmup_steps=4),
    "zclip-mean": clipjax.zclip(warmup_steps=4, mode="mean"),
    "zclip-percentile": clipjax.zclip(warmup_steps=4, mode="percentile"),
    "clip_by_lognormal": clipjax.clip_by_lognormal(0.5),
    "adagc": clipjax.adagc(warmup_steps=4, warmup_max_norm=math.inf),
    "adagc-axes": clipjax.adagc(
        axes=fan_in_or_all, warmup_steps=4, warmup_max_norm=math.inf
    ),
}


def at(stacked: Any, i: int) -> Any:
    return jax.tree.map(lambda x: x[i], stacked)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@jax.jit
def step_of_all(grads: Any, states: Any) -> tuple[Any, Any]:
    done = {name: tx.update(grads, states[name]) for name, tx in RULES.items()}
    return {name: updates for name, (updates, _) in done.items()}, {
        name: s for name, (_, s) in done.items()
    }


def test_norms_that_are_not_finite_leave_no_trace() -> None:
    """In the warm-up, at its end and later: memories stay, and the updates are NaN."""
    stacked = gradients_of(norms_with_spikes(1)[:12], 1)
    states = {name: tx.init(PARAMS) for name, tx in RULES.items()}
    for i in range(12):
        before, grads = states, at(stacked, i)
        for value in (np.nan, np.inf, -np.inf, 1e25):  # the last: a norm beyond float32
            bad = {
                **grads,
                "kernel": np.where(np.eye(4, 3), np.float32(value), grads["kernel"]),
            }
            updates, states = step_of_all(bad, states)
            for name in RULES:
                assert bits(states[name].memory) == bits(before[name].memory), name
                assert np.isnan(updates[name]["kernel"]).any(), name
        _, states = step_of_all(grads, states)
        assert all(
            bits(states[name].memory) != bits(before[name].memory) for name in RULES
        )
    for state in states.values():
        assert metric(state, "nonfinite_count") == 12 * 4


def test_the_threshold_of_a_step_that_does_not_count_is_that_of_the_past() -> None:
    """Of methods that take in the norm before they compare it; what is not finite is an
    outlier. At first: infinity.
    """
    rules = {
        "autoclip": clipjax.autoclip(50.0),
        "lognormal": clipjax.clip_by_lognormal(2.0),
        "zclip": clipjax.zclip(),
    }
    values = (0.0, np.inf, np.nan)
    norms = np.float32([[value, 4, 5, 6, value] for value in values])
    done = runs(rules, norms, np.zeros((), np.float32))
    before = runs(rules, norms[:, :-1], np.zeros((), np.float32))["lognormal"]
    for each in done.values():
        assert (each.thresholds[:, 0] == np.inf).all()
    np.testing.assert_allclose(done["autoclip"].thresholds[:, -1], 5, rtol=1e-6)
    past = before.state.memory
    expected = np.exp(past.mean + 2 * past.std * [1, 0, 0])
    np.testing.assert_allclose(done["lognormal"].thresholds[:, -1], expected, rtol=1e-6)


def test_statistics_are_finite_at_every_scale() -> None:
    """Norms of 1e30 count as not finite; from all others the statistics recover. Equal
    norms are not clipped by a rounding of the statistics either.
    """
    usual = gradients_of(np.exp(0.3 * np.random.default_rng(0).standard_normal(20)))
    scales = np.array([0.0, 1e-30, 1e-17, 1e17, 1e30], np.float32)[:, None] ** (
        np.arange(20) < 10
    )
    stacks = {
        k: x * scales.reshape(5, 20, *[1] * (x.ndim - 1)) for k, x in usual.items()
    }
    one = gradients_of([1e-15, 0.3, 7.77, 1e15], 3)
    equal = jax.tree.map(lambda x: np.repeat(x[:, None], 20, axis=1), one)
    both = jax.tree.map(lambda *x: np.concatenate(x), stacks, equal)
    for name, done in runs(RULES, both).items():
        last = jax.tree.map(lambda x: x[:, 10:], done.updates)
        assert not any(
            np.isnan(x).any() for x in jax.tree.leaves((last, done.state.memory))
        ), name
        if name != "clip_by_quantile":  # the others never clip equal norms
            assert bits(jax.tree.map(lambda x: x[5:], done.updates)) == bits(equal)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_spike_is_clipped_in_every_dtype(dtype: str) -> None:
    usual = gradients_of(np.exp(0.1 * np.random.default_rng(0).standard_normal(30)))
    spike = jax.tree.map(lambda x: np.concatenate([x, 20 * x[:1]])[None], usual)
    with jax.enable_x64(dtype == "float64"):
        params, stacks = (
            jax.tree.map(lambda x: x.astype(dtype), tree) for tree in (PARAMS, spike)
        )
        for name, done in runs(RULES, stacks, params).items():
            assert {x.dtype.name for x in jax.tree.leaves(done.updates)} == {dtype}
            floats = {x.dtype.name for x in jax.tree.leaves(done.state.memory)} - {
                "int32"
            }
            assert floats == {"float64" if dtype == "float64" else "float32"}
            clipped = norms_of(at(done.updates, 0))
            assert clipped[-1] < 7, name
            if "adagc" not in name:  # whose thresholds are those of leaves
                assert (
                    0.98 * done.thresholds[0, -1]
                    < clipped[-1]
                    <= done.thresholds[0, -1]
                )


def test_max_norm_may_be_a_schedule_and_relative_bound_too() -> None:
    falling = optax.linear_schedule(2.0, -1.0, 15)  # 0 from step 10 on
    rules = {
        "zclip": clipjax.zclip(max_norm=falling),
        "clip_by_lognormal": clipjax.clip_by_lognormal(max_norm=falling),
        "adagc": clipjax.adagc(warmup_max_norm=falling),
        "relative": clipjax.adagc(
            lambda step: jnp.where(step < 6, 1.0, 0.5), warmup_steps=0, decay=0
        ),
    }
    done = runs(
        rules,
        jax.tree.map(lambda x: np.repeat(x, 12, axis=0)[None], gradients_of([5.0])),
    )
    fallen = np.maximum(2 - 0.2 * np.arange(12), 0)
    halves = 5 * 0.5 ** np.maximum(np.arange(12) - 5, 0)
    for name in rules:
        expected = halves if name == "relative" else fallen
        np.testing.assert_allclose(
            norms_of(at(done[name].updates, 0)), expected, rtol=1e-5, atol=1e-6
        )


def test_derivatives_are_those_of_the_step() -> None:
    """Through the step's norm, which moves the bound; past norms are constants."""
    usual = gradients_of(np.exp(0.3 * np.random.default_rng(2).standard_normal(8)))
    with jax.enable_x64(True):
        usual = jax.tree.map(lambda x: x.astype(np.float64), usual)
        spike, rng = jax.tree.map(lambda x: 4 * x[0], usual), np.random.default_rng(9)
        direction = {name: rng.standard_normal(x.shape) for name, x in spike.items()}

        def step(shifts: Any, states: Any, grads: Any) -> Any:
            """Shift each rule's gradients by its own share of the direction."""
            losses, after = [], {}
            for (name, tx), t in zip(RULES.items(), shifts, strict=True):
                moved = jax.tree.map(lambda g, d, t=t: g + t * d, grads, direction)
                updates, after[name] = tx.update(moved, states[name])
                losses.append(
                    sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(updates))
                )
            return losses, after

        @jax.jit
        def slopes(t: Any, *args: Any) -> Any:
            """Return losses, states, and derivatives, in both modes."""
            shifts = [t] * len(RULES)
            done, along = jax.jvp(
                lambda x: step(x, *args), (shifts,), ([jnp.ones_like(t)] * len(RULES),)
            )
            return *done, *along, jax.grad(lambda x: sum(step(x, *args)[0]))(shifts)

        start = states = {name: tx.init(spike) for name, tx in RULES.items()}
        for i in range(8):
            states = slopes(0.0, states, at(usual, i))[1]
        found = jax.device_get(slopes(0.0, states, spike))
        _, after, forward, of_states, backward = found
        assert all(metric(x, "scale") < 1 for x in after.values())

        ahead, behind = (slopes(t, states, spike)[0] for t in (1e-5, -1e-5))
        central = (np.array(ahead) - np.array(behind)) / 2e-5
        np.testing.assert_allclose(forward, central, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(backward, central, rtol=1e-6, atol=1e-8)
        floats = [x for x in jax.tree.leaves(of_states) if x.dtype != jax.dtypes.float0]
        assert floats
        assert not any(np.any(x) for x in floats)
        for before in (start, states):
            *_, of_zeros = slopes(0.0, before, jax.tree.map(np.zeros_like, spike))
            assert np.isfinite(of_zeros).all()


def test_hyperparameters_can_be_injected() -> None:
    """As schedules, and changed in the state from step to step, which is donated."""
    inject = optax.inject_hyperparams
    rules = {
        "autoclip": inject(clipjax.autoclip)(
            percentile=optax.linear_schedule(100.0, 0.0, 2), window=16
        ),
        "zclip": inject(clipjax.zclip)(warmup_steps=3, max_norm=100.0),
        "clip_by_lognormal": inject(clipjax.clip_by_lognormal)(
            max_norm=optax.linear_schedule(8.0, 0.0, 4)
        ),
        "clip_by_quantile": inject(clipjax.clip_by_quantile)(initial_max_norm=2.0),
        "adagc": inject(clipjax.adagc)(warmup_steps=1, warmup_max_norm=math.inf),
    }
    states = {name: tx.init(PARAMS) for name, tx in rules.items()}
    states["zclip"].hyperparams["z_threshold"] = jnp.zeros(())
    states["adagc"].hyperparams["relative_bound"] = jnp.full((), 0.5)

    @functools.partial(jax.jit, donate_argnums=1)
    def update(grads: Any, states: Any) -> Any:
        done = {
            name: tx.update(grads, states[name], PARAMS) for name, tx in rules.items()
        }
        norms = {name: optax.tree.norm(updates) for name, (updates, _) in done.items()}
        return norms, {name: state for name, (_, state) in done.items()}

    expected = {
        "autoclip": [3, 1, 1, 1],  # percentiles 100, 50, 0 and 0
        "zclip": [3, 1, 4, 8 / 3],  # the mean of the warm-up
        "clip_by_lognormal": [3, 1, 4, 2],
        "clip_by_quantile": [2, 1, 2, 2 * math.exp(0.1)],
        "adagc": [3, 1, 2.98 / 2, 2.9651 / 2],  # half of gamma
    }
    direction = gradients_of([1.0])
    for i, norm in enumerate((3.0, 1.0, 4.0, 9.0)):
        norms, states = update(
            jax.tree.map(lambda x, n=norm: np.float32(n) * x[0], direction), states
        )
        for name in rules:
            np.testing.assert_allclose(
                norms[name], expected[name][i], rtol=1e-5, err_msg=f"{name} {i}"
            )


def test_a_window_may_be_a_hyperparameter() -> None:
    """Its size is that of the state, so that a traced number is no obstacle."""
    skips = optax.inject_hyperparams(
        lambda window: clipjax.skip_spikes(optax.sgd(1.0), window=window)
    )(window=8)
    clips = optax.inject_hyperparams(clipjax.autoclip)(window=8)
    for tx in (skips, clips):
        state = tx.init(jnp.zeros(3))
        _, state = jax.jit(tx.update)(jnp.ones(3), state)
        assert float(state.hyperparams["window"]) == 8
        assert 8 in [x.shape[-1] for x in jax.tree.leaves(state) if x.ndim]
