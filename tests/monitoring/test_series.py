"""Histories: what `series` reads from them, and what `suggest` makes of their norms."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax

NAN, INF = np.nan, np.inf
NORMS = np.exp(0.5 * np.random.default_rng(0).standard_normal(600)).astype(np.float32)
NORMS[::50] *= 100  # spikes
SKIP = clipjax.skip_nonfinite(optax.identity())


def rows_of(stacked: Any, steps: int) -> list[dict[str, Any]]:
    return [{key: x[i] for key, x in stacked.items()} for i in range(steps)]


@pytest.mark.parametrize("inside", [True, False])
def test_a_history_outlives_states_that_are_donated(inside: bool) -> None:
    """Whether `metrics` is called in the compiled step or outside of it."""
    tx = clipjax.bounded(
        optax.sgd(1.0), clip=clipjax.clip_by_global_norm(1.0), nonfinite="skip"
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, norm: jax.Array) -> Any:
        state = tx.update(norm, state)[1]
        return state, clipjax.metrics(state) if inside else {}

    history = []
    state = tx.init(jnp.zeros(()))
    for norm in NORMS[:9]:
        before = state
        state, metrics = step(state, norm)
        kept = before.memory.inner[0].metrics["clip_by_global_norm"]
        assert all(x.is_deleted() for x in kept.values())
        history.append(metrics if inside else clipjax.metrics(state))
    found = clipjax.series(history, "clip_by_global_norm")
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, NORMS[:9])
    steps = clipjax.series(history, "skip_nonfinite/steps")
    np.testing.assert_array_equal(steps, np.arange(1, 10))


@pytest.mark.parametrize("prefix", ["", "train/"])
@pytest.mark.parametrize(
    ("accumulate", "of_clip"),
    [
        (1, [1, 2, NAN, 3, 4, NAN, 6, 6, 4]),
        (2, [NAN, 1.5, NAN, NAN, 3.5, NAN, NAN, 6, NAN]),
    ],
)
def test_the_index_is_the_step_and_one_that_was_not_taken_is_nan(
    accumulate: int, of_clip: list[float], prefix: str
) -> None:
    """A clip that is skipped, or waits for micro-batches, shows its last norm again."""
    taken = np.isfinite(of_clip)
    tx = clipjax.bounded(
        optax.sgd(1.0),
        clip=clipjax.clip_by_global_norm(1.0),
        nonfinite="skip",
        accumulate=accumulate,
    )
    norms = jnp.array([1.0, 2.0, NAN, 3.0, 4.0, NAN, 6.0, 6.0, 4.0])

    def step(state: Any, norm: jax.Array) -> Any:
        state = tx.update(norm[None], state, jnp.zeros(1))[1]
        found = {f"{prefix}{key}": x for key, x in clipjax.metrics(state).items()}
        return state, {"loss": norm} | found

    stacked = jax.lax.scan(step, tx.init(jnp.zeros(1)), norms)[1]
    stacked[f"{prefix}steps"] = np.arange(len(norms))  # a counter of the user's
    expected = {
        f"{prefix}clip_by_global_norm": of_clip,
        f"{prefix}clip_by_global_norm/norm_after": np.where(taken, 1.0, NAN),
        f"{prefix}skip_nonfinite": norms,
        "loss": norms,
    }
    for history in (stacked, rows_of(stacked, len(norms))):
        for name, values in expected.items():
            np.testing.assert_allclose(clipjax.series(history, name), values, 1e-5)


def test_a_step_of_one_clip_is_none_of_another_of_its_name() -> None:
    skip = clipjax.skip_nonfinite(clipjax.clip_by_global_norm(5.0))
    tx = optax.chain(skip, clipjax.clip_by_global_norm(5.0))
    history = []
    state = tx.init(jnp.zeros(1))
    for norm in (1.0, NAN, 2.0):
        _, state = tx.update(jnp.array([norm]), state)
        history.append(clipjax.metrics(state))
    for name, values in {"": [1, NAN, 2], "_1": [1, 0, 2]}.items():
        found = clipjax.series(history, f"clip_by_global_norm{name}")
        np.testing.assert_array_equal(found, values)


def test_a_log_of_every_tenth_step_tells_the_truth_at_a_skipped_step() -> None:
    """With the clip within the skip and in front of it; counters go on."""
    clip = clipjax.clip_by_global_norm(1.0)
    within = clipjax.bounded(optax.sgd(0.1), clip=clip, nonfinite="skip")
    before = optax.chain(clip, clipjax.skip_nonfinite(optax.sgd(0.1)))
    found = []
    for tx in (within, before):
        read, state = jax.jit(clipjax.metrics), tx.init(jnp.zeros(1))
        history = []
        for i in range(21):
            norm = NAN if i in (10, 20) else 100.0 + i
            _, state = tx.update(jnp.array([norm]), state, jnp.zeros(1))
            history.append(read(state))
        row = jax.device_get(history[-1])
        for name in ("norm", "norm_after", "scale"):
            assert np.isnan(row[f"clip_by_global_norm/{name}"]), name
        steps = 19 if tx is within else 21
        assert row["clip_by_global_norm/steps"] == steps
        assert row["clip_by_global_norm/clipped_fraction"] == np.float32(19 / steps)
        assert row["skip_nonfinite/skipped"] == 2
        found.append(clipjax.series(history[::10], "clip_by_global_norm"))
    np.testing.assert_array_equal(found, [[100, NAN, NAN]] * 2)


def test_a_step_at_which_a_row_lacks_the_metric_is_nan() -> None:
    """As before and after `adopt`, and for what is measured at some steps."""
    clip = clipjax.clip_by_global_norm(1.0)
    clip_state, skip_state = (x.init(jnp.zeros(1)) for x in (clip, SKIP))
    history: list[dict[str, Any]] = []
    for i in range(6):
        norm = jnp.array([NAN if i == 3 else i + 1.0])
        if i in (1, 2, 4):  # it goes on from its old state
            _, clip_state = clip.update(norm, clip_state)
            history.append(clipjax.metrics(clip_state))
        else:
            _, skip_state = SKIP.update(norm, skip_state)
            history.append(clipjax.metrics(skip_state))
        history[-1] |= {"accuracy": jnp.bfloat16(0.5), "best": True} if i % 2 else {}
    expected = {
        "clip_by_global_norm": [NAN, 2, 3, NAN, 5, NAN],
        "skip_nonfinite": [1, NAN, NAN, NAN, NAN, 6],
        "skip_nonfinite/skipped": [0, NAN, NAN, 1, NAN, 1],
        "accuracy": [NAN, 0.5] * 3,
        "best": [NAN, 1] * 3,
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(clipjax.series(history, name), values)
    norms = clipjax.series(history, "clip_by_global_norm")
    rules = {"median": clipjax.autoclip(50.0)}
    assert clipjax.suggest(norms, rules) == clipjax.suggest([2.0, 3.0, 5.0], rules)


def test_what_an_outer_skip_froze_is_not_shown() -> None:
    inner = clipjax.skip_spikes(clipjax.clip_by_global_norm(1.0), max_norm=5.0)
    tx = clipjax.skip_nonfinite(inner)
    state = tx.init(jnp.zeros(1))
    for norm, seen, clipped in ((2, 2, 2), (7, 7, NAN), (NAN, NAN, NAN), (3, 3, 3)):
        _, state = tx.update(jnp.array([float(norm)]), state)
        row = clipjax.metrics(state)
        np.testing.assert_array_equal(row["skip_nonfinite/norm"], norm)
        np.testing.assert_array_equal(row["skip_spikes/norm"], seen)
        np.testing.assert_array_equal(row["clip_by_global_norm/norm"], clipped)
    assert row["skip_spikes/skipped"] == 1
    with jax.debug_nans(True):  # where nothing is wrong, NaN would raise
        _, state = tx.update(jnp.array([7.0]), state)
        assert clipjax.metrics(state)["clip_by_global_norm/norm"] == 3


def test_rules_see_the_finite_norms_in_their_order() -> None:
    def act(updates: Any, params: Any, step: Any, mean: Any) -> Any:
        """Clip to twice the mean so far."""
        threshold = jnp.where(step < 10, jnp.inf, 2 * mean)
        clipped = jnp.minimum(updates, threshold)
        return clipped, {"threshold": threshold}, mean + (updates - mean) / (step + 1)

    mine = {"mine": clipjax.with_metrics("mine", act, remember=jnp.zeros_like)}
    exact = NORMS.astype(np.float64)
    thresholds = 2 * np.roll(np.cumsum(exact) / np.arange(1, 601), 1)
    found = clipjax.suggest(np.insert(NORMS, [0, 77], [NAN, INF]), mine)["mine"]
    # 600 sums in float32, and no norm is within their rounding of its threshold.
    wanted = np.median(thresholds[-150:])
    np.testing.assert_allclose(found["threshold"], wanted, rtol=600 * 2.0**-24)
    clipped = (exact > thresholds) & (np.arange(600) >= 10)
    np.testing.assert_allclose(found["clip_rate"], np.mean(clipped))
    unsettled = {"threshold": INF, "clip_rate": 0.0}
    assert clipjax.suggest(NORMS[:5], mine) == {"mine": unsettled}

    rules = {"link": clipjax.zclip(), "chain": optax.chain(clipjax.zclip())}
    of_link, of_chain = clipjax.suggest(NORMS, rules).values()
    assert of_link == of_chain


@pytest.mark.filterwarnings("error")
def test_a_norm_that_float32_cannot_hold_is_not_finite() -> None:
    rules = {"median": clipjax.autoclip(50.0)}
    more = clipjax.suggest([*NORMS.tolist(), 1e308, 1e39], rules)
    assert more == clipjax.suggest(NORMS, rules)


def test_four_rules_are_suggested_without_any() -> None:
    found = clipjax.suggest(NORMS)
    assert list(found) == ["autoclip", "zclip", "clip_by_quantile", "clip_by_lognormal"]
    for rule in found.values():
        assert np.median(NORMS) / 2 < rule["threshold"] < 50  # below the spikes
        assert 0.01 < rule["clip_rate"] < 1
