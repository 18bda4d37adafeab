"""The layers of a stack that devices share out, or that each device has parts of: groups as on one device."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import clipjax
from tests.support.eight_devices import mesh, same
from tests.support.trees import same_bits

LAYERS = 8
STACK = {"layers/*": 0}


def gradients() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    sizes = np.logspace(-2, 2, LAYERS).astype(np.float32)

    def leaf(*shape: int) -> np.ndarray:
        return sizes.reshape(-1, *[1] * (len(shape) - 1)) * rng.standard_normal(shape).astype(np.float32)

    return {"layers": {"kernel": leaf(LAYERS, 8, 4), "bias": leaf(LAYERS, 4)}, "head": leaf(8)}


# Each device has a layer; or rows of the kernels of all layers.
SPLIT = {
    "layers": ({"kernel": P("d"), "bias": P("d")}, P("d")),
    "rows": ({"kernel": P(None, "d"), "bias": P()}, P()),
}


@pytest.mark.parametrize("split", SPLIT)
def test_the_layers_of_a_stack_are_groups_as_on_one_device(split: str) -> None:
    of_layers, of_state = SPLIT[split]
    specs = {"layers": of_layers, "head": P()}
    bounds = {"layers/*": 1.0, "head": 0.5}
    grads = gradients()
    alone = clipjax.clip_by_group_norm(bounds, stack=STACK)
    tx = clipjax.clip_by_group_norm(bounds, stack=STACK, specs=specs)
    state = tx.init(grads)

    def spec(path: Any, leaf: Any) -> P:
        return of_state if leaf.ndim else P()

    states = jax.tree_util.tree_map_with_path(spec, state)
    step = jax.shard_map(tx.update, mesh=mesh(), in_specs=(specs, states), out_specs=(specs, states))
    step, expected_step = jax.jit(step), jax.jit(alone.update)
    expected = grads, state
    for _ in range(2):
        got, expected = step(grads, state), expected_step(grads, expected[1])
        state = got[1]
        same(got, expected)
    assert not same_bits(got[0], grads)


@pytest.mark.parametrize(
    ("of_layers", "text"),
    [
        (SPLIT["layers"][0], r"state: it has 8 layers of 'layers/\*', but the updates have 1"),
        ({"kernel": P("d"), "bias": P()}, "'layers/bias' has 8 layers here, and 'layers/kernel' 1"),
    ],
)
def test_layers_that_the_state_does_not_have(of_layers: Any, text: str) -> None:
    """A state that all devices have, where each has its own layers; and leaves that are split otherwise."""
    specs = {"layers": of_layers, "head": P()}
    tx = clipjax.clip_by_group_norm({"layers/*": 1.0, "head": 0.5}, stack=STACK, specs=specs)
    state = tx.init(gradients())
    step = jax.shard_map(tx.update, mesh=mesh(), in_specs=(specs, P()), out_specs=(specs, P()))
    with pytest.raises(ValueError, match=text):
        jax.eval_shape(step, gradients(), state)
