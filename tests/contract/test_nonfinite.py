"""Non-finite values follow a policy: they show, or the step says what it did instead; no state keeps them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.contract.cases import (
    bounds_the_weights,
    every_case,
    every_variant_and_dtype,
    like,
    metric,
    problem,
    run,
    update,
    with_entry,
    with_identity,
)
from tests.support.trees import flat, same_bits
from tests.support.walk import Case

BAD = [math.nan, math.inf, -math.inf]


def after_a_while(tx: Any, params: Any) -> Any:
    """The state after small gradients, beyond any warm-up: what adapts to them clips larger ones."""
    state = tx.init(params)
    small = [like(params, 1e-3 * (1 + 0.1 * math.sin(i))) for i in range(32)]
    for i in range(128):
        state = update(tx, small[i % len(small)], state, params)[1]
    return state


@every_variant_and_dtype
def test_nonfinite_entries_follow_a_policy(case: Case, dtype: Any) -> None:
    """Each entry that shares a norm with a bad one is NaN, or the step says what it did instead."""
    tx = with_identity(case)
    grads, params = problem(dtype)
    entry = int(np.argmax(flat(with_entry(like(grads, 0), 1))))
    used = after_a_while(tx, params)

    def seen_in(updates: Any) -> np.ndarray:
        return flat(optax.apply_updates(params, updates) if bounds_the_weights(case) else updates)

    def effect(value: float) -> np.ndarray:
        return seen_in(update(tx, with_entry(grads, value), used, params)[0])

    # Who shares a norm with the entry: those that change when it does.
    small, large, opposite = effect(8.0), effect(64.0), effect(-64.0)
    shares = (small != large) | (small != opposite)
    shares[entry] = True

    for bad in BAD:
        updates, state = update(tx, with_entry(grads, bad), used, params)
        after = seen_in(updates)
        seen = clipjax.metrics(state)
        assert not seen or metric(state, "nonfinite_count", "skipped") > 0, "the metrics must show it"
        if metric(state, "/skipped"):
            assert same_bits(updates, jax.tree.map(np.zeros_like, updates))
        elif metric(state, "zero_nonfinite/nonfinite_count"):
            assert same_bits(updates, update(tx, with_entry(grads, 0.0), used, params)[0])
        elif not seen:  # a wrapper that was given nothing to bound
            assert not np.isfinite(after[entry])
        elif shares.sum() == 1 and math.isinf(bad) and not np.isnan(after[entry]):
            # What bounds single entries treats an infinite one as a large one; one without a bound shows.
            as_large = effect(math.copysign(64.0, bad))
            if np.isinf(after[entry]):
                assert math.copysign(1.0, bad) * as_large[entry] > 32
                as_large[entry] = bad
            np.testing.assert_array_equal(after, as_large)
        else:
            assert np.isnan(after[shares]).all(), "an entry that shares the norm is not NaN"
            np.testing.assert_array_equal(after[~shares], small[~shares])


@every_case
def test_statistics_do_not_take_in_nonfinite_norms(case: Case) -> None:
    tx = with_identity(case)
    grads, params = problem()
    clean = run(tx, grads, params)
    _, state = run(tx, like(grads, math.nan), params)
    updates, state = update(tx, grads, state, params)
    assert np.isfinite(flat(updates)).all()
    assert not any(np.isnan(np.asarray(x)).any() for x in jax.tree.leaves(state))
    assert same_bits(updates, clean[0])


def test_skip_nonfinite_freezes_the_inner_state() -> None:
    tx = clipjax.skip_nonfinite(optax.chain(clipjax.clip_by_global_norm(1.0), optax.adam(1e-3)))
    grads, params = problem()
    _, first = run(tx, grads, params)
    twice = update(tx, grads, first, params)[1]
    for bad in BAD:
        state = first
        poisoned = {**grads, "scale": np.float32(bad)}
        for n in (1, 2):
            updates, state_after = update(tx, poisoned, state, params)
            assert same_bits(updates, like(grads, 0))
            assert same_bits(state_after.inner, state.inner)
            assert (int(state_after.skipped), int(state_after.skipped_in_a_row)) == (n, n)
            state = state_after
        _, state = update(tx, grads, state, params)
        assert (int(state.steps), int(state.skipped), int(state.skipped_in_a_row)) == (4, 2, 0)
        assert same_bits(state.inner, twice.inner)


@pytest.mark.parametrize("mode", ["propagate", "zero", "skip"])
def test_bounded_has_three_modes(mode: Any) -> None:
    tx = clipjax.bounded(
        optax.sgd(0.5),
        clip=clipjax.clip_by_global_norm(1.0),
        project=clipjax.max_norm(1.0),
        nonfinite=mode,
    )
    grads, params = problem()
    params = jax.jit(clipjax.max_norm(1.0).__call__)(params)
    updates, state = run(tx, with_entry(grads, math.nan), params)
    after = optax.apply_updates(params, updates)
    seen = clipjax.metrics(state)
    if mode == "propagate":
        assert np.isnan(flat(after)).all()
        assert seen["clip_by_global_norm/nonfinite_count"] == 1
    if mode == "zero":
        assert np.isfinite(flat(after)).all()
        assert seen["zero_nonfinite/nonfinite_count"] == 1
        assert not same_bits(after, params)
    if mode == "skip":
        assert same_bits(after, params)
        assert seen["skip_nonfinite/skipped"] == 1
        assert seen["clip_by_global_norm/steps"] == 0
    after = optax.apply_updates(params, run(tx, grads, params)[0])
    assert np.isfinite(flat(after)).all()
    kernel = np.asarray(after["dense"]["kernel"], np.float64)
    assert np.linalg.norm(kernel, axis=0).max() <= 1.0
    assert not jnp.array_equal(after["dense"]["kernel"], params["dense"]["kernel"])
