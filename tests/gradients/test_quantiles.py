"""`autoclip` and `clip_by_quantile` do what their papers say."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from tests.gradients.norm_runs import (
    BAD,
    STEPS,
    check_against,
    clipped_steps,
    metric,
    runs,
    with_bad_steps,
)


def autoclip(norms, percentile=10, window=1000):
    pasts = [norms[max(0, i + 1 - window) : i + 1] for i in range(len(norms))]
    return [min(past[-1], np.percentile(past, percentile)) for past in pasts]


def quantile_rule(norms, quantile=0.5, learning_rate=0.2, initial_max_norm=1.0):
    bound, after = initial_max_norm, []
    for n in norms:
        after.append(min(n, bound))
        bound *= math.exp(-learning_rate * ((n <= bound) - quantile))
    return after


AUTOCLIP: list[dict[str, Any]] = [
    {},
    {"percentile": 37.5, "window": 7},
    {"percentile": 90.0, "window": 64},
    {"percentile": 0.0, "window": STEPS - len(BAD)},  # just as long as the run
    {"percentile": 50.0, "window": 2},
]
# Each step is the largest of its window.
NEVER = [
    {"percentile": 100.0, "window": 13},
    {"window": 1},
]
QUANTILE: list[dict[str, Any]] = [
    {},
    {"quantile": 0.9, "learning_rate": 0.05, "initial_max_norm": 30.0},
]


def test_autoclip_follows_the_paper() -> None:
    stacks = with_bad_steps()
    done = runs(
        {str(options): clipjax.autoclip(**options) for options in AUTOCLIP + NEVER},
        stacks,
    )
    for options in AUTOCLIP + NEVER:
        check_against(autoclip, done[str(options)], stacks, options)
    for options in AUTOCLIP:
        assert (clipped_steps(done[str(options)].state) >= 15).all()
    for options in NEVER:
        assert (clipped_steps(done[str(options)].state) == 0).all()
    assert done[str(AUTOCLIP[1])].state.memory.values.shape == (3, 7)


def test_the_quantile_rule_follows_the_paper() -> None:
    stacks = with_bad_steps()
    done = runs(
        {str(options): clipjax.clip_by_quantile(**options) for options in QUANTILE},
        stacks,
    )
    for options in QUANTILE:
        check_against(quantile_rule, done[str(options)], stacks, options)


@jax.jit
def track(quantile: Any, rate: Any, start: Any, norms: Any) -> Any:
    """The bounds of the quantile rule over gradients of one entry, and the next one."""
    tx = clipjax.clip_by_quantile(quantile, learning_rate=rate, initial_max_norm=start)

    def one(state: Any, norm: Any) -> Any:
        state = tx.update(norm, state)[1]
        return state, metric(state, "threshold")

    state, bounds = jax.lax.scan(one, tx.init(jnp.zeros(())), norms)
    return bounds, state.memory.max_norm


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("start", [0.1, 100.0])
def test_the_quantile_rule_tracks_its_quantile(quantile: float, start: float) -> None:
    """From far off to within 10% after 200 rounds; so does the share inside."""
    norms = np.exp(0.2 * np.random.default_rng(5).standard_normal(3000)).astype(
        np.float32
    )
    bounds = np.asarray(track(quantile, 0.2, start, norms)[0], np.float64)
    np.testing.assert_allclose(
        np.exp(np.log(bounds[200:]).mean()), np.quantile(norms, quantile), rtol=0.1
    )
    np.testing.assert_allclose((norms <= bounds)[200:].mean(), quantile, atol=0.03)


def test_a_norm_at_the_bound_counts_as_inside() -> None:
    """The norm of one entry is exact, as is the comparison: one ulp more is outside."""
    at = np.float32(4)
    for norm, inside in ((at, 1), (np.nextafter(at, np.float32(5)), 0)):
        after = track(0.25, 0.5, at, np.full(1, norm))[1]
        np.testing.assert_allclose(
            after, 4 * math.exp(-0.5 * (inside - 0.25)), rtol=1e-6
        )


def test_the_quantile_rule_recovers_from_steps_beyond_every_float() -> None:
    limits = np.finfo(np.float32)
    bounds = track(0.5, 1e4, 1.0, np.ones(4, np.float32))[0]
    np.testing.assert_array_equal(bounds, [1, limits.tiny, limits.max, limits.tiny])
