"""A projection goes wherever a function or a gradient transformation of Optax goes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax

BALL = clipjax.max_norm(1.0)
PARAMS = {"kernel": jnp.full((4, 3), 2.0), "bias": jnp.ones(3)}
WITHIN = np.sqrt(np.sum(np.square(np.asarray(BALL(PARAMS)["kernel"], np.float64)), axis=0))


def cloudpickled(projection: Any) -> Any:
    cloudpickle = pytest.importorskip("cloudpickle")
    return cloudpickle.loads(cloudpickle.dumps(projection))


def in_a_module(projection: Any) -> Any:
    eqx = pytest.importorskip("equinox")

    class Trainer(eqx.Module):
        projection: Any
        weight: jax.Array

    trainer = Trainer(projection, jnp.ones(3))
    mapped = jax.tree.map(lambda leaf: leaf, trainer)
    assert [leaf.shape for leaf in jax.tree.leaves(eqx.filter(mapped, eqx.is_array))] == [(3,)]
    return lambda params: eqx.filter_jit(lambda trainer, params: trainer.projection(params))(mapped, params)


FORMS: dict[str, Callable[[Any], Any]] = {
    "jit": jax.jit,
    "cond": lambda project: lambda params: jax.lax.cond(True, project, lambda x: x, params),
    "jit of cond": lambda project: jax.jit(lambda p: jax.lax.cond(p["bias"][0] > 0, project, lambda x: x, p)),
    "checkpoint": jax.checkpoint,
    "tree.map": lambda project: jax.tree.map(lambda leaf: leaf, project),
    "tree.map of a dict": lambda project: jax.tree.map(lambda leaf: leaf, {"projection": project})[
        "projection"
    ],
    "field of an Equinox module": in_a_module,
    "cloudpickle": cloudpickled,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": lambda project: project._replace(init=project.init),
}


@pytest.mark.parametrize("form", FORMS)
def test_it_bounds_in_every_form(form: str) -> None:
    after = FORMS[form](BALL)(PARAMS)
    np.testing.assert_allclose(
        np.linalg.norm(np.asarray(after["kernel"], np.float64), axis=0), WITHIN, rtol=1e-6
    )
    assert (WITHIN <= 1).all()


@pytest.mark.parametrize("form", ["tree.map", "cloudpickle", "copy", "deepcopy", "replace"])
def test_it_stays_a_link(form: str) -> None:
    made = FORMS[form](BALL)
    assert isinstance(made, optax.GradientTransformationExtraArgs)
    tx = clipjax.chain(optax.sgd(1.0), made)
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert float(jnp.max(jnp.linalg.norm((PARAMS["kernel"] + updates["kernel"]), axis=0))) <= 1 + 1e-6
    with pytest.raises(ValueError, match="put projections last"):
        clipjax.chain(made, optax.sgd(1.0))


def test_to_optax_it_is_one_of_its_own() -> None:
    assert isinstance(BALL, optax.GradientTransformation)
    init, update = BALL
    assert (BALL[0], BALL[1], len(BALL)) == (init, update, 2)
    replaced = BALL._replace(update=lambda updates, state, params=None, **_: (updates, state))
    assert optax.chain(optax.sgd(1.0), replaced).update(PARAMS, ((optax.EmptyState(),) * 2, None), PARAMS)


def test_jit_of_projections_that_are_gone() -> None:
    """JAX refers weakly to what it compiles, and must not be left with what was freed."""
    gc.freeze()  # collecting all that the tests have left behind would take a minute
    try:
        for _ in range(20):
            after = jax.jit(clipjax.max_norm(1.0))({"kernel": PARAMS["kernel"]})
            gc.collect()
    finally:
        gc.unfreeze()
    np.testing.assert_allclose(np.linalg.norm(np.asarray(after["kernel"]), axis=0), 1, rtol=1e-6)
