"""The axes of whole models, in what they are for: projections, train states and optimizers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from clipjax import SKIP
from tests.support.oracles import exact_norm
from tests.support.trees import same_bits
from tests.support.units import random, random_weights

pytest.importorskip("flax")
import flax.linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from clipjax.flax import unit_axes

KEY = jax.random.key(0)
LIST = getattr(nnx, "List", list)  # older versions of Flax take any


class Model(nn.Module):
    """A layer of every kind that has something to tell, names that patterns would trip over among them."""

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.Embed(11, 4, name="embed")(ids)
        x = nn.MultiHeadDotProductAttention(2, name="attention")(x)
        x = nn.LayerNorm()(x)
        x = nn.Conv(4, 3, feature_group_count=2, name="conv[0]*")(x)
        x = nn.ConvTranspose(4, 2, transpose_kernel=True)(x)
        x = nn.Bidirectional(nn.RNN(nn.LSTMCell(4)), nn.RNN(nn.OptimizedLSTMCell(4)))(x)
        return nn.Dense(3)(x)


IDS = jax.ShapeDtypeStruct((2, 5), np.int32)


def norms_by_hand(params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The norm of each unit of `Model`, by its paths."""
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    found = {}
    for path, leaf in flat:
        name = jax.tree_util.keystr(path, simple=True, separator="/").removeprefix("params/")
        if name.endswith(("kernel", "embedding")):
            axis: Any = 0
            if name == "embed/embedding":
                axis = 1
            elif name == "attention/out/kernel" or name.startswith("conv["):
                axis = (0, 1)
            elif name.startswith("ConvTranspose"):
                axis = (0, 2)
            found[name] = exact_norm(leaf, axis)
    return found


@functools.cache
def axes_of_the_model() -> dict[str, Any]:
    return unit_axes(Model(), KEY, IDS)


@functools.cache
def variables_of_the_model() -> dict[str, Any]:
    return jax.tree.map(jnp.asarray, random_weights(Model().init, KEY, IDS))


def test_a_linen_model_without_the_outer_params() -> None:
    axes, params = axes_of_the_model(), variables_of_the_model()["params"]
    projection = clipjax.max_norm(0.5, axes=axes)
    # One program with what an entry put before the others changes.
    kept = clipjax.max_norm(0.5, axes={"attention/*": SKIP} | axes)
    projected, changed = jax.jit(lambda params: (projection(params), kept(params)))(params)
    by_hand = norms_by_hand(params)
    assert len(by_hand) == 1 + 4 + 1 + 1 + 16 + 1
    for name, norms in norms_by_hand(projected).items():
        np.testing.assert_allclose(norms, np.minimum(by_hand[name], 0.5), rtol=1e-6)
        assert (norms <= 0.5).all()
    assert clipjax.verify(projected, projection) == []
    assert clipjax.verify(params, projection)

    assert same_bits(changed["attention"], params["attention"])
    assert not same_bits(projected["attention"], params["attention"])
    assert not same_bits(changed["embed"], params["embed"])
    assert same_bits(changed["embed"], projected["embed"])


def test_a_linen_model_with_the_outer_params_is_the_same_program() -> None:
    axes, variables = axes_of_the_model(), variables_of_the_model()
    projection = clipjax.max_norm(0.5, axes=axes)
    with_params, without = (
        str(jax.make_jaxpr(projection.__call__)(tree)) for tree in (variables, variables["params"])
    )
    assert with_params == without
    assert "sqrt" in without
    assert {v.path.removeprefix("params/"): v.value for v in clipjax.verify(variables, projection)} == {
        v.path: v.value for v in clipjax.verify(variables["params"], projection)
    }


@pytest.mark.parametrize("outer", [True, False], ids=["with-params", "without"])
def test_every_kind_of_transformation_takes_the_axes(outer: bool) -> None:
    axes, params = axes_of_the_model(), variables_of_the_model()
    params = params if outer else params["params"]
    still = jax.tree.map(np.zeros_like, params)
    for tx in (
        clipjax.max_norm(0.5, axes=axes),
        clipjax.clip_by_norm(0.5, axes=axes),
        clipjax.adaptive_grad_clip(axes=axes),
    ):
        jax.eval_shape(lambda still, params, tx=tx: tx.update(still, tx.init(params), params), still, params)


