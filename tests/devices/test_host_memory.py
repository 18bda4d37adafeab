"""States in host memory, which each step moves to the devices, and back after it."""

import functools
from typing import Any

import jax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipjax
from tests.devices.members import assert_same, drawn, init, members, step

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

SPECS = {"both": P("data", "model"), "bias": P()}
MEMBERS = members(0) | {"keep": clipjax.record_norms("leaf", keep=2)}
weights = functools.partial(drawn, {"both": (8, 16), "bias": (16,)})


def moved(tree: Any, kind: str) -> Any:
    def move(x: Any) -> Any:
        return jax.device_put(x, x.sharding.with_memory_kind(kind))

    return jax.tree.map(move, tree)


def test_states_of_parameters_in_host_memory_step_on_devices() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params, grads = (jax.device_put(weights(i), shardings) for i in (0, 1))
    expected = init(MEMBERS, weights(0))
    on_host = moved(params, "pinned_host")
    jitted_init = jax.jit(lambda params: init(MEMBERS, params))
    for states in (init(MEMBERS, on_host), jitted_init(on_host)):
        assert_same(states, expected)

    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.sharding, tree)

    def next_states(*args: Any) -> Any:
        return step(MEMBERS, *args)

    plain, shardings = jax.jit(next_states), placed(moved(states, "device"))
    jitted = jax.jit(next_states, out_shardings=(shardings, None))
    for seed in (1, 2):
        states, params = moved((states, params), "pinned_host")
        kinds = {x.memory_kind for x in jax.tree.leaves(placed((states, params)))}
        assert kinds == {"pinned_host"}
        grads = jax.device_put(weights(seed), placed(moved(params, "device")))
        on_devices = moved((states, params), "device")
        states, updates = jitted(on_devices[0], grads, on_devices[1])
        expected, wanted = plain(expected, weights(seed), weights(0))
        assert_same(updates, wanted)
        assert_same(states, expected)
