"""How often devices wait for each other: what is compiled has one all-reduce, of a scalar or two."""

from __future__ import annotations

import re

import jax
import pytest
from jax.sharding import PartitionSpec as P

from tests.support.eight_devices import OF_LEAVES, SPECS, mesh, tree

KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


@pytest.mark.parametrize("name", ["global", "value"])
def test_one_all_reduce(name: str) -> None:
    tx = OF_LEAVES[name](None, None)

    def local(grads):
        updates, state = tx.update(grads, tx.init(grads))
        return updates, state[0]

    mapped = jax.jit(jax.shard_map(local, mesh=mesh(), in_specs=(SPECS,), out_specs=(SPECS, P())))
    text = mapped.lower(tree()).compile().as_text()
    found = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in KINDS}
    assert found == {kind: int(kind == "all-reduce") for kind in KINDS}
