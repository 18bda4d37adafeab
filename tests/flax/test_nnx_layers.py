"""The axes of an NNX layer: a unit is what one output depends on, as the layer's own derivative says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clipjax import SKIP
from tests.support.units import CARRY, HEADS, IMAGE, Layer, lstm, output_of, random, random_weights

pytest.importorskip("flax")
from flax import nnx

from clipjax.flax import unit_axes


def shapes_of(make: Callable[[nnx.Rngs], Any]) -> Any:
    """The layer that `make` makes, which has shapes in the place of arrays: nothing is computed."""
    return nnx.eval_shape(lambda: make(nnx.Rngs(0)))


def nnx_attention(param: str) -> Layer:
    def attention(rngs: nnx.Rngs) -> Any:
        return nnx.MultiHeadAttention(2, 4, qkv_features=6, out_features=3, decode=False, rngs=rngs)

    if param == "out":
        return Layer(attention, (random(2, 3, 4),), 3, "out.kernel")
    return Layer(attention, (random(2, 3, 4),), 6, f"{param}.kernel", captured=param, **HEADS)


NNX = {
    "Linear": Layer(lambda r: nnx.Linear(4, 3, rngs=r), (random(2, 4),), 3),
    "LinearGeneral": Layer(
        lambda r: nnx.LinearGeneral((3, 4), (2, 3), axis=(-2, -1), rngs=r), (random(2, 3, 4),), 6, **HEADS
    ),
    "LinearGeneral-batch": Layer(
        lambda r: nnx.LinearGeneral(4, 3, batch_axis={0: 2}, rngs=r),
        (random(2, 3, 4),),
        6,
        outputs=(-3, -1),
    ),
    "Conv1D": Layer(lambda r: nnx.Conv(4, 3, 2, rngs=r), (random(2, 5, 4),), 3),
    "Conv2D": Layer(lambda r: nnx.Conv(4, 3, (2, 3), rngs=r), IMAGE, 3),
    "Conv3D": Layer(lambda r: nnx.Conv(2, 3, (2, 1, 2), rngs=r), (random(2, 3, 3, 3, 2),), 3),
    "Conv-grouped": Layer(lambda r: nnx.Conv(4, 6, (2, 2), feature_group_count=2, rngs=r), IMAGE, 6),
    "ConvTranspose": Layer(lambda r: nnx.ConvTranspose(4, 3, (2, 2), rngs=r), IMAGE, 3),
    "ConvTranspose-transposed": Layer(
        lambda r: nnx.ConvTranspose(4, 3, (2, 2), transpose_kernel=True, rngs=r), IMAGE, 3
    ),
    "Einsum": Layer(
        lambda r: nnx.Einsum("abc,cde->abde", (4, 2, 3), (2, 3), rngs=r), (random(2, 3, 4),), 6, **HEADS
    ),
    "Embed": Layer(
        lambda r: nnx.Embed(5, 3, rngs=r),
        (np.arange(5, dtype=np.int32),),
        5,
        "embedding",
        outputs=(-2,),
    ),
    "LoRA": Layer(lambda r: nnx.LoRA(4, 2, 3, rngs=r), (random(2, 4),), 3, "lora_b"),
    "LoRALinear": Layer(lambda r: nnx.LoRALinear(4, 3, lora_rank=2, rngs=r), (random(2, 4),), 3),
    "query": nnx_attention("query"),
    "key": nnx_attention("key"),
    "value": nnx_attention("value"),
    "out": nnx_attention("out"),
    "LSTMCell": lstm(lambda r: nnx.LSTMCell(5, 4, rngs=r), param="hf.kernel"),
    "OptimizedLSTMCell": lstm(
        lambda r: nnx.OptimizedLSTMCell(5, 4, rngs=r), param="dense_i.kernel", gates=4
    )._replace(number=16),
    "GRUCell": Layer(
        lambda r: nnx.GRUCell(5, 4, rngs=r), (CARRY, random(3, 5)), 12, "dense_h.kernel", gates=3
    ),
    "SimpleCell": Layer(lambda r: nnx.SimpleCell(5, 4, rngs=r), (CARRY, random(3, 5)), 4, "dense_i.kernel"),
}


@pytest.mark.parametrize("name", NNX)
def test_the_units_of_a_layer(name: str) -> None:
    case = NNX[name]
    layer = shapes_of(case.layer)
    axes = unit_axes(layer)
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    flat = dict(nnx.to_flat_state(random_weights(lambda: params)))
    path = tuple(case.param.split("."))

    def function(changed: Any) -> Any:
        new = nnx.from_flat_state({**flat, path: flat[path].replace(changed)})
        whole = nnx.merge(graph, new, rest)
        if case.captured:
            return getattr(whole, case.captured)(*case.inputs)
        return output_of(whole(*case.inputs))

    case.check(function, flat[path][...], axes["/".join(path)])
    assert all(value is SKIP for key, value in axes.items() if key.endswith("bias"))


def test_the_first_matrix_of_lora_has_a_unit_for_each_of_its_outputs() -> None:
    """What comes out of the whole depends on all of them."""
    axes = unit_axes(shapes_of(lambda r: nnx.LoRA(4, 2, 3, rngs=r)))
    assert axes == {"lora_a": (0,), "lora_b": (0,)}


NORMS = {
    "BatchNorm": lambda r: nnx.BatchNorm(4, rngs=r),
    "LayerNorm": lambda r: nnx.LayerNorm(4, rngs=r),
    "RMSNorm": lambda r: nnx.RMSNorm(4, rngs=r),
    "GroupNorm": lambda r: nnx.GroupNorm(4, 2, rngs=r),
    "InstanceNorm": lambda r: nnx.InstanceNorm(4, rngs=r),
    "PReLU": lambda r: nnx.PReLU(),
}


@pytest.mark.parametrize("name", [name for name in NORMS if hasattr(nnx, name)])  # older versions lack some
def test_scales_are_left_alone(name: str) -> None:
    assert set(unit_axes(shapes_of(NORMS[name])).values()) == {SKIP}
