"""Counters that are full, metrics before the first step, and trees with holes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from clipjax._core.transformation import matched, plus

MOST = np.iinfo(np.int32).max


def test_counters_stop_at_their_largest_value() -> None:
    assert plus(jnp.int32(MOST - 1), jnp.array(True)) == MOST
    assert plus(jnp.int32(MOST), jnp.array(True)) == MOST
    assert plus(jnp.int32(MOST - 3), jnp.int32(7)) == MOST
    tx = clipjax.clip_by_global_norm(1.0)
    state = jax.tree.map(lambda x: jnp.full_like(x, MOST) if x.dtype == np.int32 else x, tx.init(jnp.ones(2)))
    _, state = tx.update(jnp.full(2, jnp.nan), state)
    found = clipjax.metrics(state)
    assert found["clip_by_global_norm/nonfinite_count"] == found["clip_by_global_norm/steps"] == MOST


def test_metrics_before_the_first_step_are_numbers() -> None:
    tx = clipjax.bounded(optax.adam(0.1), clip=[clipjax.clip_by_global_norm(1.0), clipjax.zclip()], nonfinite="skip")
    assert all(np.isfinite(x) for x in clipjax.metrics(tx.init(jnp.ones(2))).values())


def test_parameters_without_updates_are_left_out() -> None:
    params = {"frozen": jnp.ones(3), "w": jnp.array([[3.0], [4.0]])}
    updates = {"frozen": None, "w": jnp.array([[3.0], [4.0]])}
    assert matched("clip", updates, params)["frozen"] is None
    for tx in (clipjax.adaptive_grad_clip(0.1), clipjax.max_norm(1.0), clipjax.tangent_cone(1.0)):
        result, _ = tx.update(updates, tx.init(params), params)
        assert result["frozen"] is None
        assert result["w"].shape == (2, 1)
    with pytest.raises(ValueError, match="got shape"):
        matched("clip", {"frozen": jnp.ones(2), "w": None}, params)


def test_a_step_inside_the_bound_does_not_count_as_clipped() -> None:
    grads = jnp.array([[3.0], [4.0]])
    for make in (clipjax.clip_by_global_norm, clipjax.clip_by_norm, clipjax.clip_by_rms, clipjax.clip_by_value):
        tx = make(jnp.float32(5.0))
        _, state = tx.update(grads, tx.init(grads))
        _, state = tx.update(2 * grads, state)
        found = clipjax.metrics(state)
        assert next(x for key, x in found.items() if key.endswith("/clipped_fraction")) == 0.5