def test_a_linen_train_state() -> None:
    model, axes, params = Model(), axes_of_the_model(), variables_of_the_model()["params"]
    frozen = jax.tree_util.tree_map_with_path(lambda path, _: path[0].key == "embed", params)
    tx = optax.chain(
        optax.sgd(0.1), optax.masked(clipjax.max_norm(0.5, axes=axes), jax.tree.map(lambda x: not x, frozen))
    )

    @jax.jit
    def step(params: Any) -> TrainState:
        state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
        return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, params))

    for name, norms in norms_by_hand(step(params).params).items():
        assert (norms <= 0.5).all() == (name != "embed/embedding")


class NNXModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(11, 4, rngs=rngs)
        self.layers = LIST(
            [nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)]
        )
        self.rnn = nnx.RNN(nnx.LSTMCell(4, 4, rngs=rngs))
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.head = nnx.LoRA(4, 2, 3, base_module=nnx.Linear(4, 3, rngs=rngs), rngs=rngs)
        self.tied = self.embed


@functools.cache
def nnx_model() -> NNXModel:
    """A live model of random weights, whose own initialization is not run."""
    graph, params, rest = nnx.split(nnx.eval_shape(lambda: NNXModel(nnx.Rngs(0))), nnx.Param, ...)
    params = jax.tree.map(jnp.asarray, random_weights(lambda: params))
    rest = jax.tree.map(
        lambda x: (
            KEY if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.asarray(np.zeros(x.shape, x.dtype))
        ),
        rest,
    )
    return nnx.merge(graph, params, rest)


def test_an_nnx_model_in_its_optimizer() -> None:
    axes = unit_axes(nnx_model())
    assert axes["embed/embedding"] == (1,)
    assert axes["layers/0/kernel"] == axes["rnn/cell/hf/kernel"] == axes["head/base_module/kernel"] == (0,)
    assert axes["layers/1/scale"] is SKIP
    projection = clipjax.max_norm(0.3, axes=axes)

    @nnx.jit
    def step(model: Any) -> Any:
        optimizer = nnx.Optimizer(model, clipjax.chain(optax.adam(1e-3), projection), wrt=nnx.Param)
        gradients = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
        optimizer.update(model, gradients)
        return model

    state = nnx.state(step(nnx.clone(nnx_model())), nnx.Param)
    assert clipjax.verify(state, projection) == []
    assert clipjax.verify(state, clipjax.max_norm(0.27, axes=axes))
    flat = {"/".join(map(str, k)): v[...] for k, v in nnx.to_flat_state(state)}
    np.testing.assert_allclose(exact_norm(flat["embed/embedding"], 1), 0.3, rtol=1e-6)
    np.testing.assert_allclose(exact_norm(flat["attention/out/kernel"], (0, 1)), 0.3, rtol=1e-6)


def test_wrt_chooses_the_parameters() -> None:
    axes = unit_axes(nnx_model(), wrt=nnx.LoRAParam)
    assert set(axes) == {"head/lora_a", "head/lora_b"}
    state = nnx.state(nnx_model(), nnx.LoRAParam)
    jax.eval_shape(clipjax.max_norm(0.1, axes=axes).__call__, state)


def test_nothing_is_computed_and_flags_may_be_keywords() -> None:
    class Huge(nn.Module):
        @nn.compact
        def __call__(self, x: Any, *, wide: bool) -> Any:
            return nn.Dense(10**6 if wide else 3)(nn.Dense(10**6)(x))

    x = jax.ShapeDtypeStruct((1, 10), np.float32)
    axes = unit_axes(Huge(), KEY, x, wide=True)  # 4 TB of weights
    assert axes["Dense_1/kernel"] == (0,)


def test_modules_that_share_a_scope() -> None:
    class Outer(nn.Module):
        def setup(self) -> None:
            self.inner = nn.Dense(3)
            nn.share_scope(self, self.inner)

        def __call__(self, x: Any) -> Any:
            return self.inner(x)

    assert unit_axes(Outer(), KEY, random(2, 4)) == {"kernel": (0,), "bias": SKIP}


def test_other_methods_and_collections() -> None:
    class TwoWays(nn.Module):
        def setup(self) -> None:
            self.layer, self.norm = nn.Dense(3), nn.BatchNorm(use_running_average=False)

        def embed(self, x: Any) -> Any:
            return self.norm(self.layer(x))

    axes = unit_axes(TwoWays(), {"params": KEY, "dropout": KEY}, random(2, 4), method=TwoWays.embed)
    assert set(axes) == {"layer/kernel", "layer/bias", "norm/scale", "norm/bias"}
