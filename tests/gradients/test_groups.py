"""`clip_by_group_norm`: what its metrics say of several groups."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import clipjax


def test_the_scale_of_groups_is_the_smallest() -> None:
    grads = {"a": jnp.array([4.0]), "b": jnp.array([0.5]), "c": jnp.array([8.0])}
    tx = clipjax.clip_by_group_norm({"a": 1.0, "b": 1.0, "c": 1.0})
    _, state = tx.update(grads, tx.init(grads))
    np.testing.assert_allclose(
        clipjax.metrics(state)["clip_by_group_norm/scale"], 1 / 8, rtol=2e-6
    )
