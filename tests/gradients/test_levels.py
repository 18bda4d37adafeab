"""No threshold gets stuck: whatever the norms did before, later steps are clipped as by
a fresh clip at their level.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from tests.contract.members import FIRST, usual

# Every clip that follows the past, and the other forms of their rules.
FOLLOWING = [row for row in FIRST.values() if row.remembers]
# As fast as their window, or decay, which are slow by default.
QUICK = {
    "autoclip": clipjax.autoclip(window=100),
    "adagc": clipjax.adagc(decay=0.5),
}
RULES: dict[str, Any] = {
    **{row.name: QUICK.get(row.name) or usual(row.name) for row in FOLLOWING},
    "autoclip 90": clipjax.autoclip(90.0, window=40),
    "clip_by_quantile .9": clipjax.clip_by_quantile(0.9),
}
for mode, takes in itertools.product(("mean", "percentile", "adaptive"), (False, True)):
    name = f"zclip {mode}{'' if takes else ', no update'}"
    options: Any = {"mode": mode, "update_on_spike": takes}
    RULES[name] = clipjax.zclip(**options)
BEFORE, AFTER, LAST = 200, 1000, 400
LEVELS = (1.2, 3.0, 30.0, 1000.0, 1 / 3, 1 / 1000)
NOISES = (0.02, 0.1, 0.4)
# The shares of norms that are twice the level before; the others stay there.
SHARES = (0.4, 0.5, 0.7, 0.8, 0.95)


def pasts(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw past norms: zeros, masked batches, a pause, NaN, another level."""
    at = np.arange(BEFORE)
    noise = np.exp(0.1 * rng.standard_normal(BEFORE))
    return {
        "zeros at the start": np.where(at < 25, 0, noise),
        "zeros alone": np.zeros(BEFORE),
        "one in four masked": np.where(at % 4, noise, 0),
        "three in five masked": np.where(at % 5 < 3, 0, noise),
        "a pause": np.where(at < 50, noise, 0),
        "NaN": np.where(at % 3, noise, np.nan),
        "infinity, then zeros": np.where(at < 50, np.inf, 0),
    }


def rates(norms: np.ndarray) -> dict[str, np.ndarray]:
    """Return the share of the last steps that each rule clips in each run."""
    zero = jnp.zeros(())

    def one_step(states: Any, norm: Any) -> Any:
        done = {name: tx.update(norm, states[name], zero) for name, tx in RULES.items()}
        return {name: state for name, (_, state) in done.items()}, {
            name: g < norm for name, (g, _) in done.items()
        }

    @jax.jit
    @jax.vmap
    def over_steps(norms: Any) -> Any:
        return jax.lax.scan(
            one_step, {name: tx.init(zero) for name, tx in RULES.items()}, norms
        )[1]

    return {
        name: np.asarray(x)[:, -LAST:].mean(axis=1)
        for name, x in over_steps(norms.astype(np.float32)).items()
    }


def test_a_thousand_steps_later_they_clip_as_a_fresh_clip_does() -> None:
    rng, cases, runs, fresh = np.random.default_rng(0), [], [], []
    for noise in NOISES:
        level = np.exp(noise * rng.standard_normal(BEFORE + AFTER + LAST))
        each = [(1.0, name, norms) for name, norms in pasts(rng).items()]
        for factor in LEVELS:
            before = np.exp(noise * rng.standard_normal(BEFORE))
            each.append((factor, f"{factor:.4g} times higher", before))
        for share in SHARES:
            before = np.exp(noise * rng.standard_normal(BEFORE))
            factors = np.where(rng.random(level.shape) < share, 2, 1)
            each.append((factors, f"{share} of them twice as high", before))
        for factor, name, before in each:
            cases.append(f"{name}, noise {noise}")
            fresh.append(factor * level)
            runs.append(np.append(before, fresh[-1][BEFORE:]))
    found = rates(np.stack(runs + fresh))
    for rule in RULES:
        halves = np.split(found[rule], 2)
        for case, rate, alone in zip(cases, *halves, strict=True):
            # 400 steps, of which some are clipped in a row: 4 standard errors of a
            # share, and a run of five.
            error = np.sqrt(max(alone * (1 - alone), 0.01) / LAST)
            assert rate <= alone + 4 * error + 5 / LAST, (rule, case)


