"""What `skip_nonfinite`, `skip_spikes` and `zero_nonfinite` skip and count."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from clipjax.gradients.skipping import SkipTransformation

INNER = optax.chain(
    clipjax.zclip(warmup_steps=2), optax.adam(lambda step: 0.1 / (1 + step))
)
SPIKES = clipjax.skip_spikes(optax.sgd(0.1), window=4, warmup_steps=2)
update_spikes = jax.jit(SPIKES.update)
WEIGHTS = {
    "w": np.ones(3, np.float32),
    "h": np.ones(2, np.float16),
    "n": np.arange(2),
    "none": None,
}


def gradients(size: float = 1.0, at: Any = None) -> Any:
    w = np.array([size, -size, 0.5 * size], np.float32)
    if at is not None:
        w[1] = at
    return {
        "w": w,
        "h": np.full(2, min(size, 1e3), np.float16),
        "n": np.zeros(2, np.int32),
        "none": None,
    }


def same(a: Any, b: Any) -> bool:
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def read(state: Any, *keys: str) -> list[float]:
    found = clipjax.metrics(state)
    name = next(iter(found)).partition("/")[0]
    return [float(found[f"{name}/{key}"]) for key in keys]


@pytest.mark.parametrize("skip", [clipjax.skip_nonfinite, clipjax.skip_spikes])
def test_a_skipped_step_returns_zeros_and_freezes_the_state(skip: Any) -> None:
    tx = skip(INNER)
    update = jax.jit(tx.update)
    state = tx.init(WEIGHTS)
    _, state = update(gradients(), state, WEIGHTS, loss=np.float32(1))
    bad = [
        (gradients(at=np.nan), 1.0),
        (gradients(at=-np.inf), 1.0),
        (gradients(), np.nan),
        (gradients(), np.inf),
    ]
    bad += [(gradients(at=3e19), 1.0)]  # its square is infinite in float32
    for i, (grads, loss) in enumerate(bad):
        updates, after = update(grads, state, WEIGHTS, loss=np.float32(loss))
        assert same(after.memory.past, state.memory.past), i
        assert same(after.memory.inner, state.memory.inner), i
        for x, p in zip(
            jax.tree.leaves(updates), jax.tree.leaves(WEIGHTS), strict=True
        ):
            assert x.shape == p.shape
            assert not np.any(x)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
            lambda x: (x.shape, x.dtype), state
        )
        state = after
        assert read(state, "skipped", "skipped_in_a_row", "skipped_last") == [
            i + 1,
            i + 1,
            1,
        ]
    assert read(state, "nonfinite_count", "nonfinite_loss_count", "steps") == [3, 2, 6]
    updates, state = update(gradients(), state, WEIGHTS, loss=np.float32(1))
    assert read(state, "skipped", "skipped_in_a_row", "skipped_last") == [5, 0, 0]
    # As if there had been two steps.
    plain, inner_update = INNER.init(WEIGHTS), jax.jit(INNER.update)
    for _ in range(2):
        expected, plain = inner_update(gradients(), plain, WEIGHTS)
    for a, b in zip(
        jax.tree.leaves((updates, state.memory.inner)),
        jax.tree.leaves((expected, plain)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-3 if a.dtype == np.float16 else 1e-6)


def test_max_consecutive_lets_steps_through_until_one_is_finite() -> None:
    tx = clipjax.skip_nonfinite(optax.sgd(1.0), max_consecutive=2)
    update, state, taken = jax.jit(tx.update), tx.init(np.zeros(2)), []
    for value in (1, np.nan, np.nan, np.nan, np.inf, 1, np.nan, 1):
        updates, state = update(np.array([value, 1.0], np.float32), state)
        taken.append(bool(updates[1] != 0))
    assert taken == [True, False, False, True, True, True, False, True]
    assert read(state, "skipped", "nonfinite_count") == [3, 5]


def test_a_step_is_told_as_skipped_after_bad_ones_were_let_through() -> None:
    """By a run that goes on without `max_consecutive`."""
    tx = clipjax.skip_nonfinite(optax.sgd(1.0), max_consecutive=2)
    update, state = jax.jit(tx.update), tx.init(np.zeros(1))
    bad = np.float32([np.nan])
    for _ in range(3):
        _, state = update(bad, state)
    _, state = clipjax.skip_nonfinite(optax.sgd(1.0)).update(bad, state)
    assert read(state, "skipped", "skipped_last", "skipped_in_a_row") == [3, 1, 1]


def z_scores(
    values: list[float], window: int, warmup: int, least: float
) -> list[float]:
    """How many deviations each value is above the median of logarithms before it."""
    scores = []
    for i, value in enumerate(values):
        past = np.log(values[max(0, i - window) : i]) if i else np.zeros(0)
        if min(i, window) < warmup:
            scores.append(0.0)
            continue
        middle = np.median(past)
        std = max(1.4826 * float(np.median(np.abs(past - middle))), least)
        scores.append((math.log(value) - middle) / std)
    return scores


def test_spikes_of_norms_and_losses_are_those_of_the_formula() -> None:
    rng = np.random.default_rng(1)
    norms = np.exp(rng.normal(scale=0.2, size=24)).tolist()
    losses = np.exp(rng.normal(scale=0.05, size=24)).tolist()
    norms[12], norms[13], losses[17] = 30.0, 40.0, 5.0
    tx = clipjax.skip_spikes(optax.sgd(1.0), z_threshold=7.0, window=8, warmup_steps=6)
    update, state = jax.jit(tx.update), tx.init(np.zeros(2))
    found: list[Any] = []
    for norm, loss in zip(norms, losses, strict=True):
        updates, state = update(
            np.array([norm, 0], np.float32), state, loss=np.float32(loss)
        )
        found.append(
            [
                bool(np.any(updates)),
                *read(state, "z_score", "loss_z_score", "norm", "loss"),
            ]
        )
    expected = z_scores(norms, 8, 6, 0.05), z_scores(losses, 8, 6, 0.01)
    taken, z, loss_z, norm, loss = (np.array(x) for x in zip(*found, strict=True))
    # Logarithms of float32, divided by 0.05 or 0.01.
    np.testing.assert_allclose(z, expected[0], atol=1e-4)
    np.testing.assert_allclose(loss_z, expected[1], atol=1e-4)
    np.testing.assert_allclose(norm, norms, rtol=1e-6)
    np.testing.assert_allclose(loss, losses, rtol=1e-6)
    assert taken.tolist() == [
        not (a > 7 or b > 7) for a, b in zip(*expected, strict=True)
    ]
    assert [i for i, x in enumerate(taken) if not x] == [12, 13, 17]
    assert read(state, "skipped", "norm_spike_count", "loss_spike_count") == [3, 2, 1]


def thresholds_of_trend(values: list[float], least: float) -> Any:
    """Return the value above which each one would be an outlier, by the docstring."""
    found = []
    for i in range(len(values)):
        y = np.asarray(values[max(0, i - 64) : i], float)
        k = len(y)
        if k < 16:
            found.append(np.inf)
            continue
        is_log = bool(np.all(y > 0))
        y = np.log(y) if is_log else y
        apart = k - k // 2
        slope = np.median(y[apart:] - y[: k - apart]) / apart
        e = y + slope * np.arange(k, 0, -1)
        level = max(np.median(e), np.median(y[-16:]))
        std = 1.4826 * np.median(np.abs(e - np.median(e)))
        floor = least * (1 if is_log else abs(level))
        std = max(std, floor)
        highest = level + 6 * (min(std, 0.5) if is_log else std)
        found.append(np.exp(highest) if is_log else highest)
    return found


def test_twenty_times_the_level_is_an_outlier_however_much_norms_vary() -> None:
    rng = np.random.default_rng(4)
    norms = np.exp(1.0 * rng.normal(size=100)).astype(np.float32)
    past = norms[:64].astype(float)
    wanted = thresholds_of_trend(norms.tolist(), 0.05)
    level = np.exp(np.median(np.log(past)))
    assert level < wanted[64] < 40 * level
    tx = clipjax.skip_spikes(optax.sgd(1.0))

    def step(state: Any, norm: Any) -> Any:
        _, state = tx.update(norm, state)
        return state, clipjax.metrics(state)["skip_spikes/threshold"]

    state = tx.init(jnp.zeros(()))
    found = jax.jit(lambda x: jax.lax.scan(step, state, x)[1])(norms)
    np.testing.assert_allclose(found, wanted, rtol=2e-4)


def test_the_trend_of_norms_and_losses_is_that_of_the_formula() -> None:
    """Norms that fall fifty times in 80 steps, and losses that become negative."""
    rng = np.random.default_rng(2)
    steps = np.arange(160)
    norms = np.exp(-0.05 * np.minimum(steps, 80) + 0.15 * rng.normal(size=160))
    losses = 2 - 0.02 * steps + 0.05 * rng.normal(size=160)
    norms[[30, 77]] *= 154
    losses[[50, 140]] += 3
    pairs = np.stack([norms, losses], 1).astype(np.float32)
    tx = clipjax.skip_spikes(optax.sgd(1.0))

    def step(state: Any, pair: Any) -> Any:
        _, state = tx.update(pair[:1], state, loss=pair[1])
        return state, clipjax.metrics(state)

    found = jax.jit(lambda x: jax.lax.scan(step, tx.init(x[0, :1]), x)[1])(pairs)
    for row, key, least in ((0, "threshold", 0.05), (1, "loss_threshold", 0.01)):
        wanted = thresholds_of_trend(pairs[:, row].tolist(), least)
        np.testing.assert_allclose(found[f"skip_spikes/{key}"], wanted, rtol=2e-4)
    skipped = np.flatnonzero(found["skip_spikes/skipped_last"])
    assert {30, 50, 77, 140} <= set(skipped.tolist())
    assert skipped.size <= 6


@pytest.mark.parametrize("times", [3.0, 30.0, 1000.0])
def test_a_new_level_is_taken_after_nine_steps(times: float) -> None:
    rng = np.random.default_rng(3)
    norms = np.exp(0.1 * rng.normal(size=400))
    norms[200:] *= times
    tx = clipjax.skip_spikes(optax.sgd(1.0))

    def step(state: Any, norm: Any) -> Any:
        _, state = tx.update(norm, state)
        return state, clipjax.metrics(state)["skip_spikes/skipped_last"]

    state = tx.init(jnp.zeros(()))
    skipped = jax.jit(lambda x: jax.lax.scan(step, state, x)[1])(np.float32(norms))
    assert not np.any(skipped[209:])
    assert np.all(skipped[200:207])


def test_losses_on_a_line_through_0_have_a_z_score() -> None:
    tx, w = clipjax.skip_spikes(optax.identity()), jnp.ones(1)
    state, update = tx.init(w), jax.jit(tx.update)
    for loss in range(-20, 1):
        _, state = update(w, state, w, loss=jnp.float32(loss))
    assert read(state, "loss_z_score", "skipped") == [0, 0]


def test_max_norm_and_a_new_level() -> None:
    tx = clipjax.skip_spikes(
        optax.sgd(1.0), window=6, max_norm=lambda step: jnp.where(step < 3, 2.0, 1e6)
    )
    update, state, taken = jax.jit(tx.update), tx.init(np.zeros(1)), []
    for norm in [1.0, 3.0, 1.0, 1.0, 1.0, 1.0] + [100.0] * 8:
        updates, state = update(np.array([norm], np.float32), state)
        taken.append(bool(updates[0] != 0))
    assert not taken[1]  # above max_norm, though there is no past yet
    first = taken.index(True, 6) - 6
    assert first in (3, 4)  # half of the window
    assert all(taken[6 + first :])


@pytest.mark.parametrize("skip", [clipjax.skip_nonfinite, clipjax.skip_spikes])
def test_the_loss_reaches_the_inner_transformation_and_must_be_a_scalar(
    skip: Any,
) -> None:
    def scaled_by_loss(
        updates: Any, state: Any, params: Any = None, *, loss: Any, **extra: Any
    ) -> Any:
        return jax.tree.map(lambda u: u * loss * extra["factor"], updates), state

    inner = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), scaled_by_loss
    )
    tx = skip(inner)
    ones = np.ones(2, np.float32)
    updates, _ = jax.jit(tx.update)(ones, tx.init(ones), loss=3, factor=2.0)
    np.testing.assert_array_equal(updates, [6, 6])
    jax.eval_shape(tx.update, ones, tx.init(ones), loss=jnp.bfloat16(1.5), factor=1.0)


def test_zero_nonfinite_zeroes_what_is_not_finite_and_counts() -> None:
    tx, clean = clipjax.zero_nonfinite(), gradients()
    update, state = jax.jit(tx.update), tx.init(WEIGHTS)
    for at, zeroed in ((None, 0), (np.nan, 1), (-np.inf, 2), (1e20, 2)):
        updates, state = update(gradients(at=at), state)
        w = gradients(at=at)["w"]
        np.testing.assert_array_equal(updates["w"], np.where(np.isfinite(w), w, 0))
        np.testing.assert_array_equal(updates["h"], clean["h"])
        assert read(state, "zeroed_entries", "nonfinite_steps") == [zeroed, zeroed]
    # 2^31 bad entries at once, which XLA counts without making them
    many = jax.jit(
        lambda x: tx.update(jnp.broadcast_to(x, (2**16, 2**15)), tx.init(x))[1]
    )(np.float32(np.nan))
    assert (
        read(many, "zeroed_entries")[0] > 2**31 - 200,
        read(many, "nonfinite_steps"),
    ) == (True, [1])
    z = np.array([1 + 2j, complex(np.nan, 1), complex(0, np.inf)], np.complex64)
    np.testing.assert_array_equal(tx.update(z, None)[0], [1 + 2j, 0, 0])


def test_a_skipped_step_keeps_the_sign_of_zero() -> None:
    weights = {"w": jnp.array([-0.0, 0.0, 1.0])}
    tx = clipjax.skip_nonfinite(optax.sgd(0.1))
    updates, _ = jax.jit(tx.update)(
        {"w": jnp.full(3, np.nan)}, tx.init(weights), weights
    )
    after = jax.jit(optax.apply_updates)(weights, updates)
    np.testing.assert_array_equal(np.signbit(after["w"]), [True, False, False])


def test_no_skip_has_a_conditional() -> None:
    """It would wait for the host on a GPU, and copy the state on a TPU."""
    inner = optax.chain(
        clipjax.zclip(), optax.adam(0.1), clipjax.max_norm(1.0, axes=None)
    )
    for tx in (
        clipjax.skip_nonfinite(inner),
        clipjax.skip_spikes(inner, max_consecutive=3),
        clipjax.bounded(
            optax.adam(0.1),
            clip=clipjax.autoclip(),
            project=clipjax.max_norm(1.0, axes=None),
            nonfinite="skip",
        ),
    ):
        params = jax.tree.map(jnp.ones_like, gradients())
        text = jax.jit(tx.update).lower(params, tx.init(params), params).as_text()
        assert "stablehlo.case" not in text
        assert "stablehlo.if" not in text
        assert "stablehlo.select" in text


def test_steps_that_are_taken_whatever_they_contain_do_not_count_as_skipped() -> None:
    tx = clipjax.skip_nonfinite(optax.sgd(0.1), max_consecutive=2)
    update, state, seen = jax.jit(tx.update), tx.init(np.ones(1, np.float32)), []
    for value in (np.nan, np.nan, np.nan, np.nan, 1.0, np.nan):
        _, state = update(np.float32([value]), state)
        seen.append(read(state, "skipped", "skipped_in_a_row"))
    assert seen == [[1, 1], [2, 2], [2, 2], [2, 2], [2, 0], [3, 1]]


def test_zeros_do_not_enter_the_window_of_spikes() -> None:
    state = SPIKES.init(np.ones(1, np.float32))
    for value in (0.0, 0.0, 0.0, 0.0, 1.0, 0.9, 0.0, 1.1):
        _, state = update_spikes(np.float32([value]), state)
    assert read(state, "skipped") == [0]


def test_each_bad_step_counts_for_one_reason() -> None:
    """What is not finite is no spike, and a spike of a norm none of the loss."""
    state = SPIKES.init(np.ones(1, np.float32))
    steps = [(1, 1), (1, 1), (np.inf, 1), (1, np.inf), (100, 1), (1, 100)]
    for norm, loss in steps:
        _, state = update_spikes(np.float32([norm]), state, loss=np.float32(loss))
    counters = (
        "skipped",
        "nonfinite_count",
        "nonfinite_loss_count",
        "norm_spike_count",
        "loss_spike_count",
    )
    assert read(state, *counters) == [4, 1, 1, 1, 1]


def test_steps_without_a_loss_say_nothing_about_losses() -> None:
    ones = np.ones(1, np.float32)
    state = SPIKES.init(ones)
    for _ in range(4):
        _, state = update_spikes(ones, state)
    for loss in np.float32([1.0, 0.9, 1.1]):
        _, state = update_spikes(ones, state, loss=loss)
    assert read(state, "skipped") == [0]


@pytest.mark.parametrize("skip", [clipjax.skip_nonfinite, clipjax.skip_spikes])
def test_a_skip_is_a_kind_of_its_own_that_optax_takes(skip: Any) -> None:
    tx = skip(optax.sgd(0.1))
    assert isinstance(tx, SkipTransformation)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    init, update = tx
    assert (init, update) == (tx.init, tx.update)
    with pytest.raises(TypeError, match=r"write skip_\w+\(optax.chain\(clip, opti"):
        skip(clipjax.clip_by_norm(1.0), optax.adam(1e-3))


@pytest.mark.parametrize("skip", [clipjax.skip_nonfinite, clipjax.skip_spikes])
def test_check_updates_skips_what_the_optimizer_breaks(skip: Any) -> None:
    """Where the gradient is finite; a gradient that is not counts for itself alone."""

    def divided(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda x: x / (x - 2), updates), state + 1

    inner = optax.GradientTransformation(lambda params: jnp.zeros(()), divided)
    counters = "skipped", "update_nonfinite_count", "nonfinite_count"
    steps = np.float32([[1, 1], [1, 2], [1, np.nan], [3, 1]])
    seen = {}
    for checked in (False, True):
        tx = skip(inner, check_updates=checked)
        update, state, done = jax.jit(tx.update), tx.init(steps[0]), []
        for grads in steps:
            updates, state = update(grads, state)
            done.append((np.isfinite(updates).all(), np.any(updates)))
        seen[checked] = done, read(state, *counters), int(state.memory.inner)
    fine, zero, broken = (True, True), (True, False), (False, True)
    assert seen[True] == ([fine, zero, zero, fine], [2, 1, 1], 2)
    assert seen[False] == ([fine, broken, zero, fine], [1, 0, 1], 3)
