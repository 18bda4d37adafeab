"""Layers, kernels and biases in five layouts, under `jit` on meshes of both kinds, and
where gradients are sharded unlike the weights.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipjax
from tests.contract.members import ROWS
from tests.devices.members import assert_same, drawn, init, step

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")

SHAPES = {"kernel": (8, 16), "bias": (16,), "stack": (4, 8, 16)}
BOTH = ("data", "model")
LAYOUTS = [
    {"kernel": P("data", "model"), "bias": P("model"), "stack": P(None, *BOTH)},
    {"kernel": P("model"), "bias": P(), "stack": P("model", "data")},
    {"kernel": P(None, "model"), "bias": P("model"), "stack": P("data", None, "model")},
    {"kernel": P(BOTH), "bias": P(BOTH), "stack": P("model")},
    {"kernel": P(), "bias": P("data"), "stack": P(*BOTH)},
]
KINDS = [AxisType.Auto, AxisType.Explicit]
# The layers of a stack, and of two that are sharded in two ways.
RECORDERS = {
    "layers": clipjax.record_norms(stacked="*stack", of=("updates", "params")),
    "leaves": clipjax.record_norms("leaf", stacked="*stack", keep=2),
}
AXES = {"stack": 1, "*": 0}
UNITS = {row.name: row.make(1.0, axes=AXES) for row in ROWS if row.takes_axes} | {
    "norms": clipjax.project(lambda tree: clipjax.functional.clip_by_norm(tree, 1.0))
}

weights = functools.partial(drawn, SHAPES)


def mesh_of(kind: AxisType) -> Any:
    return jax.make_mesh((2, 4), BOTH, axis_types=(kind, kind))


def on(mesh: Any, layout: Any, tree: Any) -> Any:
    return jax.device_put(tree, {k: NamedSharding(mesh, layout[k]) for k in tree})


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_measured_in_all_layouts(kind: AxisType) -> None:
    @jax.jit
    def recorded(trees: Any) -> Any:
        return [step(RECORDERS, init(RECORDERS, tree), tree, tree)[0] for tree in trees]

    trees, mesh = [weights(i) for i in range(len(LAYOUTS))], mesh_of(kind)
    sharded = [
        on(mesh, layout, tree) for tree, layout in zip(trees, LAYOUTS, strict=True)
    ]
    # One more, whose two stacks are sharded in two ways.
    trees.append({"stack": trees[0]["stack"], "other_stack": trees[1]["stack"]})
    layout = {"stack": P("data"), "other_stack": P("model")}
    sharded.append(on(mesh, layout, trees[-1]))
    for found, expected in zip(recorded(sharded), recorded(trees), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_units_of_weights_that_were_just_computed(kind: AxisType) -> None:
    """With implicit axes gradients are sharded unlike the weights, too."""

    @jax.jit
    def updates(pairs: Any) -> Any:
        pairs = [(jax.tree.map(lambda x: x + x * x / 9, p), g) for p, g in pairs]
        return [step(UNITS, init(UNITS, p), g, p)[1] for p, g in pairs]

    mesh, pair = mesh_of(kind), (weights(0), weights(1))
    of_weights = LAYOUTS[0], LAYOUTS[3]
    of_grads = of_weights if kind is AxisType.Explicit else (LAYOUTS[2], LAYOUTS[1])
    sharded = [
        tuple(on(mesh, layout, tree) for layout, tree in zip(each, pair, strict=True))
        for each in zip(of_weights, of_grads, strict=True)
    ]
    (expected,) = updates([pair])
    for found in updates(sharded):
        assert_same(found, expected)


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[3]], ids=["axes", "joined"])
def test_bounds_of_the_shape_of_a_leaf_on_explicit_axes(layout: Any) -> None:
    """Of every element; where a leaf is split, the bound is whole."""

    @jax.jit
    def bounded(tree: Any) -> Any:
        def clipped(name: str, x: Any) -> Any:
            bound = np.full(x.shape, 0.5, np.float32)
            clip = clipjax.clip_gradient_by_value
            return {
                "clip": clipjax.functional.clip_by_value(x, bound),
                "box": clipjax.box(-bound, jnp.asarray(bound)).apply(x),
                "backward": jax.grad(lambda y: jnp.sum(clip(y, bound) * x))(x),
                "scale": jax.grad(
                    lambda y: jnp.sum(clipjax.scale_gradient(y, bound) * x)
                )(x),
            }

        heads = {"kernel": tree["stack"], "bias": tree["kernel"]}
        attention = {"query": heads, "key": heads}
        clip = clipjax.qk_clip(rope=2)
        scaled = clip.apply(attention, max_logits=jnp.full(8, 400.0))
        return {name: clipped(name, x) for name, x in tree.items()} | {"qk": scaled}

    tree, mesh = weights(0), mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        assert_same(bounded(on(mesh, layout, tree)), bounded(tree))