def test_zeros_at_every_phase_leave_no_trace() -> None:
    """A run with zeros is the run without them."""
    rules = {row.name: RULES[row.name] for row in FOLLOWING}
    rules["autoclip"] = clipjax.autoclip(window=20)

    @jax.jit
    def memories(runs: Any) -> Any:
        def one_step(states: Any, norm: Any) -> Any:
            return {k: tx.update(norm, states[k])[1] for k, tx in rules.items()}, None

        def last(norms: Any) -> Any:
            first = {k: tx.init(jnp.zeros(())) for k, tx in rules.items()}
            return {
                k: x.memory for k, x in jax.lax.scan(one_step, first, norms)[0].items()
            }

        return jax.vmap(last)(runs)

    phases = range(0, 75, 3)
    runs = np.exp(
        0.3 * np.stack([np.random.default_rng(i).standard_normal(90) for i in phases])
    ).astype(np.float32)
    mixed = np.stack(
        [np.insert(x, [i] * 30, 0) for i, x in zip(phases, runs, strict=True)]
    )
    jax.tree.map(np.testing.assert_array_equal, memories(runs), memories(mixed))


def test_a_fall_by_any_factor_leaves_no_threshold_at_0() -> None:
    """In float32, a step from 1e8 by the whole difference to 1 ends at 0."""
    txs = {
        (kind, decay): kind(decay=decay, **options)
        for kind, options in (
            (clipjax.zclip, {"warmup_steps": 1}),
            (clipjax.adagc, {"warmup_steps": 0}),
            (clipjax.clip_by_lognormal, {}),
        )
        for decay in (0, 1e-9, 0.4, 0.6)
    }

    @jax.jit
    @jax.vmap
    def clipped(norms: Any) -> Any:
        def one_step(states: Any, norm: Any) -> Any:
            done = [
                tx.update(norm, state)
                for tx, state in zip(txs.values(), states, strict=True)
            ]
            return [state for _, state in done], [x for x, _ in done]

        first = [tx.init(jnp.zeros(())) for tx in txs.values()]
        return jax.lax.scan(one_step, first, norms)[1]

    noise = np.exp(0.1 * np.random.default_rng(0).standard_normal(200))
    high = np.where(np.arange(200) < 20, np.array([[1e4], [1e8], [1e16]]), 1)
    for (kind, decay), values in zip(
        txs, clipped((high * noise).astype(np.float32)), strict=True
    ):
        assert (np.asarray(values) > 0.5).all(), (kind, decay)


AVERAGES = {0.9999: 1e-5, 0.999999: 5e-4}


@functools.cache
def long_averages() -> Any:
    """Return a million norms, and the memories after them for each decay."""
    txs = {
        decay: (
            clipjax.zclip(1e6, decay=decay, warmup_steps=1),
            clipjax.adagc(1e6, decay=decay, warmup_steps=0),
        )
        for decay in AVERAGES
    }
    norms = np.exp(0.3 * np.random.default_rng(0).standard_normal(1_000_000)).astype(
        np.float32
    )

    def step(states: Any, norm: Any) -> Any:
        return {
            decay: [
                tx.update(norm, state)[1]
                for tx, state in zip(txs[decay], each, strict=True)
            ]
            for decay, each in states.items()
        }, None

    first = {k: [tx.init(jnp.zeros(())) for tx in pair] for k, pair in txs.items()}
    return norms, jax.jit(lambda norms: jax.lax.scan(step, first, norms)[0])(norms)


@pytest.mark.parametrize("decay", AVERAGES)
def test_long_averages_stay_beside_float64(decay: float) -> None:
    """A million steps: in float32 the two shares of an average, decay and 1 - decay, do
    not add up to 1.
    """
    norms, memories = long_averages()
    (of_zclip, of_adagc), error = memories[decay], AVERAGES[decay]
    mean, variance = float(norms[0]), 0.0
    for norm in norms[1:].tolist():  # in float64
        mean += (1 - decay) * (norm - mean)
        variance += (1 - decay) * ((norm - mean) ** 2 - variance)
    np.testing.assert_allclose(of_zclip.memory.moments.mean, mean, rtol=error)
    np.testing.assert_allclose(
        of_zclip.memory.moments.std, np.sqrt(variance), rtol=error
    )
    np.testing.assert_allclose(of_adagc.memory.gammas, mean, rtol=error)
