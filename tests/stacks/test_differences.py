"""Where docs/stacks.md says that skipping differs here: each rule on norms that tell them apart."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipjax
from tests.stacks import rules

ORDINARY = np.exp(np.random.default_rng(0).normal(0.0, 0.1, 600))


@jax.jit
def _run(losses: jax.Array, norms: jax.Array) -> jax.Array:
    tx = clipjax.skip_spikes(optax.sgd(1.0))

    def step(state: Any, seen: jax.Array) -> tuple[Any, jax.Array]:
        loss, norm = seen
        _, state = tx.update(jnp.reshape(norm, (1,)), state, loss=loss)
        return state, state.skipped_last > 0

    return jax.lax.scan(step, tx.init(jnp.zeros(1)), (losses, norms))[1]


def ours(losses: np.ndarray, norms: np.ndarray) -> list[bool]:
    """Which steps `skip_spikes` leaves out."""
    return np.asarray(_run(np.float32(losses), np.float32(norms))).tolist()


def with_values(at: list[int], value: float) -> np.ndarray:
    norms = ORDINARY.copy()
    norms[at] = value
    return norms


def where(skips: list[bool]) -> list[int]:
    return np.flatnonzero(skips).tolist()


def test_all_take_ordinary_steps() -> None:
    assert where(ours(ORDINARY, ORDINARY)) == []
    assert where(rules.maxtext_skips(ORDINARY, ORDINARY)) == []
    assert where(rules.levanter_skips(ORDINARY, ORDINARY)) == []
    assert where(rules.axlearn_skips(ORDINARY)) == []


def test_a_nan_stays_in_a_window_of_means() -> None:
    norms = with_values([200], np.nan)
    assert where(ours(ORDINARY, norms)) == [200]
    for theirs in (rules.maxtext_skips, rules.levanter_skips):
        assert where(theirs(ORDINARY, norms)) == list(range(200, 200 + 129))
    assert where(rules.axlearn_skips(norms)) == [200]


def test_spikes_hide_the_next_from_a_mean() -> None:
    """At 6 deviations, a window of 128 that holds four of them lets the fifth pass."""
    spikes = [200, 210, 220, 230, 240, 250]
    norms = with_values(spikes, 1000.0)
    assert where(ours(ORDINARY, norms)) == spikes
    for theirs in (rules.maxtext_skips, rules.levanter_skips):
        assert where(theirs(ORDINARY, norms)) == spikes[:4]


def test_a_new_level_is_taken_after_half_a_window() -> None:
    norms = with_values(list(range(200, 600)), 0.0) + np.where(np.arange(600) < 200, 0.0, 100 * ORDINARY)
    skips = where(ours(ORDINARY, norms))
    assert skips == list(range(200, 200 + len(skips)))
    assert 0 < len(skips) <= 64
    assert where(rules.axlearn_skips(norms)) == list(range(200, 600))


def test_a_loss_alone_is_enough() -> None:
    losses = with_values([300], 1000.0)
    assert where(ours(losses, ORDINARY)) == [300]
    assert where(rules.maxtext_skips(losses, ORDINARY)) == [300]
    assert where(rules.levanter_skips(losses, ORDINARY)) == [300]


def test_what_a_clip_has_bounded_is_no_spike() -> None:
    """MaxText judges the clipped norm: where each is clipped, all are alike."""
    norms = with_values([300], 1000.0)
    assert where(rules.maxtext_skips(ORDINARY, np.minimum(norms, 0.5))) == []
    assert where(rules.levanter_skips(ORDINARY, norms)) == [300]


def test_a_shared_key_does_not_hold_back_the_other_queries() -> None:
    """Megatron-LM scales all queries that share a key by the largest of their logits."""
    rng, logits = np.random.default_rng(1), np.array([400.0, 50.0, 200.0, 150.0])
    query, key = (np.float32(rng.normal(size=(5, heads, 3))) for heads in (4, 2))
    weights = {"attention": {"query": {"kernel": query}, "key": {"kernel": key}}}
    clipped = rules.tree(clipjax.qk_clip(100.0)(weights, max_logits=np.float32(logits)))
    factors = [
        np.abs(clipped[f"attention/{part}/kernel"] / w).mean((0, 2))
        for part, w in (("query", query), ("key", key))
    ]
    theirs = np.minimum(1.0, 100.0 / logits.reshape(2, 2).max(1))
    np.testing.assert_allclose(factors[1], np.sqrt(theirs), rtol=1e-6)
    np.testing.assert_allclose(
        logits * factors[0] * np.repeat(factors[1], 2), [100.0, 25.0, 100.0, 100.0], rtol=1e-5
    )
    np.testing.assert_allclose(logits * np.repeat(theirs, 2), [100.0, 12.5, 100.0, 75.0])
