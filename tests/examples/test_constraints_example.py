"""The example examples/constraints.py, and the page docs/constraints.md: its rows on three kinds of model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.support import ROOT
from tests.support.oracles import exact_norm
from tests.support.trees import same_bits

for module in ("flax", "sklearn", "matplotlib", "rich"):
    pytest.importorskip(module)


import constraints  # noqa: E402
import flax.linen as nn  # noqa: E402
from flax import nnx  # noqa: E402

from clipjax.flax import unit_axes  # noqa: E402

PAGE = (ROOT / "docs" / "constraints.md").read_text()


# --------------------------------------------------------------------------------------------------
# The example.


@pytest.fixture
def run(tmp_path: Path, capsys: Any) -> Callable[..., tuple[int, str, str, Path]]:
    """Run the script in this process; returns its status, output, errors and figure."""

    def run(*arguments: Any) -> tuple[int, str, str, Path]:
        figure = tmp_path / "figure.png"
        status = constraints.main(["--plot", str(figure), *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err, figure

    return run


def test_the_example(run: Any) -> None:
    status, out, _, figure = run("--quick", "--radius", 0.5)
    assert status == 0
    assert re.search(r"units beyond the radius: \d{2,3} without the bound, 0 with it", out)
    assert figure.read_bytes().startswith(b"\x89PNG")
    for layer in constraints.ORDER:
        row = next(line for line in out.splitlines() if f" {layer} " in line)
        assert 0 < float(re.findall(r"\d\.\d{9}", row)[0]) <= 0.5


def test_the_norms_of_the_example_are_those_of_its_layers() -> None:
    params = constraints.Network().init(jax.random.key(0), jnp.ones((1, 8, 8, 1)))["params"]
    axes = unit_axes(constraints.Network(), jax.random.key(0), jnp.ones((1, 8, 8, 1)))
    norms = constraints.norms_of(params, axes)
    by_hand = {
        "convolution": (0, 1, 2),
        "grouped": (0, 1, 2),
        "attention/out": (0, 1),
        "local": 2,
        "dense": 0,
    }
    by_hand |= {f"attention/{side}": 0 for side in ("query", "key", "value")}
    assert set(norms) == {f"{name}/kernel" for name in by_hand}
    for name, axis in by_hand.items():
        leaf = params
        for part in name.split("/"):
            leaf = leaf[part]
        np.testing.assert_allclose(
            norms[f"{name}/kernel"], exact_norm(leaf["kernel"], axis).ravel(), rtol=1e-12
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--radius", "0"], "--radius: must be a number above 0"),
        (["--epochs", "x"], "--epochs: must be a whole number"),
        (["--plot", "figure.gif"], "must end in .png"),
        (["--radios", "1"], "unrecognized arguments"),
    ],
)
def test_errors_of_the_user(arguments: list[str], message: str, capsys: Any) -> None:
    assert constraints.main(arguments) == 2
    assert message in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# The page. Three models of one convolution and one dense layer, and attention's query and key.

WIDTH, HEADS, DIM = 6, 2, 3


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


def linen() -> tuple[Any, dict[str, Any], dict[str, Any]]:
    x = jnp.ones((1, 5, 4))
    axes = unit_axes(Linen(), jax.random.key(0), x)
    return Linen().init(jax.random.key(0), x)["params"], axes, {}


def live() -> tuple[Any, dict[str, Any], dict[str, Any]]:
    model = NNX(nnx.Rngs(0))
    return nnx.state(model, nnx.Param), unit_axes(model), {}


def equinox() -> tuple[Any, dict[str, Any], dict[str, Any]]:
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

KERNELS = ["kernel", "weight"]


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
        "tangent": lambda: clipjax.tangent(0.1, axes=axes),
        "project": lambda: clipjax.project(optax.projections.projection_non_negative),
    }
    extra = {"max_logits": jnp.array([4.0, 0.5])} if name == "qk_clip" else {}
    return makers[name](), extra


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", rows())
def test_every_row_of_the_page_on_every_kind_of_model(name: str, model: Any) -> None:
    params, axes, layout = model()
    constraint, extra = made(name, axes, layout)
    before = clipjax.chain(constraint, optax.sgd(0.0)) if name == "tangent" else None
    tx = before or clipjax.chain(optax.sgd(0.0), constraint)
    # For the tangent, gradients whose descent leads outward.
    grads = jax.tree.map(jnp.negative, params)
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params, **extra)
    landed = optax.apply_updates(params, updates)
    assert jax.tree.structure(landed) == jax.tree.structure(params)
    seen = clipjax.metrics(state)
    if name == "tangent":
        assert float(seen["tangent/clipped_fraction"]) == 1
        assert same_bits(landed, params)
        return
    called = constraint(params, **extra)
    assert not same_bits(called, params)
    for a, b, c in zip(*map(jax.tree.leaves, (called, landed, params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert (a.shape, a.dtype) == (c.shape, c.dtype)
    if name != "qk_clip":
        assert clipjax.verify(params, constraint)
        assert clipjax.verify(called, constraint) == []
        assert clipjax.verify(landed, constraint) == []


def test_all_constraints_are_on_the_page() -> None:
    projections = {
        name
        for name in clipjax.__all__
        if str(getattr(getattr(clipjax, name), "__annotations__", {}).get("return", "")).endswith(
            "Projection"
        )
    }
    assert projections | {"tangent"} == set(rows())


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), ids=lambda b: b[:20])
def test_the_code_on_the_page_runs(block: str) -> None:
    exec(compile(block, "docs/constraints.md", "exec"), {})


def layer_rows() -> dict[str, str]:
    """What the second table says of each layer."""
    table = PAGE.split("## Axes")[1]
    found = re.findall(r"^\| ([^|]+) \| ([^|]*) \| ([^|]+) \| [^|]*\|$", table, re.MULTILINE)
    return {layer: reduced for layer, _, reduced in found if layer not in ("layer", "---")}


def test_the_table_of_layers() -> None:
    """Each row against the layer itself; tests/test_flax_axes.py has the proof that these are the units."""
    key, x = jax.random.key(0), jnp.ones((1, 5, 4))
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
    assert unit_axes(nn.Embed(3, 4), key, jnp.zeros(2, int))["embedding"] in said[table["Embed"]]
    assert unit_axes(nnx.LoRA(4, 2, 3, rngs=nnx.Rngs(0)))["lora_b"] in said[table["LoRA"]]
    assert table["LSTM, GRU, MGU and simple cells"] == "0"
