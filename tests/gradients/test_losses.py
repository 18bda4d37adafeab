"""What a loss adds to skip_nonfinite and skip_spikes: verdicts against an oracle in NumPy; where it goes."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import clipjax
from tests.support.trees import avals, random_tree, same_bits

NAN, INF = math.nan, math.inf
STEPS = 300
INNER = optax.chain(clipjax.clip_by_global_norm(1.0), optax.adam(1e-3))


@functools.cache
def built(window: int | None, warmup: int | None = None) -> tuple[Any, Any]:
    """A transformation and its steps in one compiled scan: (state, norms, losses) -> (state, of each)."""
    given = {"window": window, "warmup_steps": warmup}
    tx = clipjax.skip_spikes(INNER, **{key: value for key, value in given.items() if value is not None})

    def one(state: Any, step: Any) -> Any:
        norm, loss = step
        updates, state = tx.update({"a": norm[None]}, state, loss=loss)
        return state, (updates["a"][0], clipjax.metrics(state))

    return tx, jax.jit(lambda state, *steps: jax.lax.scan(one, state, steps))


def start(tx: Any) -> Any:
    return tx.init({"a": np.zeros(1, np.float32)})


def follow(norms: Any, losses: Any, *, window: int | None = None, warmup: int | None = None) -> Any:
    """The last state, the metrics of each step without their prefix, and which steps were skipped."""
    tx, run = built(window, warmup)
    state, (updates, seen) = run(start(tx), np.float32(norms), np.asarray(losses))
    own = {key.removeprefix("skip_spikes/"): np.asarray(value) for key, value in seen.items()}
    skipped = own["skipped_last"] == 1
    np.testing.assert_array_equal(np.asarray(updates) == 0, skipped)
    np.testing.assert_array_equal(np.cumsum(skipped), own["skipped"])
    return state, own, skipped


def judged(value: float, past: list[float], warmup: int, least: float) -> tuple[bool, float, float]:
    """Whether a value is a spike, its z, and the largest that it could have been."""
    if len(past) < warmup:
        return False, 0.0, INF
    positive = min(past) > 0
    scaled = np.log(past) if positive else np.array(past)
    median = np.median(scaled)
    std = max(1.4826 * np.median(np.abs(scaled - median)), least * (1 if positive else abs(median)))
    threshold = median + 6 * std
    with np.errstate(divide="ignore"):
        z = ((np.log(max(value, 0)) if positive else value) - median) / std
    return z > 6, z, np.exp(threshold) if positive else threshold


def oracle(norms: Any, losses: Any, window: int, warmup: int) -> list[Any]:
    past_norms: list[float] = []
    past_losses: list[float] = []
    verdicts = []
    for norm, loss in zip(np.float64(norms), np.float64(losses), strict=True):
        of_norm = judged(norm, past_norms[-window:], warmup, 0.05)
        of_loss = judged(loss, past_losses[-window:], warmup, 0.01)
        finite = np.isfinite(norm) and np.isfinite(loss)
        verdicts.append((not finite, of_norm[0], of_loss[0], *of_loss[1:]))
        if finite:
            past_norms.append(norm)
            past_losses += [loss] if loss != 0 else []
    return verdicts


def ordinary(count: int = STEPS, seed: int = 0, spread: float = 0.3) -> np.ndarray:
    return np.exp(spread * np.random.default_rng(seed).standard_normal(count)).astype(np.float32)


LOSSES = {
    "a language model's": lambda rng: 2.5 + 0.03 * rng.standard_normal(STEPS),
    "of factors": lambda rng: np.exp(1.5 * rng.standard_normal(STEPS)),
    "of both signs": lambda rng: rng.standard_normal(STEPS),
    "negative": lambda rng: -40 + 0.1 * rng.standard_normal(STEPS),
    "positive, then not": lambda rng: np.linspace(3, -3, STEPS) + 0.1 * rng.standard_normal(STEPS),
}


@pytest.mark.parametrize(("window", "warmup"), [(7, 3), (16, None)])
@pytest.mark.parametrize("kind", LOSSES)
def test_verdicts_are_those_of_the_oracle(kind: str, window: int, warmup: int | None) -> None:
    rng = np.random.default_rng(window)
    losses = LOSSES[kind](rng)
    spikes = np.abs(losses) * np.exp(14 * rng.random(STEPS))
    losses = np.where(rng.random(STEPS) < 0.1, losses + spikes, losses).astype(np.float32)
    norms = ordinary() * np.where(rng.random(STEPS) < 0.05, 50, 1).astype(np.float32)
    losses[rng.random(STEPS) < 0.05] = NAN
    losses[[0, 60, 70]] = NAN, INF, -INF
    losses[rng.random(STEPS) < 0.03] = 0
    norms[rng.random(STEPS) < 0.05] = NAN
    _, own, skipped = follow(norms, losses, window=window, warmup=warmup)
    expected = oracle(own["norm"], losses, window, warmup or window // 2)
    assert {tuple(bool(x) for x in v[:3]) for v in expected} >= {
        (True, False, False),
        (False, True, False),
        (False, False, True),
    }
    np.testing.assert_array_equal(skipped, [any(v[:3]) for v in expected])
    np.testing.assert_array_equal(own["loss"], losses)
    finite = np.isfinite(losses)
    z, thresholds = np.array([v[3] for v in expected]), np.array([v[4] for v in expected])
    np.testing.assert_allclose(own["loss_z_score"][finite], z[finite], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(own["loss_threshold"], thresholds, rtol=1e-6)
    counts = {
        "nonfinite_count": ~np.isfinite(norms),
        "nonfinite_loss_count": ~finite,
        "norm_spike_count": [v[1] for v in expected],
        "loss_spike_count": [v[2] and np.isfinite(x) for v, x in zip(expected, losses, strict=True)],
    }
    for key, of in counts.items():
        np.testing.assert_array_equal(own[key], np.cumsum(of), key)


@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("when", [0, 2, 40])
def test_a_hundred_bad_losses_leave_no_trace(bad: float, when: int) -> None:
    norms, losses = ordinary(200), 2 + 0.1 * ordinary(200, 1)
    losses[150] = 50
    clean, _, skipped = follow(norms, losses, window=8, warmup=4)
    assert list(np.flatnonzero(skipped)) == [150]
    with_bad = np.insert(losses, when, np.full(100, bad, np.float32))
    state, _, _ = follow(np.insert(norms, when, np.full(100, 1e6)), with_bad, window=8, warmup=4)
    counters = {"steps", "skipped", "nonfinite_loss_count", "norm_spike_count"}
    for field in set(state._fields) - counters:
        assert same_bits(getattr(state, field), getattr(clean, field)), field
    assert (int(state.skipped), int(state.nonfinite_loss_count), int(state.nonfinite_count)) == (101, 100, 0)


def test_losses_without_a_spike_change_nothing() -> None:
    """The run is bit for bit the one without losses, whose state keeps those fields as they were."""
    norms = ordinary()
    norms[[80, 200]] = 1e5, NAN
    tx, run = built(16)
    state, (updates, _) = run(start(tx), norms, 2.5 + 0.1 * ordinary(seed=1, spread=0.1))

    def one(state: Any, norm: Any) -> Any:
        updates, state = tx.update({"a": norm[None]}, state)
        return state, updates["a"][0]

    without, alone = jax.jit(lambda state: jax.lax.scan(one, state, norms))(start(tx))
    assert same_bits(updates, alone)
    assert avals(without) == avals(state)
    of_losses = {"loss", "loss_z_score", "loss_threshold", "losses", "losses_taken"}
    for field in state._fields:
        as_it_was = start(tx) if field in of_losses else state
        assert same_bits(getattr(without, field), getattr(as_it_was, field)), field
    assert int(state.skipped) == 2


def test_one_spike_does_not_hide_the_next_and_a_new_level_is_accepted() -> None:
    losses = 2.5 + 0.05 * np.log(ordinary(seed=1, spread=1.0))
    losses[[100, 101, 110]] = 1e4, 1e3, 5
    losses[160:] += 3
    _, _, skipped = follow(ordinary(), losses, window=32)
    assert list(np.flatnonzero(skipped[:160])) == [100, 101, 110]
    assert skipped[160:168].all()
    assert not skipped[160 + 17 :].any()
    assert not follow(ordinary(), losses[::-1] * [1] * STEPS, window=32)[2][:120].any()


def test_a_loss_that_has_settled_is_not_judged_by_its_rounding() -> None:
    """Equal but for now and then an ulp of bfloat16, at which 2.5 has neighbors 0.6% away."""
    losses = np.full(STEPS, 2.5, ml_dtypes.bfloat16)
    losses[90::17] = 2.515625
    losses[[200, 201]] = 2.640625, 2.65625  # 5.6% and 6.2%
    _, own, skipped = follow(ordinary(), losses)
    assert list(np.flatnonzero(skipped)) == [201]
    np.testing.assert_allclose(own["loss_threshold"][-1], 2.5 * math.exp(0.06), rtol=1e-6)
    assert not follow(ordinary(), np.full(STEPS, -2.5, np.float32))[2].any()


@pytest.mark.parametrize("spread", [0.01, 0.3, 1.6])
def test_ordinary_losses_are_taken_however_much_they_vary(spread: float) -> None:
    """The losses of small batches vary by factors, too, and the large ones are what is left to learn."""
    losses = ordinary(seed=3, spread=spread)
    assert not follow(ordinary(), losses)[2].any()
    deviations = np.abs(losses - np.median(losses))
    above = losses > np.median(losses) + 6 * 1.4826 * np.median(deviations)
    assert (above.mean() > 1 / 30) == (spread == 1.6)


@pytest.mark.parametrize("kind", LOSSES)
def test_verdicts_do_not_change_with_the_scale_of_the_loss(kind: str) -> None:
    losses = LOSSES[kind](np.random.default_rng(0)).astype(np.float32)
    losses[[100, 200]] += 1e6 * np.abs(losses).max()
    verdicts = [follow(ordinary(), losses * np.float32(2.0**e), window=16)[2] for e in (-60, 0, 60)]
    assert verdicts[1][[100, 200]].all()
    np.testing.assert_array_equal(verdicts[0], verdicts[1])
    np.testing.assert_array_equal(verdicts[2], verdicts[1])


# --------------------------------------------------------------------------------------------------
# What a loss may be, and who else sees it.

SKIPPING = {
    "skip_nonfinite": clipjax.skip_nonfinite(INNER),
    "skip_spikes": clipjax.skip_spikes(INNER, window=4),
    "bounded": clipjax.bounded(
        optax.adam(1e-3), clip=clipjax.zclip(), project=clipjax.max_norm(1.0), nonfinite="skip"
    ),
}


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("name", SKIPPING)
def test_a_loss_that_is_not_finite_skips_the_step(name: str, jit: bool) -> None:
    tx, params = SKIPPING[name], random_tree(1)
    update = jax.jit(tx.update) if jit else tx.update
    _, first = update(random_tree(2), tx.init(params), params, loss=np.float32(2))
    _, expected = update(random_tree(3), first, params, loss=np.float32(2))
    state = first
    for n, bad in enumerate((NAN, INF, -INF)):
        updates, state = update(random_tree(3), state, params, loss=np.float32(bad))
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
        assert same_bits(state.inner, first.inner)
        assert (int(state.skipped), int(state.nonfinite_loss_count), int(state.nonfinite_count)) == (
            n + 1,
            n + 1,
            0,
        )
        assert (int(state.skipped_last), int(state.skipped_in_a_row)) == (1, n + 1)
    # A NaN in both is one skipped step of two reasons.
    spoilt = {**random_tree(3), "scale": jnp.asarray(NAN)}
    _, state = update(spoilt, state, params, loss=np.float32(NAN))
    assert (int(state.skipped), int(state.nonfinite_loss_count), int(state.nonfinite_count)) == (4, 4, 1)
    _, state = update(random_tree(3), state, params, loss=np.float32(2))
    assert same_bits(state.inner, expected.inner)
    assert (int(state.skipped), int(state.skipped_last), int(state.skipped_in_a_row)) == (4, 0, 0)


@pytest.mark.parametrize("name", SKIPPING)
@pytest.mark.parametrize(
    "loss",
    [2, 2.0, np.float64(2), np.float16(2), jnp.bfloat16(2), np.int64(2), jnp.asarray(2), np.array(2.0)],
    ids=lambda loss: type(loss).__name__,
)
def test_a_loss_is_any_real_scalar(name: str, loss: Any) -> None:
    tx, params = SKIPPING[name], random_tree(1)
    state = tx.update(random_tree(2), tx.init(params), params, loss=loss)[1]
    assert avals(state) == avals(tx.init(params))
    assert int(state.skipped) == 0
    if name == "skip_spikes":
        assert (float(state.loss), float(state.losses[0]), int(state.losses_taken)) == (2, 2, 1)


@pytest.mark.parametrize("name", SKIPPING)
@pytest.mark.parametrize(
    ("loss", "kind", "message"),
    [
        (np.ones(3, np.float32), ValueError, r"loss must be a real number.*mean over the batch.*\(3,\)"),
        (jnp.ones((1,)), ValueError, r"loss must be a real number.*got shape \(1,\)"),
        (True, TypeError, "loss must be a real number.*got True"),
        (np.array(True), TypeError, "loss must be a real number"),
        (1j, TypeError, "loss must be a real number.*1j"),
        ("2.0", TypeError, "loss must be a real number.*'2.0'"),
        ([2.0], TypeError, r"loss must be a real number.*\[2.0\]"),
        (random_tree, TypeError, "loss must be a real number.*random_tree"),
    ],
)
def test_what_is_no_loss_is_an_error(name: str, loss: Any, kind: Any, message: str) -> None:
    tx, params = SKIPPING[name], random_tree(1)
    with pytest.raises(kind, match=message):
        tx.update(random_tree(2), tx.init(params), params, loss=loss)


def test_a_loss_of_float64_that_the_state_cannot_hold_is_infinite() -> None:
    tx = clipjax.skip_spikes(optax.identity(), window=4)
    state = start(tx)
    with jax.enable_x64(True):
        _, state = jax.jit(tx.update)({"a": np.ones(1, np.float32)}, state, loss=np.float64(1e300))
    assert (int(state.nonfinite_loss_count), int(state.losses_taken)) == (1, 0)


def recording(seen: list[Any]) -> Any:
    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        seen.append(extra_args)
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


@pytest.mark.parametrize("kind", [clipjax.skip_nonfinite, clipjax.skip_spikes])
def test_extra_arguments_are_passed_on_as_they_are(kind: Any) -> None:
    seen: list[Any] = []
    tx, grads, loss = kind(recording(seen)), np.ones(2, np.float32), jnp.asarray(2.0)
    for extra in ({"loss": loss, "value": 3.0}, {"value": 3.0}, {"loss": None}):
        tx.update(grads, tx.init(grads), **extra)
    assert seen == [{"loss": loss, "value": 3.0}, {"value": 3.0}, {}]
    assert seen[0]["loss"] is loss


def test_one_inside_the_other_sees_the_loss() -> None:
    tx = clipjax.skip_spikes(optax.chain(optax.identity(), clipjax.skip_nonfinite(optax.sgd(1.0))), window=4)
    grads = np.ones(2, np.float32)
    update = jax.jit(tx.update)
    _, state = update(grads, tx.init(grads), loss=1.0)
    _, state = update(grads, state, loss=NAN)
    seen = clipjax.metrics(state)
    assert (seen["skip_spikes/skipped"], seen["skip_nonfinite/skipped"]) == (1, 0)
    # As the outer one lets go, the inner one decides.
    tx = clipjax.skip_spikes(clipjax.skip_nonfinite(optax.sgd(1.0)), max_consecutive=1)
    state = tx.init(grads)
    for _ in range(2):
        _, state = tx.update(grads, state, loss=NAN)
    assert (int(state.skipped), int(state.inner.skipped), int(state.inner.nonfinite_loss_count)) == (1, 1, 1)


@pytest.mark.parametrize("name", ["skip_nonfinite", "skip_spikes"])
def test_what_a_step_is_worth_is_not_differentiated(name: str) -> None:
    """The updates depend on the gradients alone, where they are taken and where they are not."""
    tx = getattr(clipjax, name)(optax.sgd(1.0))
    state = tx.init(np.zeros(2, np.float32))

    @jax.jit
    @jax.grad
    def of_loss(loss: Any, grads: Any) -> Any:
        return jnp.sum(tx.update(grads, state, loss=loss)[0])

    for loss in (0.0, 2.0, NAN):
        assert of_loss(loss, np.ones(2, np.float32)) == 0


def test_losses_under_vmap_are_judged_one_by_one() -> None:
    tx = clipjax.skip_nonfinite(optax.sgd(1.0))
    states = jax.vmap(lambda _: tx.init(np.zeros(2, np.float32)))(np.arange(3))
    grads, losses = np.ones((3, 2), np.float32), np.array([1, NAN, 3], np.float32)
    update = jax.vmap(lambda grads, state, loss: tx.update(grads, state, loss=loss))
    updates, states = jax.jit(update)(grads, states, losses)
    np.testing.assert_array_equal(states.skipped, [0, 1, 0])
    np.testing.assert_array_equal(updates[:, 0], [-1, 0, -1])
