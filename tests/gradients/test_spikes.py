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
from tests.support.trees import avals, random_tree, same_bits

NAN, INF = math.nan, math.inf


def gradients(norms: Any) -> Any:
    """A stacked tree of two leaves whose norm at each step is the given one."""
    norms = np.asarray(norms, np.float32)
    return {"a": jnp.asarray(norms * np.float32(0.6)), "b": jnp.asarray(norms[:, None] * np.float32(0.8))}


@functools.partial(jax.jit, static_argnums=0)
def run(tx: Any, grads: Any, state: Any) -> tuple[Any, Any]:
    """All steps in one scan; returns the last state and, of each step, the updates and the metrics."""

    def one(state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state)
        return state, (updates, clipjax.metrics(state))

    return jax.lax.scan(one, state, grads)


def start(tx: Any) -> Any:
    return tx.init({"a": jnp.zeros(()), "b": jnp.zeros(1)})


def follow(tx: Any, norms: Any, state: Any = None) -> tuple[Any, dict[str, np.ndarray], np.ndarray]:
    """The last state, the metrics of each step without their prefix, and which steps were skipped."""
    state, (updates, seen) = run(tx, gradients(norms), start(tx) if state is None else state)
    own = {k.removeprefix("skip_spikes/"): np.asarray(v) for k, v in seen.items() if k.startswith("skip_sp")}
    skipped = np.diff(own["skipped"], prepend=own["skipped"][0] - (own["skipped_in_a_row"][0] > 0)) > 0
    still = (np.asarray(updates["a"]) == 0) & (np.asarray(updates["b"])[:, 0] == 0)
    np.testing.assert_array_equal(still, skipped | (np.asarray(norms) == 0))
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


