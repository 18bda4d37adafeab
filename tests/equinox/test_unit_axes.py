"""The axes of Equinox models, and that the default of projections is not taken for them."""

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

pytest.importorskip("equinox")
import equinox as eqx
from equinox import nn

from clipjax.equinox import unit_axes

KEY = jax.random.key(0)


def stack(make: Any, count: int) -> Any:
    return eqx.filter_vmap(make)(jax.random.split(KEY, count))


def abstract(make: Any) -> Any:
    """The model's shapes, and no program that draws weights."""
    return eqx.filter_eval_shape(make, KEY)


# Each layer, and the axes that its weights are reduced over, written from the layer's forward pass.
LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Linear": (lambda key: nn.Linear(3, 4, key=key), {"weight": (1,), "bias": SKIP}),
    "Linear of scalars": (lambda key: nn.Linear("scalar", "scalar", key=key), {"weight": (1,), "bias": SKIP}),
    "Conv1d": (lambda key: nn.Conv1d(2, 5, 3, key=key), {"weight": (1, 2), "bias": SKIP}),
    "Conv2d in groups": (
        lambda key: nn.Conv2d(4, 6, (3, 2), groups=2, key=key),
        {"weight": (1, 2, 3), "bias": SKIP},
    ),
    "ConvTranspose2d": (
        lambda key: nn.ConvTranspose2d(2, 3, 2, key=key),
        {"weight": (1, 2, 3), "bias": SKIP},
    ),
    "Embedding": (lambda key: nn.Embedding(7, 3, key=key), {"weight": (1,)}),
    "GRUCell": (
        lambda key: nn.GRUCell(2, 3, key=key),
        {"weight_ih": (1,), "weight_hh": (1,), "bias": SKIP, "bias_n": SKIP},
    ),
    "LSTMCell": (
        lambda key: nn.LSTMCell(2, 3, key=key),
        {"weight_ih": (1,), "weight_hh": (1,), "bias": SKIP},
    ),
    "MultiheadAttention": (
        lambda key: nn.MultiheadAttention(2, 4, use_query_bias=True, key=key),
        {f"{name}_proj/weight": (1,) for name in ("query", "key", "value", "output")}
        | {"query_proj/bias": SKIP},
    ),
    "LayerNorm": (lambda key: nn.LayerNorm((2, 3)), {"weight": SKIP, "bias": SKIP}),
    "GroupNorm": (lambda key: nn.GroupNorm(2, 4), {"weight": SKIP, "bias": SKIP}),
    "RMSNorm": (lambda key: nn.RMSNorm(4), {"weight": SKIP, "bias": SKIP}),
    "PReLU": (lambda key: nn.PReLU(), {"negative_slope": SKIP}),
    "WeightNorm": (
        lambda key: nn.WeightNorm(nn.Linear(3, 4, key=key)),
        {"layer/weight": (1,), "layer/bias": SKIP, "g": SKIP},
    ),
    "Sequential, with functions": (
        lambda key: nn.Sequential([nn.Linear(3, 4, key=key), nn.Lambda(jax.nn.relu), nn.Dropout(0.5)]),
        {"layers/0/weight": (1,), "layers/0/bias": SKIP},
    ),
    "stacked Linear": (
        lambda _: stack(lambda key: nn.Linear(3, 4, key=key), 2),
        {"weight": (2,), "bias": SKIP},
    ),
    "stacked Conv1d": (
        lambda _: stack(lambda key: nn.Conv1d(2, 5, 3, key=key), 4),
        {"weight": (2, 3), "bias": SKIP},
    ),
    "stacked, with sizes that coincide": (
        lambda _: stack(lambda key: nn.MLP(3, 4, 3, 1, key=key), 3),
        {f"layers/{i}/weight": (2,) for i in (0, 1)} | {f"layers/{i}/bias": SKIP for i in (0, 1)},
    ),
    "a tree of modules": (
        lambda key: {"encoder": [nn.Linear(3, 4, key=key)], "head": None},
        {"encoder/0/weight": (1,), "encoder/0/bias": SKIP},
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_axes_of_every_layer(name: str) -> None:
    make, axes = LAYERS[name]
    assert unit_axes(abstract(make)) == axes


def test_statistics_are_left_alone() -> None:
    norm = nn.BatchNorm(3, axis_name="batch", mode="ema")
    assert set(unit_axes(norm).values()) == {SKIP}
    spectral = nn.SpectralNorm(nn.Linear(3, 4, key=KEY), "weight", key=KEY)
    axes = unit_axes(spectral)
    assert axes.pop("layer/weight") == (1,)
    assert set(axes.values()) == {SKIP}


INPUTS: dict[str, tuple[int, ...]] = {
    "Linear": (3,),
    "Conv1d": (2, 6),
    "Conv2d in groups": (4, 5, 5),
    "ConvTranspose2d": (2, 4, 4),
}


@functools.cache
def jacobians() -> dict[str, Any]:
    """Of each layer its weight, and how its outputs depend on it."""

    @jax.jit
    def of_all(key: jax.Array) -> Any:
        found = {}
        for name, shape in INPUTS.items():
            layer = LAYERS[name][0](key)
            x = jax.random.normal(key, shape)

            def output(weight: jax.Array, layer: Any = layer, x: jax.Array = x) -> jax.Array:
                return eqx.tree_at(lambda layer: layer.weight, layer, weight)(x)

            found[name] = jax.jacrev(output)(layer.weight)
        return found

    return jax.tree.map(np.asarray, of_all(KEY))


@pytest.mark.parametrize("name", INPUTS)
def test_a_unit_is_what_one_output_depends_on(name: str) -> None:
    """An output channel depends on all weights of its unit, and on no other."""
    jacobian, reduced = jacobians()[name], LAYERS[name][1]["weight"]
    rank = len(reduced) + 1
    window = tuple(range(1, jacobian.ndim - rank))
    depends = np.any(jacobian != 0, axis=window)
    for channel, on in enumerate(depends):
        kept = next(axis for axis in range(rank) if axis not in reduced)
        unit = np.zeros(on.shape, bool)
        unit[(slice(None),) * kept + (channel,)] = True
        np.testing.assert_array_equal(on, unit)


def test_a_trained_model_keeps_its_rows_inside() -> None:
    class Model(eqx.Module):
        mlp: eqx.nn.MLP
        blocks: eqx.nn.Linear
        temperature: jax.Array

    def make(key: jax.Array) -> Any:
        return Model(
            nn.MLP(2, 3, 5, 1, key=key), stack(lambda key: nn.Linear(3, 4, key=key), 2), jnp.ones(())
        )

    model = make(KEY)
    axes = unit_axes(model, other={"temperature": SKIP})
    tx = clipjax.chain(optax.sgd(1.0), clipjax.max_norm(0.5, axes=axes))

    @eqx.filter_jit
    def step(model: Any) -> Any:
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
        return eqx.apply_updates(model, updates)

    after = step(model)
    for weight in (after.mlp.layers[0].weight, after.mlp.layers[1].weight, *after.blocks.weight):
        norms = np.linalg.norm(np.asarray(weight, np.float64), axis=1)  # of the rows, by hand
        np.testing.assert_allclose(norms, 0.5, rtol=1e-6)
        assert (norms <= 0.5).all()
    np.testing.assert_allclose(after.mlp.layers[0].bias, model.mlp.layers[0].bias - 1)
    assert clipjax.verify(eqx.filter(after, eqx.is_inexact_array), clipjax.max_norm(0.5, axes=axes)) == []


# --------------------------------------------------------------------------------------------------
# Errors.


class Own(eqx.Module):
    linear: Any
    lora: jax.Array


def own() -> Any:
    return Own(nn.Linear(3, 4, key=KEY), jnp.ones((2, 3)))


def test_unknown_layers_are_listed_and_other_names_them() -> None:
    with pytest.raises(ValueError, match="'lora' of Own, which is not a known layer") as caught:
        unit_axes(own())
    assert "lora of shape (2, 3)" in str(caught.value)
    assert unit_axes(own(), other={"lora": 0})["lora"] == 0
    with pytest.raises(ValueError, match="other: the pattern 'head' matches no leaf"):
        unit_axes(own(), other={"lora": 0, "head": 0})


def test_a_stack_that_cannot_be_told_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"'weight' of Linear, itself of shape \(3, 3\): which axes are a stack"
    ):
        unit_axes(abstract(lambda _: stack(lambda key: nn.Linear(3, 3, key=key), 3)))


