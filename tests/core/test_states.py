"""Counters that are full, metrics before the first step, and trees with holes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from clipjax._core.transformation import saturating_add
from clipjax._core.trees import params_for

MOST = np.iinfo(np.int32).max


def test_counters_stop_at_their_largest_value() -> None:
    assert saturating_add(jnp.int32(MOST - 1), jnp.array(True)) == MOST
    assert saturating_add(jnp.int32(MOST), jnp.array(True)) == MOST
    assert saturating_add(jnp.int32(MOST - 3), jnp.int32(7)) == MOST
    assert saturating_add(jnp.int32(2), jnp.int32(-3)) == -1
    assert saturating_add(jnp.int32(2), jnp.uint32(3_000_000_000)) == MOST
    for kind in (jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.int32, jnp.uint32):
        assert saturating_add(jnp.int32(2), kind(100)) == 102
    tx = clipjax.clip_by_global_norm(1.0)
    state = jax.tree.map(
        lambda x: jnp.full_like(x, MOST) if x.dtype == np.int32 else x,
        tx.init(jnp.ones(2)),
    )
    _, state = tx.update(jnp.full(2, jnp.nan), state)
    found = clipjax.metrics(state)
    assert (
        found["clip_by_global_norm/nonfinite_count"]
        == found["clip_by_global_norm/steps"]
        == MOST
    )


def test_metrics_before_the_first_step_are_numbers() -> None:
    tx = clipjax.bounded(
        optax.adam(0.1),
        clip=[clipjax.clip_by_global_norm(1.0), clipjax.zclip()],
        nonfinite="skip",
    )
    assert all(np.isfinite(x) for x in clipjax.metrics(tx.init(jnp.ones(2))).values())


def test_metrics_are_read_without_transfers() -> None:
    tx = clipjax.clip_by_global_norm(1.0)
    _, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    with jax.transfer_guard("disallow"):
        found = clipjax.metrics(state)
    assert found["clip_by_global_norm/clipped_fraction"] == 1


def test_parameters_without_updates_are_left_out() -> None:
    params = {"frozen": jnp.ones(3), "w": jnp.array([[3.0], [4.0]])}
    updates = {"frozen": None, "w": jnp.array([[3.0], [4.0]])}
    assert params_for("clip", updates, params)["frozen"] is None
    for tx in (
        clipjax.adaptive_grad_clip(0.1),
        clipjax.max_norm(1.0),
        clipjax.tangent_cone(1.0),
    ):
        result, _ = tx.update(updates, tx.init(params), params)
        assert result["frozen"] is None
        assert result["w"].shape == (2, 1)
    with pytest.raises(ValueError, match="got shape"):
        params_for("clip", {"frozen": jnp.ones(2), "w": None}, params)


def test_a_step_inside_the_bound_does_not_count_as_clipped() -> None:
    grads = jnp.array([[3.0], [4.0]])
    for make in (
        clipjax.clip_by_global_norm,
        clipjax.clip_by_norm,
        clipjax.clip_by_rms,
        clipjax.clip_by_value,
    ):
        tx = make(jnp.float32(5.0))
        _, state = tx.update(grads, tx.init(grads))
        _, state = tx.update(2 * grads, state)
        found = clipjax.metrics(state)
        assert (
            next(x for key, x in found.items() if key.endswith("/clipped_fraction"))
            == 0.5
        )


def test_steps_that_are_taken_whatever_they_contain_do_not_count_as_skipped() -> None:
    tx = clipjax.skip_nonfinite(optax.sgd(0.1), max_consecutive=2)
    state, seen = tx.init(jnp.ones(1)), []
    for value in (np.nan, np.nan, np.nan, np.nan, 1.0, np.nan):
        _, state = tx.update(jnp.array([value]), state)
        found = clipjax.metrics(state)
        seen.append(
            (
                int(found["skip_nonfinite/skipped"]),
                int(found["skip_nonfinite/skipped_in_a_row"]),
            )
        )
    assert seen == [(1, 1), (2, 2), (2, 2), (2, 2), (2, 0), (3, 1)]


def test_a_transformation_that_occurs_again_gets_a_number() -> None:
    tx = optax.chain(*(clipjax.clip_by_global_norm(bound) for bound in (4.0, 2.0, 1.0)))
    _, state = tx.update(jnp.array([8.0]), tx.init(jnp.ones(1)))
    found = clipjax.metrics(state)
    norms = [found[f"clip_by_global_norm{again}/norm"] for again in ("", "_1", "_2")]
    np.testing.assert_allclose(norms, [8.0, 4.0, 2.0], rtol=2e-6)


def test_a_number_does_not_hide_another_transformation_of_that_name() -> None:
    links = [
        clipjax.with_metrics(
            name, lambda u, p, s, m, x=x: (u, {"x": jnp.float32(x)}, m)
        )
        for x, name in enumerate(("a", "a_1", "a"))
    ]
    found = clipjax.metrics(
        optax.chain(*(optax.stateless(lambda u, _: u), *links)).init(jnp.ones(1))
    )
    assert {key for key in found if key.endswith("/x")} == {"a/x", "a_1/x", "a_2/x"}


def test_zeros_do_not_enter_the_window_of_spikes() -> None:
    tx = clipjax.skip_spikes(optax.sgd(0.1), window=4, warmup_steps=2)
    state = tx.init(jnp.ones(1))
    for value in (0.0, 0.0, 0.0, 0.0, 1.0, 0.9, 0.0, 1.1):
        _, state = tx.update(jnp.array([value]), state)
    assert clipjax.metrics(state)["skip_spikes/skipped"] == 0
