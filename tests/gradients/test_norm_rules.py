"""Thresholds for the whole tree that follow past norms: each step is clipped as the rule's paper says.

`autoclip`, `zclip`, `clip_by_lognormal` and `clip_by_quantile` against their oracles in plain Python.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from tests.support import norm_rules
from tests.support.norm_rules import STEPS, Run, leaves_of_norm, runner, sequence

RULES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[dict[str, Any]]]] = {
    "autoclip": (
        clipjax.autoclip,
        norm_rules.autoclip,
        [
            {},
            {"percentile": 37.5, "window": 7},
            {"percentile": 90.0, "window": 64},
            # As long as the run, one less, and where there is nothing to clip to.
            {"window": STEPS},
            {"window": STEPS - 1},
            {"percentile": 100.0, "window": 13},
            {"window": 1},
        ],
    ),
    "zclip": (
        clipjax.zclip,
        norm_rules.zclip,
        [
            {},
            {"mode": "mean", "z_threshold": 1.5},
            {"mode": "percentile", "z_threshold": 1.0, "decay": 0.9},
            {"clip_factor": 0.6, "warmup_steps": 5},
            {"warmup_steps": 0},
            {"update_on_spike": False, "mode": "percentile", "warmup_steps": 10},
            {"max_norm": 0.5, "mode": "mean", "eps": 0.0},
        ],
    ),
    "clip_by_lognormal": (
        clipjax.clip_by_lognormal,
        norm_rules.lognormal,
        [{}, {"std_factor": 0.5, "decay": 0.8}, {"max_norm": 1.0}],
    ),
    "clip_by_quantile": (
        clipjax.clip_by_quantile,
        norm_rules.quantile,
        [{}, {"quantile": 0.9, "learning_rate": 0.05, "initial_max_norm": 30.0}],
    ),
}
MORE: dict[str, list[dict[str, Any]]] = {
    "autoclip": [{"percentile": 0.0}, {"percentile": 50.0, "window": 2}],
    "zclip": [{"clip_factor": 1.7, "warmup_steps": 2}, {"update_on_spike": False}, {"max_norm": 1.0}],
}
CASES = [
    pytest.param(name, options, id=f"{name}-{options}", marks=marks)
    for variants, marks in (({name: rule[2] for name, rule in RULES.items()}, ()), (MORE, pytest.mark.full))
    for name in variants
    for options in variants[name]
]
NEVER = ({"percentile": 100.0, "window": 13}, {"window": 1})  # this step is the largest of its window


@functools.cache
def program(name: str, more: bool) -> Callable[[Any], dict[str, Run]]:
    variants = MORE[name] if more else RULES[name][2]
    return runner({str(options): RULES[name][0](**options) for options in variants})


@functools.cache
def runs(name: str, seed: int, more: bool = False) -> dict[str, Run]:
    return program(name, more)(leaves_of_norm(sequence(seed), seed))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("name", "options"), CASES)
def test_it_follows_its_oracle(name: str, options: dict[str, Any], seed: int) -> None:
    done = runs(name, seed, options in MORE.get(name, []))[str(options)]
    expected = np.array(RULES[name][1](done.norms, **options))
    np.testing.assert_allclose(done.clipped, expected, rtol=1e-5)
    if seed < 2 and options not in NEVER:
        assert (expected < done.norms * (1 - 1e-3)).sum() >= 5, "the sequence asks nothing of it"
    assert (done.clipped <= done.thresholds).all()


def test_what_a_warm_up_leaves_is_its_mean_and_standard_deviation() -> None:
    tx, norms = clipjax.zclip(), sequence(3, 25).astype(np.float32)
    state, update = tx.init(norms[0]), jax.jit(tx.update)
    for norm in norms:
        _, state = update(norm, state)
        assert state.threshold == np.inf
    exact = norms.astype(np.float64)
    np.testing.assert_allclose([state.mean, state.std], [exact.mean(), exact.std()], rtol=1e-6)
    assert np.isfinite(update(norms[0], state)[1].threshold)


def test_a_window_as_long_as_the_run_is_the_whole_history() -> None:
    done = runs("autoclip", 1)
    long, exact, short = (done[str(o)] for o in ({}, {"window": STEPS}, {"window": STEPS - 1}))
    np.testing.assert_array_equal(long.clipped, exact.clipped)
    assert exact.state.history.shape == (STEPS,)
    assert short.clipped[-1] != exact.clipped[-1]


@pytest.mark.parametrize("options", NEVER, ids=str)
def test_the_hundredth_percentile_never_clips(options: dict[str, Any]) -> None:
    assert runs("autoclip", 0)[str(options)].steps_clipped == 0


@jax.jit
def track(q: Any, rate: Any, start: Any, norms: Any) -> Any:
    """The thresholds of the quantile rule over gradients of one entry, and the last state."""
    tx = clipjax.clip_by_quantile(q, learning_rate=rate, initial_max_norm=start)

    def one(state: Any, norm: Any) -> Any:
        state = tx.update(norm, state)[1]
        return state, state.threshold

    state, thresholds = jax.lax.scan(one, tx.init(jnp.zeros(())), norms)
    return thresholds, state


@pytest.mark.parametrize("q", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("start", [0.1, 100.0])
def test_the_quantile_rule_tracks_its_quantile(q: float, start: float) -> None:
    """From a start that is far off, to within 10% after 200 rounds; and so is the share of steps below it."""
    norms = np.exp(0.2 * np.random.default_rng(5).standard_normal(3000)).astype(np.float32)
    thresholds = np.asarray(track(q, 0.2, start, norms)[0], np.float64)
    settled = np.exp(np.mean(np.log(thresholds[200:])))
    np.testing.assert_allclose(settled, np.quantile(norms, q), rtol=0.1)
    np.testing.assert_allclose((norms <= thresholds)[200:].mean(), q, atol=0.03)


def test_a_norm_at_the_threshold_of_the_quantile_rule_counts_as_below_it() -> None:
    """Norms of one entry are exact, and so is the comparison: one ulp more is above."""
    at, above = np.float32(3), np.nextafter(np.float32(3), np.float32(4))
    for norm, count in ((at, 1), (above, 0)):
        _, state = track(0.25, 0.5, at, np.full(3000, norm)[:1])
        np.testing.assert_allclose(state.max_norm, 3 * math.exp(-0.5 * (count - 0.25)), rtol=1e-6)


def test_the_quantile_rule_recovers_from_steps_that_overshoot_every_float() -> None:
    norms = np.array([1.0, 1.0, 1.0, 1.0], np.float32)
    thresholds, _ = track(0.5, 1e4, 1.0, norms)
    limits = np.finfo(np.float32)
    np.testing.assert_array_equal(thresholds, [1, limits.tiny, limits.max, limits.tiny])


def test_the_threshold_that_is_shown_is_rounded_up() -> None:
    """So that no norm that was kept is above it: here the median lies between two floats."""
    tx, above = clipjax.autoclip(50.0, window=2), np.nextafter(np.float32(1), np.float32(2))
    state, update = tx.init(above), jax.jit(tx.update)
    for norm in (np.float32(1), above):
        _, state = update(norm, state)
    assert state.threshold == above