def test_what_is_no_equinox_model() -> None:
    with pytest.raises(TypeError, match="model must be an Equinox module"):
        unit_axes({"kernel": jnp.ones((2, 3))})
    with pytest.raises(TypeError, match=r"other.*lora"):
        unit_axes(own(), other={"lora": "0"})


DEFAULTS = {
    "max_norm": clipjax.max_norm(1.0),
    "min_max_norm": clipjax.min_max_norm(1.0, 2.0),
    "unit_norm": clipjax.unit_norm(),
    "tangent_cone": clipjax.tangent_cone(1.0),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_default_is_not_taken_for_equinox(name: str) -> None:
    tx = DEFAULTS[name]
    model = {"trunk": [eqx.filter(nn.Linear(3, 4, key=KEY), eqx.is_array)]}
    calls = [tx.init]
    if callable(tx):
        calls += [tx, lambda params: clipjax.verify(params, tx)]
    for call in calls:
        with pytest.raises(ValueError, match="Linear is an Equinox module") as caught:
            call(model)
        assert "axes=clipjax.equinox.unit_axes(model)" in str(caught.value)


def test_a_group_that_wrappers_leave_of_a_module() -> None:
    model = {"linear": nn.Linear(3, 4, key=KEY), "kernel": jnp.ones((3, 2))}
    tx = optax.masked(clipjax.max_norm(1.0), {"linear": False, "kernel": True})
    tx.init(model)


def test_adaptive_grad_clip_keeps_its_default() -> None:
    model = nn.Linear(3, 4, key=KEY)
    tx = clipjax.adaptive_grad_clip()
    jax.eval_shape(tx.update, model, jax.eval_shape(tx.init, model), model)
