"""The page docs/constraints.md: its constraints on three kinds of model, and its table of layers.

The models are of one convolution, attention and a dense layer.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.support import ROOT
from tests.support.trees import same_bits
from tests.support.units import random, random_weights

pytest.importorskip("flax")

import flax.linen as nn
from flax import nnx

from clipjax.flax import unit_axes

PAGE = (ROOT / "docs" / "constraints.md").read_text(encoding="utf-8")
WIDTH, HEADS, DIM = 6, 2, 3
TANGENTS = {"tangent_cone", "tangent_space"}


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(WIDTH, (3,), name="conv")(x)
        x = nn.MultiHeadDotProductAttention(HEADS, qkv_features=HEADS * DIM, name="attention")(x)
        return nn.Dense(2, name="dense")(x)


class NNX(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(4, WIDTH, (3,), rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, qkv_features=HEADS * DIM, decode=False, rngs=rngs
        )
        self.dense = nnx.Linear(WIDTH, 2, rngs=rngs)


Parts = tuple[Any, dict[str, Any], dict[str, Any]]  # parameters, axes, and where attention's kernels are


def linen() -> Parts:
    key, x = jax.random.key(0), random(1, 5, 4)
    return random_weights(Linen().init, key, x)["params"], unit_axes(Linen(), key, x), {}


def live() -> Parts:
    model = nnx.eval_shape(lambda: NNX(nnx.Rngs(0)))
    return random_weights(lambda: nnx.state(model, nnx.Param)), unit_axes(model), {}


def equinox() -> Parts:
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        conv: Any
        attention: Any
        dense: Any

    key = jax.random.key(0)
    model = Model(
        eqx.nn.Conv1d(4, WIDTH, 3, key=key),
        eqx.nn.MultiheadAttention(HEADS, WIDTH, qk_size=DIM, vo_size=DIM, key=key),
        eqx.nn.Linear(WIDTH, 2, key=key),
    )
    axes = {"conv/weight": (1, 2), "*_proj/weight": 1, "dense/weight": 1}
    layout = {"query": "query_proj", "key": "key_proj", "axis": 0, "head_dim": DIM}
    return eqx.filter(model, eqx.is_array), axes, layout


MODELS = [
    pytest.param(linen, id="linen"),
    pytest.param(live, id="nnx"),
    pytest.param(equinox, id="equinox", marks=pytest.mark.peer),
]


def rows() -> list[str]:
    """The constraints of the page's first table."""
    table = PAGE.split("\n## ")[0]
    return re.findall(r"^\| `(\w+)\(", table, re.MULTILINE)


def made(name: str, axes: Any, layout: Any) -> tuple[Any, dict[str, Any]]:
    """The constraint of a row, tight enough to have something to do, and what `update` needs besides."""
    kernel = "weight" if layout else "kernel"
    conv = ((1, 2), 0) if layout else ((0, 1), 2)
    sides = {f"conv/{kernel}": conv, "bias": clipjax.SKIP}
    if not layout:
        sides |= {"attention/out/kernel": ((0, 1), 2), "attention/*/kernel": (0, (1, 2))}
    makers: dict[str, Callable[[], Any]] = {
        "max_norm": lambda: clipjax.max_norm(0.1, axes=axes),
        "min_max_norm": lambda: clipjax.min_max_norm(0.05, 0.1, rate=1.0, axes=axes),
        "unit_norm": lambda: clipjax.unit_norm(axes=axes),
        "non_negative": lambda: clipjax.non_negative(where=f"dense/{kernel}"),
        "box": lambda: clipjax.box(-0.01, 0.01, where=[f"dense/{kernel}", f"conv/{kernel}"]),
        "spectral_cap": lambda: clipjax.spectral_cap(0.1, method="svd", flatten=sides),
        "qk_clip": lambda: clipjax.qk_clip(1.0, **layout),
        "tangent_cone": lambda: clipjax.tangent_cone(0.1, axes=axes),
        "tangent_space": lambda: clipjax.tangent_space(axes=axes),
        "hyperball": lambda: clipjax.hyperball(0.25, axes=axes),
        "project": lambda: clipjax.project(optax.projections.projection_non_negative),
    }
    extra = {"max_logits": np.array([4.0, 0.5], np.float32)} if name == "qk_clip" else {}
    return makers[name](), extra


class Outcome(NamedTuple):
    """What a constraint makes of the weights."""

    called: Any  # None where it cannot be called
    landed: Any  # as the link of a chain, after the update
    metrics: dict[str, Any]


