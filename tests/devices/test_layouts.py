"""Gradients and weights split over an axis for data and one for the model: the numbers of one device.

Under jit, with axes that the compiler splits arrays by (automatic) and with axes in the types of arrays
(explicit); in a shard_map over one of the axes, and in one over the second within one over the first.
"""

from __future__ import annotations

import jax
import pytest

import clipjax
from tests.support.eight_devices import (
    IN_JIT,
    KINDS,
    LAYOUTS,
    MEMBERS,
    NESTED,
    SPECTRAL,
    check,
    members,
    placed,
    steps_of,
    tree,
    two_axes,
)
from tests.support.walk import names


@pytest.mark.parametrize(("way", "name"), members(MEMBERS | SPECTRAL, *IN_JIT))
def test_same_as_on_one_device(way: str, name: str) -> None:
    check(way, name)


@pytest.mark.parametrize(("way", "name"), members(MEMBERS, *NESTED))
def test_same_in_meshes_within_meshes(way: str, name: str) -> None:
    check(way, name)


@pytest.mark.parametrize(("way", "name"), members(MEMBERS | SPECTRAL, *IN_JIT))
def test_every_leaf_keeps_its_sharding(way: str, name: str) -> None:
    layout, kind = way.split(", ")
    updates, _ = steps_of(way, name)[0]
    for key, leaf in placed(tree(), LAYOUTS[layout][0], two_axes(KINDS[kind])).items():
        found = updates[key].sharding
        assert found.is_equivalent_to(leaf.sharding, leaf.ndim), f"{key}: {found}"


def test_every_transformation_is_among_the_members() -> None:
    """So that a new one is tested on devices, too."""
    txs = [build(None, None) for build in (MEMBERS | SPECTRAL).values()]
    seen = jax.eval_shape(lambda params: [clipjax.metrics(tx.init(params)) for tx in txs], tree())
    found = {key.split("/")[0] for metrics in seen for key in metrics}
    assert found == set(names()) - {"bounded"}  # which has no metrics of its own
