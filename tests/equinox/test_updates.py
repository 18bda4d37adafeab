"""`update(grads, state, model)` as in Equinox' examples, with functions and integers among the parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from clipjax import SKIP
from tests.contract.cases import DEFAULTS, labelled
from tests.support.walk import NEEDS_MORE, build, parameters

eqx = pytest.importorskip("equinox")

MLP = eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))
AXES = {"*weight": 1, "*bias": SKIP}


class Model(eqx.Module):
    """With a function, an integer array, and a field of no array."""

    mlp: Any
    table: jax.Array
    name: str

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.mlp(x) * self.table[0]


def made(name: str) -> Any:
    options = {"axes": AXES} if "axes" in parameters(name) else {}
    return build(labelled(name), **options)


@pytest.mark.parametrize("name", [str(case) for case in DEFAULTS if case.name not in NEEDS_MORE])
def test_the_whole_model_is_taken_as_parameters(name: str) -> None:
    model = Model(MLP, jnp.array([2, 3]), "model")
    tx = made(name)
    params = eqx.filter(model, eqx.is_inexact_array)
    grads = eqx.filter_grad(lambda model, x: jnp.sum(model(x)))(model, jnp.ones(2))
    state = tx.init(params)

    @eqx.filter_jit
    def step(grads: Any, state: Any, params: Any) -> Any:
        return tx.update(grads, state, params)

    expected, _ = step(grads, state, params)
    updates, _ = step(grads, state, model)
    assert jax.tree.structure(updates) == jax.tree.structure(grads)
    assert any(np.asarray(u).any() for u in jax.tree.leaves(updates))
    jax.tree.map(np.testing.assert_array_equal, updates, expected)
    eqx.apply_updates(model, updates)


@pytest.mark.parametrize("value", [1.0, np.nan])
def test_a_step_that_may_be_skipped_without_jit(value: float) -> None:
    tx = clipjax.bounded(optax.adamw(0.1), project=clipjax.max_norm(1.0, axes=AXES), nonfinite="skip")
    params = eqx.filter(MLP, eqx.is_inexact_array)
    grads = jax.tree.map(lambda w: jnp.full_like(w, value), params)
    updates, state = tx.update(grads, tx.init(params), MLP)
    assert all(np.asarray(u).any() == (value == 1) for u in jax.tree.leaves(updates))
    assert clipjax.metrics(state)["skip_nonfinite/skipped"] == (value != 1)
