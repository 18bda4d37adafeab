"""What four TPUs send each other for the norms of units, in several layouts."""

import functools
import math
import re
from collections import Counter
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

import clipjax
from benchmarks.platforms import devices_of
from tests.devices.test_layouts import BOTH, KINDS, LAYOUTS, UNITS
from tests.support.platforms import compiled_for_tpu, skip_where_missing

pytestmark = pytest.mark.tpu_compile

SHAPES = {"kernel": (512, 1024), "bias": (1024,), "stack": (4, 512, 1024)}
FEW = 20_000  # more than there are norms, less than a part of a kernel has entries
COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\("
)


@functools.cache
def devices() -> Any:
    skip_where_missing("v5e")
    return np.array(devices_of("v5e")[:4]).reshape(2, 2)


def shapes(kind: AxisType, layout: int) -> Any:
    mesh = Mesh(devices(), BOTH, axis_types=(kind, kind))
    return {
        k: jax.ShapeDtypeStruct(
            shape, np.float32, sharding=NamedSharding(mesh, LAYOUTS[layout][k])
        )
        for k, shape in SHAPES.items()
    }


def sent(function: Any, grads: Any, params: Any) -> Counter[str]:
    """Count the entries that collectives return, by kind, where the trees that the
    function yields are to be sharded like the parameters.
    """
    shardings = jax.tree.map(lambda x: x.sharding, params)

    def placed(grads: Any, params: Any) -> Any:
        trees = list(function(grads, params))
        if AxisType.Explicit in shardings["bias"].mesh.axis_types:
            return trees
        return [jax.lax.with_sharding_constraint(tree, shardings) for tree in trees]

    found: Counter[str] = Counter()
    for returned, kind in COLLECTIVE.findall(compiled_for_tpu(placed, grads, params)):
        for sizes in re.findall(r"\[([\d,]*)\]", returned):
            found[kind] += math.prod(int(size) for size in sizes.split(",") if size)
    return found


def computed(params: Any) -> Any:
    return jax.tree.map(lambda x: x + x * x / 9, params)


def updates(tx: Any, grads: Any, params: Any) -> Any:
    params = computed(params)
    yield tx.update(grads, tx.init(params), params)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_norms_of_units_send_only_norms(kind: AxisType) -> None:
    def all_members(grads: Any, params: Any) -> Any:
        for name, tx in UNITS.items():
            yield from updates(tx, grads, params)
            if hasattr(tx, "apply"):
                old = [grads] if name == "keep_norm" else []
                yield tx.apply(computed(params), *old)

    for layout in (0, 3):
        both = shapes(kind, layout)
        found = sent(all_members, both, both)
        assert set(found) == {"all-reduce"}
        assert found["all-reduce"] < FEW * len(UNITS)


def test_a_skip_and_norms_of_layers_share_the_reductions_of_a_clip() -> None:
    """A step of Adam with Optax's clip has as many all-reduces."""
    adam = optax.adam(1e-3)
    theirs = optax.chain(optax.clip_by_global_norm(1.0), adam)
    clip = clipjax.clip_by_global_norm(1.0)
    ours = optax.chain(
        clipjax.record_norms("leaf", stacked="stack", keep=16),
        clipjax.skip_spikes(clipjax.bounded(adam, clip=clip)),
    )

    def reductions(tx: optax.GradientTransformation) -> int:
        def step(grads: Any, params: Any) -> Any:
            updates, state = tx.update(grads, tx.init(params), params)
            shardings = jax.tree.map(lambda x: x.sharding, both)
            measured = clipjax.metrics(state) if tx is ours else {}
            return jax.lax.with_sharding_constraint(updates, shardings), measured

        found = COLLECTIVE.findall(compiled_for_tpu(step, both, both))
        assert {kind for _, kind in found} == {"all-reduce"}
        return len(found)

    both = shapes(AxisType.Auto, 0)
    assert reductions(ours) == reductions(theirs)
