"""In a checked shard_map, where the types say over what norms are spread: the numbers of one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import clipjax
from clipjax import functional
from tests.support.eight_devices import BY_TYPE, OF_LEAVES, SPECS, check, members, mesh, same, tree
from tests.support.oracles import exact_norm, exact_tree_norm


@pytest.mark.parametrize(("way", "name"), members(OF_LEAVES | BY_TYPE, "shard_map", "two mesh axes"))
def test_same_as_on_one_device(way: str, name: str) -> None:
    check(way, name)


def test_functions_on_trees_measure_what_is_on_all_devices() -> None:
    def measured(values: Any) -> Any:
        clipped, norm = functional.clip_by_global_norm(values, 1.0)
        seen = norm, functional.global_norm(values), functional.leaf_norms(values, ord=3)
        return (clipped, functional.clip_by_norm(values, 1.0)), seen

    mapped = jax.shard_map(measured, mesh=mesh(), in_specs=(SPECS,), out_specs=((SPECS, SPECS), P()))
    values = tree()
    (together, alone), (norm, again, norms) = jax.tree.map(np.asarray, jax.jit(mapped)(values))
    np.testing.assert_allclose([norm, again], exact_tree_norm(values).astype(float), rtol=1e-6)
    for key, value in norms.items():
        np.testing.assert_allclose(value, float(exact_norm(values[key], p=3)), rtol=1e-6)
    assert 1 - 1e-3 < exact_tree_norm(together) <= 1
    assert all(1 - 1e-3 < exact_norm(x) <= 1 for x in alone.values())


def test_a_gradient_through_a_clip_is_that_of_one_device() -> None:
    tx = clipjax.clip_by_global_norm(1.0)

    def sines(grads: Any) -> Any:
        return jax.tree.map(jnp.sin, tx.update(grads, tx.init(grads))[0])

    def gradient(function: Any) -> Any:
        return jax.jit(jax.grad(lambda g: sum(jnp.sum(x.astype(jnp.float32)) for x in function(g).values())))

    sharded = jax.shard_map(sines, mesh=mesh(), in_specs=(SPECS,), out_specs=SPECS)
    same(gradient(sharded)(tree()), gradient(sines)(tree()))