@pytest.mark.parametrize(("window", "warmup"), [(1, 1), (2, None), (7, 3), (16, None), (16, 16), (128, None)])
def test_verdicts_are_those_of_the_oracle(window: int, warmup: int | None) -> None:
    tx = clipjax.skip_spikes(optax.identity(), 3.0, window=window, warmup_steps=warmup)
    rng = np.random.default_rng(window)
    norms = ordinary(300, window) * np.where(rng.random(300) < 0.1, 50, 1).astype(np.float32)
    norms[rng.random(300) < 0.05] = 0
    norms[rng.random(300) < 0.1] = NAN
    norms[[0, 50]] = NAN, INF
    _, own, skipped = follow(tx, norms)
    # What it sees are norms of float32 leaves, not the numbers themselves: an ulp from here to there.
    expected = oracle(own["norm"], 3.0, window, warmup or max(1, window // 2))
    assert 0 < skipped.sum() < 300
    np.testing.assert_allclose(own["norm"], norms, rtol=3e-7)
    np.testing.assert_array_equal(skipped, [v[0] for v in expected])
    judged = np.isfinite(own["norm"])
    np.testing.assert_allclose(
        own["z"][judged], np.array([v[1] for v in expected])[judged], rtol=2e-5, atol=2e-5
    )
    np.testing.assert_allclose(own["threshold"], [v[2] for v in expected], rtol=1e-6)
    assert own["nonfinite_count"][-1] == np.sum(~np.isfinite(norms))
    assert own["steps"][-1] == 300


@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("when", [0, 5, 40])
def test_a_hundred_nonfinite_steps_leave_no_trace(bad: float, when: int) -> None:
    tx = clipjax.skip_spikes(optax.adam(1e-3), window=16)
    norms = ordinary(60)
    norms[50] = 1e4
    with_bad = np.insert(norms, when, np.full(100, bad))
    clean, own, skipped = follow(tx, norms)
    state, own_bad, skipped_bad = follow(tx, with_bad)
    assert list(np.flatnonzero(skipped)) == [50]
    kept = np.delete(np.arange(160), np.arange(when, when + 100))
    np.testing.assert_array_equal(skipped_bad[kept], skipped)
    for key in ("norm", "z", "threshold", "taken"):
        np.testing.assert_array_equal(own_bad[key][kept], own[key])
    for field in ("norm", "z", "threshold", "norms", "taken", "inner", "skipped_in_a_row"):
        assert same_bits(getattr(state, field), getattr(clean, field)), field
    assert (int(state.steps), int(state.skipped), int(state.nonfinite_count)) == (160, 101, 100)
    assert own_bad["skipped_in_a_row"][when + 99] == 100


def test_a_skipped_step_freezes_the_inner_state_and_the_next_goes_on() -> None:
    tx = clipjax.skip_spikes(
        optax.chain(clipjax.clip_by_global_norm(1.0), optax.adam(1e-3)), window=8, warmup_steps=4
    )
    before, _, _ = follow(tx, ordinary(6))
    after, own, skipped = follow(tx, [1e5], before)
    assert skipped.all()
    assert same_bits(after.inner, before.inner)
    assert own["z"] > 6
    assert own["norm"] > own["threshold"] > 0
    last, _, skipped = follow(tx, [1.0], after)
    assert not skipped.any()
    once, _, _ = follow(tx, [1.0], before)
    assert same_bits(last.inner, once.inner)


def test_one_spike_does_not_hide_the_next() -> None:
    norms = ordinary(128, spread=0.1)
    norms[[100, 101, 110]] = 1000, 100, 10
    _, _, skipped = follow(clipjax.skip_spikes(optax.identity()), norms)
    assert list(np.flatnonzero(skipped)) == [100, 101, 110]
    # Mean and standard deviation would have let the second and third pass.
    assert norms[:101].mean() + 6 * norms[:101].std() > 100


@pytest.mark.parametrize("window", [8, 32, 128])
def test_a_lasting_change_of_level_is_accepted_after_half_a_window(window: int) -> None:
    norms = np.concatenate([ordinary(2 * window, spread=0.1), 100 * ordinary(2 * window, 1, 0.1)])
    _, own, skipped = follow(clipjax.skip_spikes(optax.identity(), window=window), norms)
    assert not skipped[: 2 * window].any()
    given_in = 2 * window + window // 2 + 1
    assert skipped[2 * window : 2 * window + window // 4].all()
    assert not skipped[given_in:].any()
    assert own["skipped_in_a_row"].max() <= window // 2 + 1
    # And downwards nothing is ever skipped.
    _, _, skipped = follow(clipjax.skip_spikes(optax.identity(), window=window), norms[::-1])
    assert not skipped.any()


def test_gradients_that_are_mostly_zero_are_taken() -> None:
    norms = np.where(np.arange(200) % 10 == 9, ordinary(200), 0)
    _, own, skipped = follow(clipjax.skip_spikes(optax.identity(), window=8), norms)
    assert not skipped.any()
    assert own["taken"][-1] == 20


def test_verdicts_do_not_change_with_the_scale_of_the_gradients() -> None:
    norms = ordinary(100)
    norms[[70, 90]] = 30, 300
    tx = clipjax.skip_spikes(optax.identity(), window=16)
    verdicts = [follow(tx, norms * np.float32(scale))[2] for scale in (2.0**-60, 1.0, 2.0**60)]
    assert verdicts[0].sum() == 2
    np.testing.assert_array_equal(verdicts[0], verdicts[1])
    np.testing.assert_array_equal(verdicts[2], verdicts[1])


@pytest.mark.parametrize("spread", [0.02, 0.3, 1.6])
def test_ordinary_norms_are_taken_however_much_they_vary(spread: float) -> None:
    norms = ordinary(4000, spread=spread)
    assert not follow(clipjax.skip_spikes(optax.identity()), norms)[2].any()
    # The same statistics of the norms themselves would skip one step in thirty of the last.
    plain = [np.median(np.abs(norms[i : i + 128] - np.median(norms[i : i + 128]))) for i in range(3872)]
    above = norms[128:] > [np.median(norms[i : i + 128]) + 6 * 1.4826 * plain[i] for i in range(3872)]
    assert (above.mean() > 1 / 30) == (spread == 1.6)


def test_equal_norms_do_not_make_their_neighbours_outliers() -> None:
    tx = clipjax.skip_spikes(optax.identity(), window=8)
    _, _, skipped = follow(tx, [1.0] * 8 + [1.3] + [1.0] * 8 + [1.4])
    assert list(np.flatnonzero(skipped)) == [17]  # exp(6 * 0.05) = 1.35


def test_a_threshold_may_be_infinite_zero_traced_or_a_schedule() -> None:
    norms = np.append(ordinary(20), 1e6).astype(np.float32)
    never = clipjax.skip_spikes(optax.identity(), INF, window=8)
    assert not follow(never, norms)[2].any()
    above_the_median = follow(clipjax.skip_spikes(optax.identity(), 0, window=8), norms)[2]
    assert 3 < above_the_median.sum() < 17
    # A schedule counts all steps, not the norms in the window.
    late = clipjax.skip_spikes(optax.identity(), lambda step: jnp.where(step < 20, INF, 6.0), window=8)
    with_nans = np.insert(norms, 5, [NAN, NAN])
    with_nans[19:21] = 1e6
    assert list(np.flatnonzero(follow(late, with_nans)[2])) == [5, 6, 20, 22]

    @jax.jit
    def traced(z: Any) -> Any:
        tx = clipjax.skip_spikes(optax.identity(), z, window=8)
        return jax.lax.scan(lambda s, g: (tx.update(g, s)[1], None), start(tx), gradients(norms))[0].skipped

    assert (int(traced(INF)), int(traced(6.0))) == (0, 1)

    tx = optax.inject_hyperparams(clipjax.skip_spikes, static_args=("window", "optimizer"))(
        optax.identity(), z_threshold=6.0, window=8
    )
    state = tx.init({"a": jnp.zeros(()), "b": jnp.zeros(1)})
    for factor in (6.0, INF):
        state.hyperparams["z_threshold"] = jnp.asarray(factor)
        assert int(run(tx, gradients(norms), state)[0].inner_state.skipped) == (factor == 6)


def test_float64_and_huge_gradients() -> None:
    with jax.enable_x64(True):
        tx = clipjax.skip_spikes(optax.identity(), window=4)
        state = tx.init(jnp.zeros(2))
        for norm in (1e200, 1.1e200, 0.9e200, 1e306):
            updates, state = tx.update(jnp.array([norm, 0.0]), state)
        assert state.norms.dtype == np.float64
        assert int(state.skipped) == 1
        np.testing.assert_array_equal(updates, 0.0)
    # A norm beyond the largest float32 is infinite to a state in float32.
    tx = clipjax.skip_spikes(optax.identity(), window=4)
    _, state = tx.update(jnp.full(2, 3e38), tx.init(jnp.zeros(2)))
    assert (int(state.nonfinite_count), int(state.taken)) == (1, 0)


# --------------------------------------------------------------------------------------------------
# Composition.


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
    tx = optax.MultiSteps(clipjax.skip_spikes(optax.adam(1e-2), window=8), 2).gradient_transformation()
    _, state = train(tx, 20, {11: 1e4})
    seen = clipjax.metrics(state)
    assert (int(seen["skip_spikes/steps"]), int(seen["skip_spikes/skipped"])) == (10, 1)
    # Judged one by one: the bad one is left out of the accumulation.
    tx = clipjax.skip_spikes(optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(), window=8)
    _, state = train(tx, 21, {11: 1e4})
    seen = clipjax.metrics(state)
    assert (int(seen["skip_spikes/steps"]), int(seen["skip_spikes/skipped"])) == (21, 1)
    assert int(state.inner.gradient_step) == 10


def test_masked_judges_what_is_left() -> None:
    inner = clipjax.skip_spikes(optax.sgd(0.01), window=8)
    tx = optax.masked(inner, {"dense": True, "scale": False})
    params = random_tree(1)
    state = tx.init(params)
    for i in range(10):
        grads = random_tree(i)
        grads["scale"] = jnp.asarray(NAN if i == 9 else 1e6)
        updates, state = jax.jit(tx.update)(grads, state, params)
    assert int(state.inner_state.skipped) == 0
    grads["dense"] = jax.tree.map(lambda g: 1e6 * g, grads["dense"])
    updates, state = jax.jit(tx.update)(grads, state, params)
    assert int(state.inner_state.skipped) == 1
    assert not np.any(updates["dense"]["kernel"])


def test_devices_skip_together() -> None:
    tx = clipjax.skip_spikes(optax.identity(), window=4, axis_name="devices")
    whole = clipjax.skip_spikes(optax.identity(), window=4)
    states = jax.vmap(lambda _: tx.init(jnp.zeros(2)))(jnp.arange(3))
    state = whole.init(jnp.zeros((3, 2)))
    shares = np.random.default_rng(0).random((3, 2)).astype(np.float32)
    update = jax.vmap(tx.update, axis_name="devices")
    for i, factor in enumerate([1.0, 1.1, 0.9, 500.0, 1.0, NAN]):
        grads = shares.copy()
        grads[i % 3] *= factor  # on one device only
        updates, states = update(jnp.asarray(grads), states)
        expected, state = whole.update(jnp.asarray(grads), state)
        np.testing.assert_array_equal(updates, expected)
        for field in ("skipped", "taken", "nonfinite_count"):
            assert list(getattr(states, field)) == 3 * [int(getattr(state, field))]
    assert int(state.skipped) == 2


def test_extra_arguments_reach_the_optimizer() -> None:
    def update(updates: Any, state: Any, params: Any = None, *, factor: Any) -> Any:
        return jax.tree.map(lambda u: factor * u, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx = clipjax.skip_spikes(inner)
    assert float(tx.update(jnp.ones(()), tx.init(jnp.ones(())), factor=3.0)[0]) == 3


def test_the_state_holds_the_window_and_no_more() -> None:
    state = start(clipjax.skip_spikes(optax.identity(), window=100))
    assert state.norms.shape == (100,)
    others = [leaf for leaf in jax.tree.leaves(state) if leaf is not state.norms]
    assert all(leaf.shape == () for leaf in others)
    assert set(clipjax.metrics(state)) == {
        f"skip_spikes/{key}"
        for key in (
            "steps",
            "skipped",
            "skipped_in_a_row",
            "nonfinite_count",
            "norm",
            "z",
            "threshold",
            "taken",
        )
    }


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"window": 0}, ValueError, "window must be at least 1, got 0"),
        ({"window": 1.5}, TypeError, "window must be an int, got 1.5"),
        ({"window": True}, TypeError, "window must be an int, got True"),
        ({"warmup_steps": 0}, ValueError, "warmup_steps must be at least 1, got 0"),
        ({"warmup_steps": 129}, ValueError, "warmup_steps must be at most window=128, got 129"),
        ({"z_threshold": -1}, ValueError, "z_threshold must be at least 0, got -1"),
        ({"optimizer": 1.0}, TypeError, "optimizer must be an optax.GradientTransformation, got 1.0"),
        ({"optimizer": clipjax.max_norm(1.0)}, ValueError, "optimizer: .* projects weights"),
    ],
)
def test_what_cannot_work_is_an_error(options: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        clipjax.skip_spikes(**{"optimizer": optax.identity(), **options})
