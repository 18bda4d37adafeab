"""One model in every kind of tree that JAX knows: dicts, tuples, dataclasses, Linen's, NNX' and Equinox'."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict

import clipjax
from tests.support.oracles import exact_norm

AXES = {"encoder/kernel": 0, "head/kernel": 1, "bias": clipjax.SKIP}


def arrays() -> list[jax.Array]:
    """The encoder's bias and kernel, and the head's."""
    rng = np.random.default_rng(0)
    shapes = ((4,), (3, 4), (5,), (4, 5))
    return [jnp.asarray((2 * rng.standard_normal(shape)).astype(np.float32)) for shape in shapes]


class LayerTuple(NamedTuple):
    bias: Any
    kernel: Any


class ModelTuple(NamedTuple):
    encoder: Any
    head: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class LayerData:
    bias: Any
    kernel: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class ModelData:
    encoder: Any
    head: Any


class LayerStruct(flax.struct.PyTreeNode):
    bias: Any
    kernel: Any


class ModelStruct(flax.struct.PyTreeNode):
    encoder: Any
    head: Any


class LayerNNX(nnx.Module):
    def __init__(self, bias: Any, kernel: Any) -> None:
        self.bias, self.kernel = nnx.Param(bias), nnx.Param(kernel)


class ModelNNX(nnx.Module):
    def __init__(self, encoder: Any, head: Any) -> None:
        self.encoder, self.head = encoder, head


def of_dicts(a: Any, b: Any, c: Any, d: Any) -> dict[str, Any]:
    return {"encoder": {"bias": a, "kernel": b}, "head": {"bias": c, "kernel": d}}


def of(model: Any, layer: Any) -> Callable[..., Any]:
    return lambda a, b, c, d: model(layer(a, b), layer(c, d))


def of_equinox(*leaves: Any) -> Any:
    eqx = pytest.importorskip("equinox")

    class Layer(eqx.Module):
        bias: Any
        kernel: Any

    class Model(eqx.Module):
        encoder: Any
        head: Any

    return of(Model, Layer)(*leaves)


def of_boxes(*leaves: Any) -> Any:
    return jax.tree.map(lambda x: nn.Partitioned(x, names=(None,) * x.ndim), of_dicts(*leaves))


CONTAINERS = {
    "dict": of_dicts,
    "with-params": lambda *leaves: {"params": of_dicts(*leaves)},
    "FrozenDict": lambda *leaves: FrozenDict(of_dicts(*leaves)),
    "NamedTuple": of(ModelTuple, LayerTuple),
    "dataclass": of(ModelData, LayerData),
    "flax.struct": of(ModelStruct, LayerStruct),
    "nn.Partitioned": of_boxes,
    "nnx.Module": of(ModelNNX, LayerNNX),
    "nnx.State": lambda *leaves: nnx.state(of(ModelNNX, LayerNNX)(*leaves)),
    "nnx-split": lambda *leaves: nnx.split(of(ModelNNX, LayerNNX)(*leaves))[1],
    "nnx-pure": lambda *leaves: nnx.to_pure_dict(nnx.state(of(ModelNNX, LayerNNX)(*leaves))),
    "equinox": of_equinox,
}


def expected(radius: float) -> list[np.ndarray]:
    bias, kernel, head_bias, head_kernel = (np.asarray(x, np.float64) for x in arrays())

    def onto_ball(x: np.ndarray, axis: int) -> np.ndarray:
        return x * np.minimum(1, radius / exact_norm(x, axis).astype(np.float64)[:, None].swapaxes(axis, 1))

    return [bias, onto_ball(kernel, 0), head_bias, onto_ball(head_kernel, 1)]
