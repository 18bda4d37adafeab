"""Under `jit` with any shardings eight devices return what one does."""

import functools
import operator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipjax
from tests.devices.members import assert_same, drawn, init, members, step

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

# Leaves that every device holds, and leaves sharded over either axis of the mesh, and
# over both.
SPECS = {
    "both": P("model", "data"),
    "held": P(),
    "model": P(None, "model"),
    "bias": P("data"),
}
SHAPES = {
    "both": (8, 16),
    "held": (4, 3),
    "model": (8, 6),
    "bias": (16,),
}
MEMBERS = members(0)

weights = functools.partial(drawn, SHAPES)
TREES = weights(0), weights(1), jax.tree.map(lambda x: 3 * x, weights(2))


# XLA divides the numbers' work: one member of each kind.
KINDS = ("clip_by_norm", "adaptive_grad_clip", "adagc", "keep_norm", "bounded")
TABLE = {name: MEMBERS[name] for name in KINDS}


@jax.jit
def one_step(states: Any, params: Any, grads: Any) -> Any:
    states, updates = step(TABLE, states, grads, params)
    return states, updates, {"all": clipjax.metrics(states)}


def two_steps(params: Any, first: Any, second: Any) -> Any:
    states = jax.jit(lambda params: init(TABLE, params))(params)
    states = one_step(states, params, first)[0]
    return one_step(states, params, second)


@pytest.fixture(scope="module")
def on_one_device() -> Any:
    return jax.device_get(two_steps(*TREES))


def on_mesh(kind: AxisType) -> tuple[Any, Any]:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    return mesh, [jax.device_put(tree, shardings) for tree in TREES]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_members_return_what_one_device_does(
    on_one_device: Any, kind: AxisType
) -> None:
    mesh, trees = on_mesh(kind)
    with jax.set_mesh(mesh):
        found = two_steps(*trees)
    for ours, expected in zip(found, on_one_device, strict=True):
        assert_same(ours, expected)


def test_shardings_that_are_types_stay_those_of_the_leaves() -> None:
    """Of updates, of projected weights, and of states from step to step."""
    mesh, (params, grads, _) = on_mesh(AxisType.Explicit)

    def types(params: Any, grads: Any) -> None:
        first = init(MEMBERS, params)
        states, updates = step(MEMBERS, first, grads, params)
        projected = {
            name: tx.apply(params, *[grads] * (name == "keep_norm"), step=1)
            for name, tx in MEMBERS.items()
            if hasattr(tx, "apply")
        }
        assert {"max_norm", "keep_norm", "box", "project"} <= projected.keys()
        wanted = jax.tree.map(jax.typeof, params)
        for name, each in [*updates.items(), *projected.items()]:
            assert jax.tree.map(jax.typeof, each) == wanted, name
        specs = (
            jax.tree.map(lambda x: jax.typeof(x).sharding.spec, each)
            for each in (first, states)
        )
        assert jax.tree.all(jax.tree.map(operator.eq, *specs))

    with jax.set_mesh(mesh):
        jax.eval_shape(types, params, grads)


def test_a_stack_may_be_split_by_layers() -> None:
    """Its norms share an array with those of leaves that are on all devices."""
    mesh, _ = on_mesh(AxisType.Explicit)
    tx = clipjax.record_norms("leaf", stacked="blocks")
    tree = {"blocks": np.ones((4, 9), np.float32), "head": np.ones(4, np.float32)}
    specs = {"blocks": P("data"), "head": P()}
    with jax.set_mesh(mesh):
        placed = jax.device_put(
            tree, {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        )
        _, state = jax.jit(tx.update)(placed, tx.init(placed))
    norms = list(state.metrics["record_norms"].values())
    np.testing.assert_array_equal(norms, [3, 3, 3, 3, 2])


def test_states_are_made_outside_the_context_of_a_mesh() -> None:
    _, (params, *_) = on_mesh(AxisType.Explicit)
    jax.eval_shape(lambda params: init(MEMBERS, params), params)
    of_leaves = clipjax.adagc().init
    assert_same({"all": jax.jit(of_leaves)(params)}, {"all": of_leaves(TREES[0])})
