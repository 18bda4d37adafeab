"""Axes by path in every kind of tree: the same model gives the same result; what a pattern misses is said."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
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

from tests.support.containers import AXES, CONTAINERS, arrays, expected

every_container = pytest.mark.parametrize("container", list(CONTAINERS.values()), ids=list(CONTAINERS))


@functools.cache
def of_every_container() -> dict[str, Any]:
    """From one compiled program: the leaves projected by a call and by a link, and the link's metric."""
    projection = clipjax.max_norm(1.0, axes=AXES)

    @jax.jit
    def run(leaves: Any) -> Any:
        found = {}
        for name, container in CONTAINERS.items():
            tree = container(*leaves)
            projected = projection(tree)
            assert jax.tree.structure(projected) == jax.tree.structure(tree)
            updates, state = projection.update(
                jax.tree.map(jnp.zeros_like, tree), projection.init(tree), tree
            )
            linked = optax.apply_updates(tree, updates)
            found[name] = jax.tree.leaves(projected), jax.tree.leaves(linked), state.violation
        return found

    return run(arrays())


@every_container
def test_the_same_model_in_every_container(container: Callable[..., Any]) -> None:
    tree = container(*arrays())
    (name,) = (name for name, each in CONTAINERS.items() if each is container)
    projected, linked, violation = of_every_container()[name]
    assert same_bits(projected, of_every_container()["dict"][0])
    for found in (projected, linked):
        for leaf, wanted in zip(found, expected(1.0), strict=True):
            np.testing.assert_allclose(leaf, wanted, rtol=1e-6)
    assert float(violation) > 0
    # Outside of jit, too.
    outside = clipjax.max_norm(1.0, axes=AXES)(tree)
    assert jax.tree.structure(outside) == jax.tree.structure(tree)
    for leaf, wanted in zip(jax.tree.leaves(outside), expected(1.0), strict=True):
        np.testing.assert_allclose(leaf, wanted, rtol=1e-6)


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

    clipjax.functional.unitwise_norms(tree, rule)
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


def test_many_patterns_on_many_leaves_are_matched_in_order() -> None:
    """The mapping that `unit_axes` returns has an entry for each leaf."""
    tree = {f"layer_{i}": {"kernel": np.full((3, 4), 4, np.float32)} for i in range(40)}
    axes = {f"layer_{i}/kernel": i % 2 for i in range(40)}
    norms = functional.unitwise_norms(tree, axes)
    for i in range(40):
        assert norms[f"layer_{i}"]["kernel"].shape == ((4,), (3,))[i % 2]
        np.testing.assert_allclose(norms[f"layer_{i}"]["kernel"], 4 * np.sqrt((3, 4)[i % 2]), rtol=1e-6)
    with pytest.raises(ValueError, match=re.escape("'layer_40/kernel'")):
        clipjax.max_norm(1.0, axes=axes | {"layer_40/kernel": 0})(tree)


def test_nnx_optimizer() -> None:
    """Its `init` sees variables, its `update` bare arrays: one set of patterns serves both."""
    model = CONTAINERS["nnx.Module"](*arrays())
    tx = clipjax.chain(optax.sgd(0.0), clipjax.max_norm(1.0, axes=AXES))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    step = nnx.jit(lambda optimizer, model, grads: optimizer.update(model, grads))
    step(optimizer, model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
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
