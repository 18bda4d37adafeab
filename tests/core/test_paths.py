"""Axes by path in every kind of tree: the same model gives the same result; what a pattern misses is said."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.support.oracles import exact_norm
from tests.support.trees import same_bits

pytest.importorskip("flax")
import flax.linen as nn
import flax.struct
from flax import nnx
from flax.core import FrozenDict

AXES = {"encoder/kernel": 0, "head/kernel": 1, "bias": clipjax.SKIP}


def arrays(scale: float = 2.0) -> list[jax.Array]:
    """The encoder's bias and kernel, and the head's."""
    rng = np.random.default_rng(0)
    shapes = ((4,), (3, 4), (5,), (4, 5))
    return [jnp.asarray(scale * rng.standard_normal(shape), np.float32) for shape in shapes]


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
every_container = pytest.mark.parametrize(
    "container",
    [
        pytest.param(f, id=k, marks=[pytest.mark.peer] if k == "equinox" else [])
        for k, f in CONTAINERS.items()
    ],
)


def expected(radius: float) -> list[np.ndarray]:
    bias, kernel, head_bias, head_kernel = (np.asarray(x, np.float64) for x in arrays())

    def onto_ball(x: np.ndarray, axis: int) -> np.ndarray:
        return x * np.minimum(1, radius / exact_norm(x, axis).astype(np.float64)[:, None].swapaxes(axis, 1))

    return [bias, onto_ball(kernel, 0), head_bias, onto_ball(head_kernel, 1)]


@every_container
def test_the_same_model_in_every_container(container: Callable[..., Any]) -> None:
    tree = container(*arrays())
    projection = clipjax.max_norm(1.0, axes=AXES)
    projected = projection(tree)
    assert jax.tree.structure(projected) == jax.tree.structure(tree)
    for found, wanted in zip(jax.tree.leaves(projected), expected(1.0), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert same_bits(jax.tree.leaves(projected), jax.tree.leaves(projection(of_dicts(*arrays()))))

    updates, state = projection.update(jax.tree.map(jnp.zeros_like, tree), projection.init(tree), tree)
    linked = optax.apply_updates(tree, updates)
    for found, wanted in zip(jax.tree.leaves(linked), expected(1.0), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert float(state.violation) > 0


@every_container
def test_where_and_verify_see_the_same_paths(container: Callable[..., Any]) -> None:
    tree = container(*arrays())
    non_negative = clipjax.non_negative(where="head/kernel")
    leaves = arrays()
    projected = jax.tree.leaves(non_negative(tree))
    assert same_bits(projected, [*leaves[:3], jnp.maximum(leaves[3], 0)])
    prefix = "params/" if isinstance(tree, dict) and "params" in tree else ""
    assert {v.path for v in clipjax.verify(tree, non_negative)} == {f"{prefix}head/kernel"}
    wrong = clipjax.verify(tree, clipjax.max_norm(1e-3, axes=AXES))
    assert {v.path for v in wrong} == {f"{prefix}encoder/kernel", f"{prefix}head/kernel"}


@every_container
def test_a_pattern_that_matches_nothing_lists_the_paths(container: Callable[..., Any]) -> None:
    tree = container(*arrays())
    with pytest.raises(ValueError, match="matches no leaf") as caught:
        clipjax.max_norm(1.0, axes={"decoder/kernel": 0})(tree)
    listed = [line.strip().removeprefix("params/") for line in str(caught.value).splitlines()[1:]]
    assert sorted(listed) == ["encoder/bias", "encoder/kernel", "head/bias", "head/kernel"]


@every_container
def test_a_rule_sees_the_same_path(container: Callable[..., Any]) -> None:
    tree = container(*arrays())
    seen = []

    def rule(path: Any, leaf: Any) -> Any:
        seen.append(jax.tree_util.keystr(path, simple=True, separator="/").removeprefix("params/"))
        return clipjax.SKIP

    clipjax.functional.unit_norms(tree, rule)
    assert seen == ["encoder/bias", "encoder/kernel", "head/bias", "head/kernel"]


def test_sequences_are_counted() -> None:
    a, b, c, d = arrays()
    projected = clipjax.max_norm(1.0, axes={"0/1": 0, "1/1": 1})([(a, b), (c, d)])
    for found, wanted in zip(jax.tree.leaves(projected), expected(1.0), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_lone_variable_is_a_leaf() -> None:
    kernel = arrays()[1]
    projected = clipjax.max_norm(1.0, axes={"*": 0})(nnx.Param(kernel))
    assert isinstance(projected, nnx.Param)
    assert same_bits(projected[...], clipjax.max_norm(1.0, axes=0)(kernel))


def test_a_field_that_is_named_value_stays_in_the_path() -> None:
    """Only Flax' boxes have a `value` that is none of the model's own."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Attention:
        query: Any
        value: Any

    model = {"attention": Attention(4 * jnp.ones((2, 3)), 4 * jnp.ones((2, 3)))}
    projected = clipjax.max_norm(1.0, axes={"attention/value": 0})(model)
    assert same_bits(projected["attention"].query, model["attention"].query)
    assert not same_bits(projected["attention"].value, model["attention"].value)
    with pytest.raises(ValueError, match="matches no leaf"):
        clipjax.max_norm(1.0, axes={"attention": 0})(model)

    class Module(nnx.Module):
        def __init__(self) -> None:
            self.value = nnx.Param(4 * jnp.ones((2, 3)))

    for tree in (Module(), nnx.state(Module())):
        projected = clipjax.max_norm(1.0, axes={"value": 0})(tree)
        np.testing.assert_allclose(jax.tree.leaves(projected)[0], np.sqrt(0.5), rtol=1e-6)


