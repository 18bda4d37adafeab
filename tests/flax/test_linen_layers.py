"""The axes of a Linen layer: a unit is what one output depends on, as the layer's own derivative says."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import clipjax
from clipjax import SKIP
from tests.support.units import CARRY, HEADS, IMAGE, Layer, lstm, output_of, random, random_weights

pytest.importorskip("flax")
import flax.linen as nn

from clipjax.flax import unit_axes

KEY = jax.random.key(0)


def attention(param: str) -> Layer:
    layer = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=6, out_features=3)
    if param == "out":
        return Layer(layer, (random(2, 3, 4),), 3, "out/kernel")
    return Layer(layer, (random(2, 3, 4),), 6, f"{param}/kernel", captured=param, **HEADS)


LINEN = {
    "Dense": Layer(nn.Dense(3), (random(2, 4),), 3),
    "DenseGeneral": Layer(nn.DenseGeneral((2, 3), axis=(-2, -1)), (random(2, 3, 4),), 6, **HEADS),
    "DenseGeneral-middle": Layer(nn.DenseGeneral(3, axis=1), (random(2, 3, 4),), 3),
    "DenseGeneral-batch": Layer(
        nn.DenseGeneral(3, axis=-1, batch_dims=(0,)), (random(2, 3, 4),), 6, outputs=(-3, -1)
    ),
    "Conv1D": Layer(nn.Conv(3, 2), (random(2, 5, 4),), 3),
    "Conv2D": Layer(nn.Conv(3, (2, 3), strides=2, padding="VALID"), IMAGE, 3),
    "Conv3D": Layer(nn.Conv(3, (2, 1, 2)), (random(2, 3, 3, 3, 2),), 3),
    "Conv-grouped": Layer(nn.Conv(6, (2, 2), feature_group_count=2), IMAGE, 6),
    "Conv-depthwise": Layer(nn.Conv(4, (2, 2), feature_group_count=4), IMAGE, 4),
    "ConvLocal1D": Layer(nn.ConvLocal(3, 2, padding="VALID"), (random(2, 5, 4),), 4 * 3, **HEADS),
    "ConvLocal2D": Layer(
        nn.ConvLocal(2, (2, 2), padding="VALID"), (random(2, 3, 3, 2),), 8, outputs=(-3, -2, -1)
    ),
    "ConvTranspose": Layer(nn.ConvTranspose(3, (2, 2), strides=(2, 2)), IMAGE, 3),
    "ConvTranspose-transposed": Layer(nn.ConvTranspose(3, (2, 2), transpose_kernel=True), IMAGE, 3),
    "Einsum": Layer(nn.Einsum((4, 2, 3), "abc,cde->abde"), (random(2, 3, 4),), 6, **HEADS),
    "Einsum-batch": Layer(nn.Einsum((3, 4, 2), "bld, ldh -> blh"), (random(2, 3, 4),), 6, **HEADS),
    "Einsum-two": Layer(nn.Einsum((2, 5, 4), "xdc,hcd->xh"), (random(3, 4, 5),), 2),
    "Embed": Layer(nn.Embed(5, 3), (np.arange(5, dtype=np.int32),), 5, "embedding", outputs=(-2,)),
    "query": attention("query"),
    "key": attention("key"),
    "value": attention("value"),
    "out": attention("out"),
    **{f"LSTMCell-{g}": lstm(nn.LSTMCell(4), param=f"{g}/kernel") for g in ("ii", "if", "hg", "ho")},
    **{f"OptimizedLSTMCell-{g}": lstm(nn.OptimizedLSTMCell(4), param=f"{g}/kernel") for g in ("ig", "hf")},
    **{
        f"{type(cell).__name__}-{g}": Layer(cell, (CARRY, random(3, 5)), 4, f"{g}/kernel")
        for cell, gates in (
            (nn.GRUCell(4), ("ir", "iz", "hn")),
            (nn.MGUCell(4), ("if", "hn")),
            (nn.SimpleCell(4), "ih"),
        )
        for g in gates
    },
}


@pytest.mark.parametrize("name", LINEN)
def test_the_units_of_a_layer(name: str) -> None:
    case = LINEN[name]
    layer, path = case.layer, case.param.split("/")
    axes = unit_axes(layer, KEY, *case.inputs)
    variables = random_weights(layer.init, KEY, *case.inputs)
    weights = variables["params"]
    for key in path:
        weights = weights[key]

    def function(changed: Any) -> Any:
        tree = jax.tree.map(lambda x: x, variables)
        at = tree["params"]
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = changed
        if not case.captured:
            return output_of(layer.apply(tree, *case.inputs))
        captured = layer.apply(tree, *case.inputs, capture_intermediates=True)[1]["intermediates"]
        return captured[case.captured]["__call__"][0]

    case.check(function, weights, axes[case.param])
    biases = [value for key, value in axes.items() if key.endswith("bias")]
    assert all(value is SKIP for value in biases)


NORMS = {
    "BatchNorm": nn.BatchNorm(use_running_average=False),
    "LayerNorm": nn.LayerNorm(),
    "RMSNorm": nn.RMSNorm(),
    "GroupNorm": nn.GroupNorm(2),
    "InstanceNorm": nn.InstanceNorm(),
    "PReLU": nn.PReLU(),
}


@pytest.mark.parametrize("name", NORMS)
def test_scales_are_left_alone(name: str) -> None:
    assert set(unit_axes(NORMS[name], KEY, random(2, 3, 4)).values()) == {SKIP}


@pytest.mark.parametrize("wrapper", [nn.WeightNorm, nn.SpectralNorm])
def test_reparametrised_layers(wrapper: Any) -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            more = {"update_stats": True} if wrapper is nn.SpectralNorm else {}
            return wrapper(nn.Dense(3))(x, **more)

    axes = unit_axes(Model(), KEY, random(2, 4))
    scales = {f"{wrapper.__name__}_0/Dense_0/kernel/scale"} if wrapper is nn.WeightNorm else set()
    assert set(axes) == {"Dense_0/kernel", "Dense_0/bias"} | scales
    assert axes["Dense_0/kernel"] == (0,)
    assert all(axes[scale] is SKIP for scale in scales)
    params = random_weights(Model().init, KEY, random(2, 4))["params"]
    jax.eval_shape(clipjax.max_norm(1.0, axes=axes).__call__, params)  # every pattern matches
