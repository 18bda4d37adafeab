"""Under `jit` with any shardings eight devices return what one does."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipjax
from tests.devices.members import assert_same, init, members, step

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

# Leaves that every device holds, and leaves sharded over either axis of the mesh, and
# over both.
SPECS = {
    "both": P("model", "data"),
    "data": P("data", None),
    "held": P(),
    "model": P(None, "model"),
    "bias": P("data"),
}
SHAPES = {
    "both": (8, 16),
    "data": (16, 8),
    "held": (4, 3),
    "model": (8, 6),
    "bias": (16,),
}
MEMBERS = members(0)


def weights(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in SHAPES.items()
    }


TREES = weights(0), weights(1), jax.tree.map(lambda x: 3 * x, weights(2))


@jax.jit
def one_step(states: Any, params: Any, grads: Any) -> Any:
    """An update by every member, the projections as functions, and all metrics."""
    states, updates = step(MEMBERS, states, grads, params)
    called = {
        name: tx(params, step=1, **dict.fromkeys(tx.needs, grads))
        for name, tx in MEMBERS.items()
        if callable(tx)
    }
    return states, updates, called, {"all": clipjax.metrics(states)}


def two_steps(params: Any, first: Any, second: Any) -> Any:
    states = jax.jit(lambda params: init(MEMBERS, params))(params)
    states = one_step(states, params, first)[0]
    return one_step(states, params, second)


@pytest.fixture(scope="module")
def on_one_device() -> Any:
    return jax.device_get(two_steps(*TREES))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_every_member_returns_what_one_device_does(
    on_one_device: Any, kind: AxisType
) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    with jax.set_mesh(mesh):
        found = two_steps(*(jax.device_put(tree, shardings) for tree in TREES))
    for ours, expected in zip(found, on_one_device, strict=True):
        assert_same(ours, expected)
    if kind is AxisType.Explicit:  # there a result's sharding is part of its type
        for name, updates in found[1].items():
            for leaf, x in updates.items():
                assert x.sharding.is_equivalent_to(shardings[leaf], x.ndim), (
                    name,
                    leaf,
                )
        assert all(x.sharding.is_fully_replicated for x in found[3]["all"].values())


def test_states_are_made_outside_the_context_of_a_mesh() -> None:
    mesh = jax.make_mesh(
        (4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Explicit)
    )
    params = jax.device_put(
        TREES[0], {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    )
    table = MEMBERS | {"adagc of leaves": clipjax.adagc()}
    made = jax.jit(lambda params: init(table, params))(params)
    alone = jax.jit(clipjax.adagc().init)(params)
    assert_same(made, init(table, TREES[0]))
    assert_same({"adagc": alone}, {"adagc": clipjax.adagc().init(TREES[0])})