# --------------------------------------------------------------------------------------------------
# What is masked out.


def masked_trees() -> dict[str, tuple[Any, Any]]:
    """Trees of which a mask keeps the head only, and the mask."""
    state = CONTAINERS["nnx.State"](*arrays())
    by_leaf = of_dicts(False, False, True, True)
    return {
        "leaves": (of_dicts(*arrays()), by_leaf),
        "a-subtree": (of_dicts(*arrays()), {"encoder": False, "head": True}),
        "tuples": (CONTAINERS["NamedTuple"](*arrays()), of(ModelTuple, LayerTuple)(False, False, True, True)),
        "nnx.State": (state, jax.tree.unflatten(jax.tree.structure(state), [False, False, True, True])),
    }


@pytest.mark.parametrize("kind", list(masked_trees()))
@pytest.mark.parametrize("wrapper", ["masked", "partition"])
def test_a_pattern_may_match_what_is_masked_out(kind: str, wrapper: str) -> None:
    params, mask = masked_trees()[kind]
    projection = clipjax.max_norm(1.0, axes=AXES)
    if wrapper == "masked":
        tx = optax.masked(projection, mask)
    else:
        labels = jax.tree.map(lambda keep: "trained" if keep else "frozen", mask)
        tx = optax.partition({"trained": projection, "frozen": optax.set_to_zero()}, labels)
    still = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(tx.update)(still, tx.init(params), params)
    leaves = jax.tree.leaves(optax.apply_updates(params, updates))
    assert same_bits(leaves[:2], arrays()[:2])
    np.testing.assert_allclose(leaves[3], expected(1.0)[3], rtol=1e-6)


@pytest.mark.parametrize("kind", list(masked_trees()))
def test_a_pattern_that_matches_neither_is_an_error_still(kind: str) -> None:
    params, mask = masked_trees()[kind]
    tx = optax.masked(clipjax.max_norm(1.0, axes={"decoder/kernel": 0}), mask)
    with pytest.raises(ValueError, match="decoder/kernel' matches no leaf"):
        tx.update(params, tx.init(params), params)


def test_a_whole_tree_that_is_masked_out() -> None:
    params = of_dicts(*arrays())
    tx = optax.masked(clipjax.max_norm(1.0, axes=AXES), False)
    assert same_bits(tx.update(params, tx.init(params), params)[0], params)


def test_none_counts_as_left_out() -> None:
    """As what `equinox.partition` leaves of a model."""
    bias, kernel, _, _ = arrays()
    tree = {"encoder": {"bias": bias, "kernel": kernel}, "head": {"bias": None, "kernel": None}}
    projected = clipjax.max_norm(1.0, axes=AXES)(tree)
    np.testing.assert_allclose(projected["encoder"]["kernel"], expected(1.0)[1], rtol=1e-6)
    with pytest.raises(ValueError, match="matches no leaf"):
        clipjax.max_norm(1.0, axes={"head/scale": 0})(tree)


def test_many_patterns_on_many_leaves_are_matched_in_order() -> None:
    """The mapping that `unit_axes` returns has an entry for each leaf."""
    tree = {f"layer_{i}": {"kernel": 4 * jnp.ones((2, 3))} for i in range(40)}
    axes = {f"layer_{i}/kernel": i % 2 for i in range(40)}
    projected = clipjax.max_norm(1.0, axes=axes)(tree)
    for i in range(40):
        norms = exact_norm(projected[f"layer_{i}"]["kernel"], i % 2)
        np.testing.assert_allclose(norms, 1, rtol=1e-6)
    with pytest.raises(ValueError, match=re.escape("'layer_40/kernel'")):
        clipjax.max_norm(1.0, axes=axes | {"layer_40/kernel": 0})(tree)


def test_nnx_optimizer() -> None:
    """Its `init` sees variables, its `update` bare arrays: one set of patterns serves both."""
    model = CONTAINERS["nnx.Module"](*arrays())
    tx = clipjax.chain(optax.sgd(0.0), clipjax.max_norm(1.0, axes=AXES))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    for found, wanted in zip(jax.tree.leaves(nnx.state(model)), expected(1.0), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_the_paths_cost_no_import_of_flax() -> None:
    import subprocess
    import sys

    code = (
        "import sys, jax.numpy as jnp, clipjax\n"
        "clipjax.max_norm(1.0, axes={'kernel': 0})({'kernel': jnp.ones((2, 3))})\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'flax'], 'Flax was imported'\n"
        "import clipjax.flax\n"
        "assert 'flax.nnx' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
