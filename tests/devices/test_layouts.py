"""Gradients and weights split over an axis for data and one for the model: the numbers of one device.

Under jit, with axes that the compiler splits arrays by (automatic) and with axes in the types of arrays
(explicit); in a shard_map over one of the axes, and in one over the second within one over the first.
"""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec as P

import clipjax
from clipjax._core.devices import on_single_device
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


@pytest.mark.parametrize(("names", "alone"), [({"x", "y"}, True), ({"x"}, False), (None, False)])
def test_who_works_alone(names: set[str] | None, alone: bool) -> None:
    """A device in a shard_map over all axes; over one of two the compiler splits arrays by the other."""

    def which() -> jax.Array:
        return on_single_device()

    mesh = two_axes(jax.sharding.AxisType.Auto)
    mapped = jax.shard_map(which, mesh=mesh, in_specs=(), out_specs=P(), axis_names=names) if names else which
    x = jax.device_put(tree()["kernel"], jax.NamedSharding(mesh, P("x")))
    assert bool(jax.jit(lambda x: (mapped(), x * 2))(x)[0]) == alone


def test_every_transformation_is_among_the_members() -> None:
    """So that a new one is tested on devices, too."""
    txs = [build(None, None) for build in (MEMBERS | SPECTRAL).values()]
    seen = jax.eval_shape(lambda params: [clipjax.metrics(tx.init(params)) for tx in txs], tree())
    found = {key.split("/")[0] for metrics in seen for key in metrics}
    assert found == set(names()) - {"bounded"}  # which has no metrics of its own
