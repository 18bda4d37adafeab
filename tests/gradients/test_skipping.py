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


def rule_of(past: list[float], usual: float, least_std: float, warmup: int) -> Any:
    """Return the threshold of a value and, as a function of the value, its z-score."""
    y, k = np.array(past), len(past)
    if k < warmup:
        return math.inf, lambda x: 0.0
    is_log = min(past) > 0
    y = np.log(y) if is_log else y
    half = k // 2
    slopes = [(y[i + k - half] - y[i]) / (k - half) for i in range(half)]
    carried = y + (np.median(slopes) if k >= 16 else 0) * np.arange(k, 0, -1)
    middle = float(np.median(carried))
    std = 1.4826 * float(np.median(np.abs(carried - middle)))
    level = max(middle, float(np.median(y[-16:])))
    if is_log:
        std = min(max(std, least_std), 0.5)
        highest = max(math.exp(level + 6 * std), 3 * math.exp(level), 3 * usual)
        return highest, lambda x: (np.log(x) - level) / std
    std = max(std, least_std * abs(level))
    highest = max(level + 6 * std, max(level, usual) + 2 * abs(level))
    return highest, lambda x: (x - level) / std


def judged(pairs: np.ndarray, window: int, warmup: int) -> dict[str, np.ndarray]:
    """Compare norms and losses, `(steps, 2)`, step by step, as the docstring says."""
    pasts: Any = [], []
    usual = [math.inf, math.inf]
    rows = []
    for pair in pairs.astype(np.float64):
        given = zip(pasts, usual, (0.05, 0.01), strict=True)
        rules = [rule_of(x[-window:], last, std, warmup) for x, last, std in given]
        highest = np.array([x for x, _ in rules])
        finite = np.isfinite(pair)
        above = (finite & (pair > highest)).any()
        again = pair.tolist() == [x[-1] if x else None for x in pasts]
        skipped = not finite.all() or (above and not again)
        scores = [score(x) for (_, score), x in zip(rules, pair, strict=True)]
        rows.append([*highest, *scores, skipped])
        for i in np.flatnonzero(pair) if finite.all() else ():
            pasts[i].append(pair[i])
            usual[i] = usual[i] if above else pair[i]
    names = "threshold", "loss_threshold", "z_score", "loss_z_score", "skipped_last"
    return dict(zip(names, np.array(rows).T, strict=True))


def histories() -> dict[str, np.ndarray]:
    """Norms and losses, `(200, 2)` each, of all kinds that the rule tells apart."""
    rng, steps = np.random.default_rng(2), np.arange(200)
    noise, wide = rng.normal(size=(2, 200)), rng.normal(size=200)
    falling = np.exp(-0.05 * np.minimum(steps, 80) + 0.15 * noise[0])
    losses = 2 - 0.02 * steps + 0.05 * noise[1]  # they become negative
    falling[[30, 77]] *= 154
    losses[[50, 140]] += 3
    smooth = np.exp(3 * np.sin(steps / 9) ** 8)
    repeated = np.exp(0.1 * noise[0])
    repeated[100:106] = 50, 50, 50, 60, 60, 1
    steady = np.exp(0.1 * noise[1])
    gaps = np.exp(0.2 * noise[1])
    gaps[[3, 60, 61, 90]] = 0, np.nan, 40, np.inf
    drawn = {
        "falling": (falling, losses),
        "wide": (np.exp(wide), np.exp(0.3 * noise[0])),
        "smooth": (smooth, smooth**2),
        "repeated": (repeated, np.where(repeated == 60, steady, 1.0)),
        "steady": (steady, steady * np.where(steps == 70, 4, 1)),
        "gaps": (gaps, np.where(steps == 120, np.nan, steady)),
    }
    return {name: np.stack(x, 1).astype(np.float32) for name, x in drawn.items()}


def followed(tx: Any, pairs: Any) -> Any:
    """Return the metrics of each step, of runs whose norms and losses are given."""

    def step(state: Any, pair: Any) -> Any:
        _, state = tx.update(pair[:1], state, loss=pair[1])
        return state, clipjax.metrics(state)

    def run(pairs: Any) -> Any:
        return jax.lax.scan(step, tx.init(jnp.zeros(1)), pairs)[1]

    found = jax.device_get(jax.jit(jax.vmap(run))(pairs))
    return {key.partition("/")[2]: x for key, x in found.items()}


@pytest.mark.parametrize("window", [64, 8])
def test_outliers_are_those_of_the_formula(window: int) -> None:
    runs, warmup = histories(), min(16, window // 2)
    tx = clipjax.skip_spikes(optax.sgd(1.0), window=window)
    found = followed(tx, np.stack([*runs.values()]))
    for i, (name, pairs) in enumerate(runs.items()):
        with np.errstate(divide="ignore", invalid="ignore"):  # of 0 and infinity
            wanted = judged(pairs, window, warmup)
        assert 0 < wanted["skipped_last"].sum() < 24 or name == "smooth", name
        np.testing.assert_array_equal(found["skipped_last"][i], wanted["skipped_last"])
        for key in ("threshold", "loss_threshold"):
            np.testing.assert_allclose(found[key][i], wanted[key], rtol=3e-4)
        for column, key in enumerate(("z_score", "loss_z_score")):
            fine = (pairs[:, column] > 0) & (pairs[:, column] < np.inf)
            np.testing.assert_allclose(
                found[key][i][fine], wanted[key][fine], rtol=2e-3, atol=2e-3
            )


def test_a_jump_is_an_outlier_and_a_rise_over_several_steps_is_none() -> None:
    """The same norms in another order: what counts is the step before."""
    usual = np.exp(0.1 * np.random.default_rng(3).normal(size=40))
    rise = 2.0 ** np.arange(1, 7)
    norms = np.stack(
        [
            np.concatenate([usual, rise, rise[::-1], usual]),
            np.concatenate([usual, rise[::-1], rise, usual]),
        ]
    )
    pairs = np.stack([norms, np.ones_like(norms)], -1).astype(np.float32)
    found = followed(clipjax.skip_spikes(optax.sgd(1.0)), pairs)["skipped_last"]
    assert not found[0].any()
    assert np.flatnonzero(found[1])[0] == 40
    assert found[1].sum() >= 4


def test_an_outlier_that_comes_back_bit_for_bit_is_applied() -> None:
    """With its loss, too; `max_norm` holds all the same, and a NaN is never applied."""
    usual = np.exp(0.1 * np.random.default_rng(3).normal(size=40))
    ends = [(50, 1), (50, 1), (60, 1), (60, 2), (200, 1), (200, 1), (np.nan, 1)]
    pairs = np.concatenate([np.stack([usual, np.ones(40)], 1), ends]).astype(np.float32)
    tx = clipjax.skip_spikes(optax.sgd(1.0), max_norm=100.0)
    found = followed(tx, pairs[None])
    assert found["skipped_last"][0, 40:].tolist() == [1, 0, 1, 1, 1, 1, 1]
    assert found["norm_spike_count"][0, -1] == 5


@pytest.mark.parametrize("times", [4.0, 30.0, 1000.0])
def test_a_new_level_is_taken_after_nine_steps(times: float) -> None:
    rng = np.random.default_rng(3)
    norms = np.exp(0.1 * rng.normal(size=400))
    norms[200:] *= times
    pairs = np.stack([norms, np.ones(400)], 1)[None].astype(np.float32)
    skipped = followed(clipjax.skip_spikes(optax.sgd(1.0)), pairs)["skipped_last"][0]
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
    for norm in [1.0, 3.0, 1.0, 1.0, 1.0, 1.0, *range(100, 108)]:
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
