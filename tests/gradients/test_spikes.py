"""skip_spikes: its verdicts against an oracle in NumPy, and what no run of bad steps may do to it."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.support.trees import same_bits

NAN, INF = math.nan, math.inf
CHUNK = 160  # of steps that one call of the compiled program goes through; the last one is filled up
INNER = {
    "identity": optax.identity(),
    "adam": optax.chain(clipjax.clip_by_global_norm(1.0), optax.adam(1e-3)),
}


def build(inner: str, window: int | None, z: Any, warmup: Any) -> Any:
    """A transformation with those arguments that are not None."""
    given = {"z_threshold": z, "window": window, "warmup_steps": warmup}
    return clipjax.skip_spikes(INNER[inner], **{k: v for k, v in given.items() if v is not None})


def gradients(norms: np.ndarray) -> Any:
    """A stacked tree of two leaves whose norm at each step is the given one."""
    return {"a": norms * np.float32(0.6), "b": norms[:, None] * np.float32(0.8)}


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(inner: str, window: int | None, z: Any, warmup: Any, grads: Any, counts: Any, state: Any) -> Any:
    """The steps that count, in one scan; returns the last state and, of each step, updates and metrics."""
    tx = build(inner, window, z, warmup)

    def one(state: Any, step: Any) -> Any:
        grads, counts = step
        updates, after = tx.update(grads, state)
        state = jax.tree.map(lambda new, old: jnp.where(counts, new, old), after, state)
        seen = clipjax.metrics(state)
        return state, (updates, {k: v for k, v in seen.items() if k.startswith("skip_spikes/")})

    return jax.lax.scan(one, state, (grads, counts))


def start(tx: Any) -> Any:
    return tx.init({"a": np.zeros((), np.float32), "b": np.zeros(1, np.float32)})


def follow(
    norms: Any,
    *,
    window: int | None = None,
    z: float | None = None,
    warmup: int | None = None,
    inner: str = "identity",
    state: Any = None,
) -> tuple[Any, dict[str, np.ndarray], np.ndarray]:
    """The last state, the metrics of each step without their prefix, and which steps were skipped."""
    norms = np.asarray(norms, np.float32)
    if state is None:
        state = start(build(inner, window, z, warmup))
    parts = []
    for first in range(0, len(norms), CHUNK):
        part = norms[first : first + CHUNK]
        filled = np.pad(part, (0, CHUNK - len(part)), constant_values=1)
        counts = np.arange(CHUNK) < len(part)
        state, steps = run(inner, window, z, warmup, gradients(filled), counts, state)
        parts.append(jax.tree.map(lambda x, kept=counts: np.asarray(x)[kept], steps))
    updates, seen = jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
    own = {k.removeprefix("skip_spikes/"): v for k, v in seen.items()}
    skipped = np.diff(own["skipped"], prepend=own["skipped"][0] - (own["skipped_in_a_row"][0] > 0)) > 0
    still = (updates["a"] == 0) & (updates["b"][:, 0] == 0)
    np.testing.assert_array_equal(still, skipped | (norms == 0))
    return state, own, skipped


def oracle(norms: Any, z_threshold: float, window: int, warmup: int) -> list[tuple[bool, float, float]]:
    """Of each step: whether it is skipped, its z, and the largest norm that it could have had."""
    past: list[float] = []
    verdicts = []
    for n in norms:
        z, threshold = 0.0, INF
        if len(past) >= warmup:
            logs = np.log(past[-window:])
            median = np.median(logs)
            std = max(1.4826 * np.median(np.abs(logs - median)), 0.05)
            z = (np.log(n) - median) / std if n > 0 else -INF if n == 0 else NAN
            threshold = np.exp(median + z_threshold * std)
        bad = not np.isfinite(n)
        verdicts.append((bad or z > z_threshold, z, threshold))
        if not bad and n > 0:
            past.append(float(n))
        past = past[-window:]
    return verdicts


def ordinary(count: int, seed: int = 0, spread: float = 0.3) -> np.ndarray:
    return np.exp(spread * np.random.default_rng(seed).standard_normal(count)).astype(np.float32)


full = pytest.mark.full


@pytest.mark.parametrize(
    ("window", "warmup", "z"),
    [
        (1, None, None),
        (7, 3, 3.0),
        (16, None, None),
        (128, None, None),
        pytest.param(1, 1, 3.0, marks=full),
        pytest.param(2, None, None, marks=full),
        pytest.param(16, 16, 3.0, marks=full),
    ],
)
def test_verdicts_are_those_of_the_oracle(window: int, warmup: int | None, z: float | None) -> None:
    rng = np.random.default_rng(window)
    norms = ordinary(300, window) * np.where(rng.random(300) < 0.1, 50, 1).astype(np.float32)
    norms[rng.random(300) < 0.05] = 0
    norms[rng.random(300) < 0.1] = NAN
    norms[[0, 50]] = NAN, INF
    _, own, skipped = follow(norms, window=None if window == 128 else window, z=z, warmup=warmup)
    # What it sees are norms of float32 leaves, not the numbers themselves: an ulp from here to there.
    expected = oracle(own["norm"], z or 6.0, window, warmup or max(1, window // 2))
    assert np.sum(~np.isfinite(norms)) < skipped.sum() < 300
    np.testing.assert_allclose(own["norm"], norms, rtol=3e-7)
    np.testing.assert_array_equal(skipped, [v[0] for v in expected])
    judged = np.isfinite(own["norm"])
    np.testing.assert_allclose(
        own["z_score"][judged], np.array([v[1] for v in expected])[judged], rtol=2e-5, atol=2e-5
    )
    np.testing.assert_allclose(own["threshold"], [v[2] for v in expected], rtol=1e-6)
    assert own["nonfinite_count"][-1] == np.sum(~np.isfinite(norms))
    assert own["steps"][-1] == 300


@functools.cache
def without_bad_steps() -> Any:
    norms = ordinary(60)
    norms[50] = 1e4
    return norms, *follow(norms, window=8, warmup=4, inner="adam")


@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("when", [0, 3, 40])
def test_a_hundred_nonfinite_steps_leave_no_trace(bad: float, when: int) -> None:
    norms, clean, own, skipped = without_bad_steps()
    with_bad = np.insert(norms, when, np.full(100, bad))
    state, own_bad, skipped_bad = follow(with_bad, window=8, warmup=4, inner="adam")
    assert list(np.flatnonzero(skipped)) == [50]
    kept = np.delete(np.arange(160), np.arange(when, when + 100))
    np.testing.assert_array_equal(skipped_bad[kept], skipped)
    for key in ("norm", "z_score", "threshold", "taken"):
        np.testing.assert_array_equal(own_bad[key][kept], own[key])
    for field in ("norm", "z_score", "threshold", "norms", "taken", "inner", "skipped_in_a_row"):
        assert same_bits(getattr(state, field), getattr(clean, field)), field
    assert (int(state.steps), int(state.skipped), int(state.nonfinite_count)) == (160, 101, 100)
    assert own_bad["skipped_in_a_row"][when + 99] == 100


def test_a_skipped_step_freezes_the_inner_state_and_the_next_goes_on() -> None:
    on = functools.partial(follow, window=8, warmup=4, inner="adam")
    before, _, _ = on(ordinary(6))
    after, own, skipped = on([1e5], state=before)
    assert skipped.all()
    assert same_bits(after.inner, before.inner)
    assert own["z_score"] > 6
    assert own["norm"] > own["threshold"] > 0
    last, _, skipped = on([1.0], state=after)
    assert not skipped.any()
    once, _, _ = on([1.0], state=before)
    assert same_bits(last.inner, once.inner)


def test_one_spike_does_not_hide_the_next() -> None:
    norms = ordinary(128, spread=0.1)
    norms[[100, 101, 110]] = 1000, 100, 10
    _, _, skipped = follow(norms)
    assert list(np.flatnonzero(skipped)) == [100, 101, 110]
    # Mean and standard deviation would have let the second and third pass.
    assert norms[:101].mean() + 6 * norms[:101].std() > 100


@pytest.mark.parametrize("window", [16, 128, pytest.param(8, marks=full), pytest.param(32, marks=full)])
def test_a_lasting_change_of_level_is_accepted_after_half_a_window(window: int) -> None:
    given = None if window == 128 else window
    norms = np.concatenate([ordinary(2 * window, spread=0.1), 100 * ordinary(2 * window, 1, 0.1)])
    _, own, skipped = follow(norms, window=given)
    assert not skipped[: 2 * window].any()
    given_in = 2 * window + window // 2 + 1
    assert skipped[2 * window : 2 * window + window // 4].all()
    assert not skipped[given_in:].any()
    assert own["skipped_in_a_row"].max() <= window // 2 + 1
    # And downwards nothing is ever skipped.
    assert not follow(norms[::-1], window=given)[2].any()


def test_gradients_that_are_mostly_zero_are_taken() -> None:
    norms = np.where(np.arange(200) % 10 == 9, ordinary(200), 0)
    _, own, skipped = follow(norms, window=16)
    assert not skipped.any()
    assert own["taken"][-1] == 20


def test_verdicts_do_not_change_with_the_scale_of_the_gradients() -> None:
    norms = ordinary(100)
    norms[[70, 90]] = 30, 300
    verdicts = [follow(norms * np.float32(scale), window=16)[2] for scale in (2.0**-60, 1.0, 2.0**60)]
    assert verdicts[0].sum() == 2
    np.testing.assert_array_equal(verdicts[0], verdicts[1])
    np.testing.assert_array_equal(verdicts[2], verdicts[1])


@pytest.mark.parametrize("spread", [0.02, 0.3, 1.6])
def test_ordinary_norms_are_taken_however_much_they_vary(spread: float) -> None:
    norms = ordinary(4000, spread=spread)
    assert not follow(norms)[2].any()
    # The same statistics of the norms themselves would skip one step in thirty of the last.
    windows = np.lib.stride_tricks.sliding_window_view(norms, 128)[:-1]
    medians = np.median(windows, axis=1)
    deviations = np.median(np.abs(windows - medians[:, None]), axis=1)
    above = norms[128:] > medians + 6 * 1.4826 * deviations
    assert (above.mean() > 1 / 30) == (spread == 1.6)


def test_equal_norms_do_not_make_their_neighbors_outliers() -> None:
    _, _, skipped = follow([1.0] * 8 + [1.3] + [1.0] * 8 + [1.4], window=16)
    assert list(np.flatnonzero(skipped)) == [17]  # exp(6 * 0.05) = 1.35


# --------------------------------------------------------------------------------------------------
# Thresholds of every kind.

UP_TO_A_SPIKE = np.append(ordinary(20), np.float32(1e6))


def test_a_threshold_may_be_infinite_zero_or_a_schedule() -> None:
    kinds = {
        "never": INF,
        "above the median": 0,
        # A schedule counts all steps, not the norms in the window.
        "late": lambda step: jnp.where(step < 20, INF, 6.0),
    }
    rules = {name: clipjax.skip_spikes(optax.identity(), z, window=8) for name, z in kinds.items()}
    norms = np.insert(UP_TO_A_SPIKE, 5, [NAN, NAN])
    norms[19:21] = 1e6

    @jax.jit
    def skipped(grads: Any) -> Any:
        def one(states: Any, grads: Any) -> Any:
            states = {name: tx.update(grads, states[name])[1] for name, tx in rules.items()}
            return states, {name: state.skipped for name, state in states.items()}

        return jax.lax.scan(one, {name: start(tx) for name, tx in rules.items()}, grads)[1]

    at = {name: list(np.flatnonzero(np.diff(x, prepend=0))) for name, x in skipped(gradients(norms)).items()}
    assert at["never"] == [5, 6]
    assert at["late"] == [5, 6, 20, 22]
    assert 5 < len(at["above the median"]) < 19


def test_a_norm_at_the_threshold_is_taken() -> None:
    """All norms are 1, whose logarithm and its exponential are exact, and so is the median."""
    _, own, skipped = follow([1.0] * 40, z=0.0, window=7, warmup=3)
    np.testing.assert_array_equal(own["norm"], 1)
    np.testing.assert_array_equal(own["threshold"][3:], 1)
    assert not skipped.any()


def test_a_threshold_may_be_traced_or_injected() -> None:
    for z in (INF, 6.0):
        assert int(follow(UP_TO_A_SPIKE, z=z, window=7, warmup=3)[0].skipped) == (z == 6)
    tx = optax.inject_hyperparams(clipjax.skip_spikes, static_args=("window", "optimizer"))(
        optax.identity(), z_threshold=6.0, window=8
    )
    state, update = start(tx), jax.jit(tx.update)
    for z in (6.0, INF):
        state.hyperparams["z_threshold"] = jnp.asarray(z)
        after, grads = state, gradients(UP_TO_A_SPIKE)
        for i in range(len(UP_TO_A_SPIKE)):
            _, after = update(jax.tree.map(lambda x, i=i: x[i], grads), after)
        assert int(after.inner_state.skipped) == (z == 6)


def test_float64_and_huge_gradients() -> None:
    tx = clipjax.skip_spikes(optax.identity(), window=4)
    with jax.enable_x64(True):
        state, update = tx.init(np.zeros(2)), jax.jit(tx.update)
        for norm in (1e200, 1.1e200, 0.9e200, 1e306):
            updates, state = update(np.array([norm, 0.0]), state)
        assert state.norms.dtype == np.float64
        assert int(state.skipped) == 1
        np.testing.assert_array_equal(updates, 0.0)
    # A norm beyond the largest float32 is infinite to a state in float32.
    huge = np.full(2, 3e38, np.float32)
    _, state = jax.jit(tx.update)(huge, tx.init(huge))
    assert (int(state.nonfinite_count), int(state.taken)) == (1, 0)


def test_a_norm_above_the_limit_is_a_spike_from_the_first_step_on() -> None:
    """The rule of runs that drop a step by a constant threshold; the schedule is of all steps."""
    tx = clipjax.skip_spikes(optax.sgd(1.0), jnp.inf, max_norm=lambda step: 10.0 - step)
    update, state = jax.jit(tx.update), tx.init(jnp.zeros(2))
    norms = [9.0, 11.0, 8.0, 7.5, 6.0, 1e-3, 4.0, 3.5, math.nan]
    for step, norm in enumerate(norms):
        updates, state = update(jnp.array([norm, 0.0]), state)
        skipped = not norm <= 10 - step
        assert int(state.skipped_last) == skipped
        assert (float(updates[0]) == 0) == skipped
    assert float(state.threshold) == 10 - 8
    assert int(state.norm_spike_count) == sum(norm > 10 - i for i, norm in enumerate(norms))
    assert int(state.nonfinite_count) == 1
    with pytest.raises(ValueError, match="max_norm must be at least 0, got -1"):
        clipjax.skip_spikes(optax.sgd(1.0), max_norm=-1)
