"""`adagc` of layers that are stacked in leaves, whose stack is split over the devices, as in a pipeline."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipjax
from clipjax.gradients.adagc import AdagcState
from tests.support.eight_devices import mesh

STEPS = 8
SPECS = {"head": P("d"), "layers": P("d", None, None)}
AXES = {"layers": (1, 2), "head": None}
STATE = AdagcState(P(), P(), (P(), P("d", None, None)), P())


def rule(specs: Any = SPECS) -> Any:
    return clipjax.adagc(axes=AXES, specs=specs, warmup_steps=3, max_norm=2.0)


@functools.cache
def gradients() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.standard_normal((STEPS, 9)))
    return {
        "head": (rng.standard_normal((STEPS, 16)) * sizes[:, -1:]).astype(np.float32),
        "layers": (rng.standard_normal((STEPS, 8, 4, 3)) * sizes[:, :8, None, None]).astype(np.float32),
    }


def run(tx: Any, state: Any, stacked: Any) -> Any:
    def one(state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state)
        return state, (updates, clipjax.metrics(state))

    return jax.lax.scan(one, state, stacked)


def start(tx: Any, stacked: Any) -> Any:
    return tx.init(jax.tree.map(lambda x: x[0], stacked))


def of_steps(specs: Any) -> Any:
    return jax.tree.map(lambda spec: P(None, *spec), specs)


@functools.cache
def on_one_device() -> Any:
    tx = rule(None)
    return jax.tree.map(np.asarray, jax.jit(lambda x: run(tx, start(tx, x), x))(gradients()))


def same(found: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, on_one_device())


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_each_device_remembers_its_own_layers(check: bool) -> None:
    outs = STATE, (of_steps(SPECS), P())
    ins = STATE, of_steps(SPECS)
    step = jax.shard_map(
        functools.partial(run, rule()), mesh=mesh(), in_specs=ins, out_specs=outs, check_vma=check
    )
    same(jax.jit(step)(start(rule(), gradients()), gradients()))


def test_a_state_may_begin_inside_shard_map() -> None:
    def whole(stacked: Any) -> Any:
        return run(rule(), start(rule(), stacked), stacked)

    outs = STATE, (of_steps(SPECS), P())
    same(jax.jit(jax.shard_map(whole, mesh=mesh(), in_specs=(of_steps(SPECS),), out_specs=outs))(gradients()))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_jit_needs_no_specs(kind: Any) -> None:
    devices = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    tx = rule(None)
    with jax.set_mesh(devices):
        split = {key: NamedSharding(devices, spec) for key, spec in of_steps(SPECS).items()}
        placed = jax.device_put(gradients(), split)
        state = start(tx, gradients())
        same(jax.jit(functools.partial(run, tx))(state, placed))


def test_gammas_that_are_not_split_as_the_leaf_are_an_error() -> None:
    outs = P(), (of_steps(SPECS), P())
    step = jax.shard_map(
        functools.partial(run, rule()), mesh=mesh(), in_specs=(P(), of_steps(SPECS)), out_specs=outs
    )
    with pytest.raises(ValueError, match=r"'layers'.*\(1, 1, 1\).*\(8, 1, 1\).*PartitionSpec of the leaf"):
        jax.eval_shape(step, start(rule(), gradients()), gradients())
