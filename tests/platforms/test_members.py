"""Every kind of member compiles for a TPU, alone and, where it has whole leaves or
trees, inside `shard_map`.
"""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import clipjax
from benchmarks.platforms import devices_of
from tests.devices.members import members
from tests.support.platforms import compiled_for_tpu, skip_where_missing

ALONE: dict[str, Any] = {**members(0), "spectral_cap": clipjax.spectral_cap(1.0)}

pytestmark = pytest.mark.tpu_compile


def shapes(dtype: str, sharding: Any) -> dict[str, Any]:
    sizes = {"both": (16, 8), "w": (8, 16), "b": (16,)}
    return {
        name: jax.ShapeDtypeStruct(size, dtype, sharding=sharding)
        for name, size in sizes.items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ALONE)
def test_a_member_compiles(name: str, dtype: str) -> None:
    skip_where_missing("v5e")
    tx, tree = ALONE[name], shapes(dtype, SingleDeviceSharding(devices_of("v5e")[0]))
    assert compiled_for_tpu(lambda g, p: tx.update(g, tx.init(p), p)[0], tree, tree)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_leaves_and_trees_compile_inside_shard_map(dtype: str) -> None:
    """All in one program; norms of leaves and trees are summed over the mesh."""
    skip_where_missing("v5e")
    mesh = Mesh(np.array(devices_of("v5e")[:4]), ("data",))
    specs = {
        "both": PartitionSpec("data"),
        "w": PartitionSpec("data"),
        "b": PartitionSpec(),
    }
    tree = {
        name: x.update(sharding=NamedSharding(mesh, specs[name]))
        for name, x in shapes(dtype, None).items()
    }
    table = members(None)

    def step(grads: Any, params: Any) -> Any:
        return {
            name: tx.update(grads, tx.init(params), params)[0]
            for name, tx in table.items()
        }

    program = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, specs), out_specs=dict.fromkeys(table, specs)
    )
    assert "all-reduce" in compiled_for_tpu(program, tree, tree)