@functools.cache
def outcomes(model: Callable[[], Parts]) -> tuple[Any, dict[str, Any], dict[str, Outcome]]:
    """The weights of a model, every constraint of the page, and what it makes of them."""
    params, axes, layout = model()
    params = jax.tree.map(lambda x: np.asarray(x) / 4, params)  # norms around 1: less is lost in the update
    constraints = {name: made(name, axes, layout) for name in rows()}

    def one(name: str, params: Any) -> Outcome:
        constraint, extra = constraints[name]
        first = name in TANGENTS
        tx = clipjax.chain(constraint, optax.sgd(0.0)) if first else clipjax.chain(optax.sgd(0.0), constraint)
        if name == "hyperball":
            tx = constraint
        # For the tangents and the sphere, gradients whose descent leads outward.
        updates, state = tx.update(jax.tree.map(jnp.negative, params), tx.init(params), params, **extra)
        called = constraint(params, **extra) if callable(constraint) else None
        return Outcome(called, optax.apply_updates(params, updates), clipjax.metrics(state))

    # Of leaves alone, so that models of the same leaves are the same program. Short runs need no fast code.
    leaves, treedef = jax.tree.flatten(params)
    shape: list[Any] = []

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def every(leaves: list[Any]) -> list[Any]:
        found = {name: one(name, treedef.unflatten(leaves)) for name in constraints}
        flat, structure = jax.tree.flatten(found)
        shape.append(structure)
        return flat

    flat = every(leaves)
    found = shape[0].unflatten(flat)
    return params, {name: constraint for name, (constraint, _) in constraints.items()}, found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", rows())
def test_every_row_of_the_page_on_every_kind_of_model(name: str, model: Any) -> None:
    params, constraints, found = outcomes(model)
    constraint, outcome = constraints[name], found[name]
    assert jax.tree.structure(outcome.landed) == jax.tree.structure(params)
    if name in TANGENTS:
        assert float(outcome.metrics[f"{name}/clipped_fraction"]) == 1
        assert same_bits(outcome.landed, params)
        return
    if name == "hyperball":
        np.testing.assert_allclose(outcome.metrics["hyperball/scale"], 1 / 1.25, rtol=1e-6)
        for p, after in zip(*map(jax.tree.leaves, (params, outcome.landed)), strict=True):
            turned = np.asarray(after) / np.where(p == 0, 1, p)  # nothing, but for plain steps of biases
            assert np.allclose(turned[p != 0], 1, rtol=1e-5) or np.allclose(turned[p != 0], 1.25, rtol=1e-5)
        return
    assert not same_bits(outcome.called, params)
    for a, b, c in zip(*map(jax.tree.leaves, (outcome.called, outcome.landed, params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert (a.shape, a.dtype) == (c.shape, c.dtype)
    if name != "qk_clip":
        assert clipjax.verify(params, constraint)
        assert clipjax.verify(outcome.called, constraint) == []
        assert clipjax.verify(outcome.landed, constraint) == []


def test_all_constraints_are_on_the_page() -> None:
    projections = {
        name
        for name in clipjax.__all__
        if str(getattr(getattr(clipjax, name), "__annotations__", {}).get("return", "")).endswith(
            "Projection"
        )
    }
    assert projections | TANGENTS | {"hyperball"} == set(rows())


def layer_rows() -> dict[str, str]:
    """What the second table says of each layer."""
    table = PAGE.split("## Axes")[1]
    found = re.findall(r"^\| ([^|]+) \| ([^|]*) \| ([^|]+) \| [^|]*\|$", table, re.MULTILINE)
    return {layer: reduced for layer, _, reduced in found if layer not in ("layer", "---")}


def test_the_table_of_layers() -> None:
    """Each row against the layer itself; the tests of the layers prove that these are the units."""
    key, x = jax.random.key(0), jax.ShapeDtypeStruct((1, 5, 4), np.float32)
    said = {
        "0": {(0,)},
        "all but the last": {(0, 1)},
        "all but the last but one": {(0, 2)},
        "the last but one": {(1,)},
        "0 and 1": {(0, 1)},
        "1: a row is a unit": {(1,)},
    }
    layers = {
        "Dense, Linear": (nn.Dense(3), "kernel"),
        "Conv, grouped or not": (nn.Conv(4, 2, feature_group_count=2), "kernel"),
        "ConvTranspose": (nn.ConvTranspose(3, 2), "kernel"),
        "ConvTranspose with `transpose_kernel`": (nn.ConvTranspose(3, 2, transpose_kernel=True), "kernel"),
        "ConvLocal": (nn.ConvLocal(3, 2), "kernel"),
        "query, key and value of attention": (nn.MultiHeadDotProductAttention(2), "query/kernel"),
        "out of attention": (nn.MultiHeadDotProductAttention(2), "out/kernel"),
    }
    table = layer_rows()
    for layer, (module, path) in layers.items():
        assert unit_axes(module, key, x)[path] in said[table[layer]], layer
    assert (
        unit_axes(nn.Embed(3, 4), key, jax.ShapeDtypeStruct((2,), np.int32))["embedding"]
        in said[table["Embed"]]
    )
    assert (
        unit_axes(nnx.eval_shape(lambda: nnx.LoRA(4, 2, 3, rngs=nnx.Rngs(0))))["lora_b"]
        in said[table["LoRA"]]
    )
    assert table["LSTM, GRU, MGU and simple cells"] == "0"
