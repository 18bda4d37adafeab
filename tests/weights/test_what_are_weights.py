"""What is given beside the weights: the statistics of a Flax model, the functions of an Equinox module."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from clipjax import functional
from tests.support.trees import same_bits

pytest.importorskip("flax")
from flax import nnx
from flax.core import FrozenDict

PARAMS = {"Dense_0": {"kernel": np.full((2, 3), -2, np.float32), "bias": np.full(3, -2, np.float32)}}
STATS = {"BatchNorm_0": {"mean": np.full(3, -2, np.float32)}}
VARIABLES = {"params": PARAMS, "batch_stats": STATS}

# Projections that would change the statistics, and the same for the weights alone.
OF_ALL = {
    "box": lambda: clipjax.box(0.0, 1.0),
    "non_negative": lambda: clipjax.non_negative(),
    "max_norm": lambda: clipjax.max_norm(1.0, axes=None),
    "min_max_norm": lambda: clipjax.min_max_norm(0.5, 1.0, axes=lambda path, leaf: None),
    "unit_norm": lambda: clipjax.unit_norm(axes={"*": None}),
    "project": lambda: clipjax.project(optax.projections.projection_non_negative),
}


@pytest.mark.parametrize("kind", [dict, FrozenDict])
@pytest.mark.parametrize("name", OF_ALL)
def test_whole_variables_are_refused(name: str, kind: Any) -> None:
    projection = OF_ALL[name]()
    calls = [projection, lambda tree: clipjax.verify(tree, projection)]
    if name != "project":  # of which nothing is known before it runs
        calls.append(projection.init)
    for call in calls:
        with pytest.raises(ValueError, match="not a weight") as caught:
            call(kind(VARIABLES))
        message = str(caught.value)
        assert "'batch_stats/BatchNorm_0/mean' of shape (3,), in 'batch_stats'" in message
        assert "variables['params']" in message
    jax.eval_shape(projection.__call__, PARAMS)
    jax.eval_shape(projection.__call__, {"params": PARAMS})


def test_matrices_among_the_statistics() -> None:
    with pytest.raises(ValueError, match="'cache/key' of shape"):
        clipjax.spectral_cap(1.0)({"params": PARAMS, "cache": {"key": np.ones((2, 3), np.float32)}})


def test_what_leaves_the_statistics_alone_takes_whole_variables() -> None:
    only_params = clipjax.project(lambda tree: {**tree, "params": jax.tree.map(jnp.abs, tree["params"])})
    for projection in (
        clipjax.max_norm(1.0),
        clipjax.box(0.0, 1.0, where="kernel"),
        clipjax.unit_norm(axes={"params/*": None}),
        only_params,
    ):
        assert same_bits(projection(VARIABLES)["batch_stats"], STATS)


def test_other_keys_beside_params_may_be_weights() -> None:
    tree = {"params": PARAMS, "log_temperature": np.float32(-1)}
    assert float(clipjax.non_negative()(tree)["log_temperature"]) == 0
    assert float(clipjax.non_negative()({"batch_stats": np.float32(-1)})["batch_stats"]) == 0


class Model(nnx.Module):
    def __init__(self) -> None:
        self.linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
        self.scale = Own(jnp.ones(()))


class Own(nnx.Variable):
    """A type of one's own, which may be a weight."""


@pytest.mark.parametrize("name", [name for name in OF_ALL if name != "project"])
def test_a_state_with_statistics_is_refused(name: str) -> None:
    state, projection = nnx.state(Model()), OF_ALL[name]()
    for call in (projection, projection.init, lambda tree: clipjax.verify(tree, projection)):
        with pytest.raises(ValueError, match=re.escape("an nnx.BatchStat, is not a weight")) as caught:
            call(state)
        assert "nnx.state(model, nnx.Param)" in str(caught.value)
    jax.eval_shape(projection.__call__, nnx.state(Model(), nnx.Any(nnx.Param, Own)))


def test_the_optimizer_of_nnx_takes_the_weights() -> None:
    model = Model()
    statistics = nnx.state(model, nnx.BatchStat)
    tx = clipjax.chain(optax.sgd(1.0), clipjax.non_negative())
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    assert all((leaf >= 0).all() for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert same_bits(nnx.state(model, nnx.BatchStat), statistics)


# --------------------------------------------------------------------------------------------------
# Functions among the leaves.

WITH_FUNCTION = {"layers": [{"activation": jax.nn.relu, "kernel": np.ones((2, 3), np.float32)}]}
CALLED = {
    "max_norm": clipjax.max_norm(1.0),
    "box": clipjax.box(0.0, 1.0),
    "spectral_cap": clipjax.spectral_cap(1.0),
    "project": clipjax.project(lambda params: params),
    "qk_clip": lambda tree: clipjax.qk_clip()(tree, max_logits={}),
    "global_norm": functional.global_norm,
    "leaf_norms": functional.leaf_norms,
    "unitwise_norms": lambda tree: functional.unitwise_norms(tree, 0),
    "clip_by_value": lambda tree: functional.clip_by_value(tree, 0.0, 1.0),
    "clip_by_norm": lambda tree: functional.clip_by_norm(tree, 1.0),
    "clip_by_global_norm": lambda tree: functional.clip_by_global_norm(tree, 1.0),
}


@pytest.mark.parametrize("name", CALLED)
def test_a_function_among_the_leaves_is_named(name: str) -> None:
    with pytest.raises(TypeError, match="'layers/0/activation' is not an array") as caught:
        CALLED[name](WITH_FUNCTION)
    assert "eqx.filter(model, eqx.is_inexact_array)" in str(caught.value)


def test_a_whole_equinox_module() -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))
    projection = clipjax.max_norm(1.0, axes={"weight": 1})
    with pytest.raises(TypeError, match="'activation' is not an array but of type"):
        projection(model)
    arrays = eqx.filter(model, eqx.is_inexact_array)
    assert jax.tree.structure(jax.eval_shape(projection.__call__, arrays)) == jax.tree.structure(arrays)
    clipjax.verify(model, projection)  # looks at the arrays only
