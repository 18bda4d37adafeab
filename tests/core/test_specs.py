"""Forms of `specs`; over several devices, they are tested in tests/devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import clipjax

MESH = jax.make_mesh((1,), ("data",), (AxisType.Auto,))
SPLIT = PartitionSpec("data")


@pytest.mark.parametrize(
    "specs",
    [SPLIT, NamedSharding(MESH, SPLIT), {"w": SPLIT}, {"w": NamedSharding(MESH, SPLIT)}],
    ids=["one", "one sharding", "a tree", "a tree of shardings"],
)
def test_a_spec_may_be_a_sharding_and_stand_for_all_leaves(specs: Any) -> None:
    def project(params: Any) -> Any:
        return clipjax.max_norm(1.0, specs=specs)(params)

    params = {"w": jnp.full((4, 3), 2.0)}
    projected = jax.shard_map(project, mesh=MESH, in_specs=SPLIT, out_specs=SPLIT)(params)
    np.testing.assert_array_equal(projected["w"], clipjax.max_norm(1.0)(params)["w"])
