"""The forward pass is the identity, bit for bit and type for type, on any tree."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.backward import LAYERS, each_layer
from tests.support.trees import avals, same_bits

TREE: dict[str, Any] = {
    "f32": jnp.array([1.0, -0.0, jnp.nan, jnp.inf, 1e-45]),
    "bf16": jnp.array([[1.0, 3e38]], jnp.bfloat16),
    "f16": jnp.array([6e-8, 65504], jnp.float16),
    "complex": jnp.array([1 + 2j, jnp.nan]),
    "int": jnp.arange(3),
    "bool": jnp.array([True]),
    "none": None,
    "key": jax.random.key(0),
    "keys": jax.random.split(jax.random.key(1)),
    "empty": jnp.zeros((0, 3)),
    "nothing": (),
}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "remat"])
@each_layer
def test_bit_for_bit(layer, wrap):
    tree = TREE
    if layer is LAYERS["value"]:
        tree = {k: v for k, v in tree.items() if k != "complex"}
    got = wrap(layer)(tree)
    assert same_bits(got, tree)
    assert avals(got) == avals(tree)


@each_layer
def test_float0_and_weak_types(layer):
    nothing = np.zeros(3, jax.dtypes.float0)
    assert layer({"x": np.ones(2, np.float32), "nothing": nothing})["nothing"].dtype == jax.dtypes.float0
    weak = jnp.asarray(2.0)
    assert weak.weak_type
    assert layer(weak).weak_type
    assert jax.eval_shape(layer, 2.0).weak_type
    assert not layer(jnp.float32(2)).weak_type


@each_layer
def test_trees_without_floats(layer):
    trees = ({}, None, np.arange(3, dtype=np.int32), jax.random.key(0))
    assert same_bits(jax.jit(lambda trees: tuple(map(layer, trees)))(trees), trees)


@each_layer
def test_derivatives_of_a_mixed_tree(layer):
    tree = {k: v for k, v in TREE.items() if k not in ("complex", "f32")} | {"f32": np.ones(3, np.float32)}

    def loss(t):
        return 9 * sum(jnp.sum(x.astype(jnp.float32)) for k, x in layer(t).items() if "f" in k)

    gradient = jax.jit(jax.grad(loss, allow_int=True))(tree)
    assert gradient["int"].dtype == gradient["key"].dtype == jax.dtypes.float0
    assert all(gradient[k].dtype == tree[k].dtype for k in ("f32", "bf16", "f16", "empty"))
    assert all(np.isfinite(np.asarray(gradient[k], np.float64)).all() for k in ("f32", "bf16", "f16"))
