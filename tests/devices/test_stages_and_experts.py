"""Leaves that only some devices have: stages of a pipeline, and experts beside leaves that all devices have.

Whole models take a step: loss, gradients, bounds and optimizer on eight devices. What is expected comes from
one device and, of the norms, from NumPy's float64 on the whole model's gradients: each stage, each expert and
each leaf that all devices have counts once.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipjax
from tests.support.oracles import exact_norm, exact_tree_norm

STAGES = EXPERTS = 4
ROWS, FEATURES = 8, 6


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Model(NamedTuple):
    """A model as it is on one device, how it is split over axes, and its loss on each device of them."""

    axis: str  # over which some leaves are split; the other axis of the mesh, "data", splits the rows
    params: dict[str, np.ndarray]
    specs: dict[str, P]
    loss: Any  # (params, x) -> the mean over all rows
    local_loss: Any  # the same on each device, of its own leaves and rows
    axes: dict[str, int]  # that a unit reduces
    # In a pipeline a device takes its stage out of the stack, and its leaves have an axis less.
    stacked: tuple[str, ...] = ()

    def mesh(self) -> Any:
        return jax.make_mesh((2, 4), ("data", self.axis), axis_types=(AxisType.Auto,) * 2)

    def own(self, tree: Any) -> Any:
        return {key: x[0] if key in self.stacked else x for key, x in tree.items()}

    def stack(self, tree: Any) -> Any:
        return {key: x[None] if key in self.stacked else x for key, x in tree.items()}


def staged_loss(params: Any, x: Any) -> Any:
    h = x @ params["embedding"]
    for kernel, bias in zip(params["kernel"], params["bias"], strict=True):
        h = jnp.tanh(h @ kernel + bias)
    return jnp.mean(jnp.sum(h**2, axis=1))


def own_stage_loss(params: Any, x: Any) -> Any:
    """What comes out of the last stage; each passes on what it makes, and all of them work all the time."""
    stage = lax.axis_index("stage")
    h = jnp.where(stage == 0, x @ params["embedding"], 0)
    for _ in range(STAGES):
        h = jnp.tanh(h @ params["kernel"] + params["bias"])
        h = lax.ppermute(h, "stage", [(i, (i + 1) % STAGES) for i in range(STAGES)])
    of_the_last = jnp.where(stage == 0, jnp.mean(jnp.sum(h**2, axis=1)), 0)
    return lax.pmean(lax.psum(of_the_last, "stage"), "data")


def gated(params: Any, x: Any, gates: Any) -> Any:
    """The sum over experts of what they make of all rows, each times its gate."""
    return jnp.einsum("ne,nf,efg->ng", gates, x, params["experts"])


def experts_loss(params: Any, x: Any) -> Any:
    gates = jax.nn.softmax(x @ params["router"])
    return jnp.mean(jnp.sum((gated(params, x, gates) + x @ params["shared"]) ** 2, axis=1))


def own_experts_loss(params: Any, x: Any) -> Any:
    gates = jax.nn.softmax(x @ params["router"])
    own = lax.dynamic_slice_in_dim(gates, lax.axis_index("expert"), 1, axis=1)
    made = lax.psum(gated(params, x, own), "expert") + x @ params["shared"]
    return lax.pmean(jnp.mean(jnp.sum(made**2, axis=1)), "data")


MODELS = {
    "stages": Model(
        "stage",
        {
            "embedding": random(0, FEATURES, FEATURES),
            "kernel": random(1, STAGES, FEATURES, FEATURES),
            "bias": random(2, STAGES, FEATURES),
        },
        {"embedding": P(), "kernel": P("stage"), "bias": P("stage")},
        staged_loss,
        own_stage_loss,
        {"embedding": 0, "kernel": 1},
        stacked=("kernel", "bias"),
    ),
    "experts": Model(
        "expert",
        {
            "router": random(3, FEATURES, EXPERTS),
            "shared": random(4, FEATURES, FEATURES),
            "experts": random(5, EXPERTS, FEATURES, FEATURES),
        },
        {"router": P(), "shared": P(), "experts": P("expert")},
        experts_loss,
        own_experts_loss,
        {"shared": 0, "experts": 1},
    ),
}


def members(axes: Any, specs: Any = None, axis_name: Any = None) -> dict[str, Any]:
    """Those of units get `specs`, and the others `axis_name`."""
    return {
        "bounded": clipjax.bounded(
            optax.sgd(lambda count: 1 / (1 + count)),
            clip=clipjax.clip_by_global_norm(1.0, axis_name=axis_name),
            project=clipjax.max_norm(1.5, axes=axes, specs=specs),
            nonfinite="skip",
            axis_name=axis_name,
        ),
        "clip_by_global_norm": clipjax.clip_by_global_norm(1.0, ord=3, axis_name=axis_name),
        "clip_by_quantile": clipjax.clip_by_quantile(axis_name=axis_name),
        "clip_by_value": clipjax.clip_by_value(0.1, axis_name=axis_name),
        "adagc": clipjax.adagc(warmup_steps=1, axis_name=axis_name),
        "leaves": clipjax.clip_by_norm(0.5, axis_name=axis_name),
        "units": clipjax.clip_by_norm(0.1, axes=axes, specs=specs),
        "adaptive_grad_clip": clipjax.adaptive_grad_clip(axes=axes, specs=specs),
        "skip_spikes": clipjax.skip_spikes(optax.sgd(1.0), warmup_steps=1, axis_name=axis_name),
    }


MEMBERS = list(members(None))
# What has a part of every other one; pmap is an unchecked shard_map to JAX.
COVERING = ("bounded", "clip_by_global_norm", "clip_by_value", "units")
CHOSEN = {
    "one device": MEMBERS,
    "sharded jit": COVERING[:2],
    "shard_map": MEMBERS,
    "unchecked": (*COVERING, "adagc", "adaptive_grad_clip"),
    "pmap": COVERING[:2],
}


def step_of(txs: dict[str, Any], loss: Any) -> Any:
    def step(states: Any, params: Any, x: Any) -> Any:
        grads = jax.grad(loss)(params, x)
        return grads, *updated(txs, states, grads, params)

    return step


def updated(txs: dict[str, Any], states: Any, grads: Any, params: Any) -> tuple[Any, Any, Any]:
    done = {name: tx.update(grads, states[name], params) for name, tx in txs.items()}
    updates, new = ({name: pair[i] for name, pair in done.items()} for i in (0, 1))
    return updates, new, {name: clipjax.metrics(state) for name, state in new.items()}


def on_one_device(model: Model, txs: Any) -> Any:
    return jax.jit(step_of(txs, model.loss))


def in_sharded_jit(model: Model, txs: Any) -> Any:
    jitted = on_one_device(model, txs)

    def step(states: Any, params: Any, x: Any) -> Any:
        put = functools.partial(NamedSharding, model.mesh())
        params = {key: jax.device_put(leaf, put(model.specs[key])) for key, leaf in params.items()}
        return jitted(states, params, jax.device_put(x, put(P("data"))))

    return step


def in_shard_map(model: Model, txs: Any) -> Any:
    """Each device has its own leaves; of the stages, in which no unit is split, without the stack."""
    axes = {key: axis - (key in model.stacked) for key, axis in model.axes.items()}
    specs = {key: P() if key in model.stacked else spec for key, spec in model.specs.items()}
    txs = of_those(txs, members(axes, specs))
    step = step_of(txs, model.local_loss)

    def local(states: Any, params: Any, x: Any) -> Any:
        grads, updates, *rest = step(states, model.own(params), x)
        return model.stack(grads), {name: model.stack(each) for name, each in updates.items()}, *rest

    outs = model.specs, dict.fromkeys(txs, model.specs), P(), P()
    return jax.jit(
        jax.shard_map(local, mesh=model.mesh(), in_specs=(P(), model.specs, P("data")), out_specs=outs)
    )


def where_types_do_not_tell(mapped: Any) -> Any:
    """Updates by gradients of one device, in what knows of leaves only what it is told."""

    def way(model: Model, txs: Any) -> Any:
        axis_name = {key: model.axis for key, spec in model.specs.items() if spec == P(model.axis)}
        txs = of_those(txs, members(model.axes, model.specs, axis_name))

        def local(states: Any, grads: Any, params: Any) -> Any:
            updates, *seen = updated(txs, states, grads, params)
            return updates, jax.tree.map(lambda x: x[None], seen)

        update = jax.jit(mapped(model, local, dict.fromkeys(txs, model.specs)))

        def step(states: Any, params: Any, x: Any) -> Any:
            grads = jax.jit(jax.grad(model.loss))(params, x)
            updates, seen = update(states, grads, params)
            for of_devices in jax.tree.leaves(seen):
                np.testing.assert_array_equal(of_devices, np.broadcast_to(of_devices[:1], of_devices.shape))
            return grads, updates, *jax.tree.map(lambda of_devices: of_devices[0], seen)

        return step

    return way


def unchecked(model: Model, local: Any, out: Any) -> Any:
    ins = (P(), model.specs, model.specs)
    outs = out, P(model.axis)
    return jax.shard_map(local, mesh=model.mesh(), in_specs=ins, out_specs=outs, check_vma=False)


def pmapped(model: Model, local: Any, out: Any) -> Any:
    """A device gets a slice of the first axis, which here is of the leaf still; and the rest as it is."""
    of_leaves = {key: 0 if spec == P(model.axis) else None for key, spec in model.specs.items()}
    devices, outs = jax.devices()[:4], (dict.fromkeys(out, of_leaves), 0)
    ins = (None, of_leaves, of_leaves)
    run = jax.pmap(local, axis_name=model.axis, devices=devices, in_axes=ins, out_axes=outs)

    def cut(tree: Any) -> Any:
        return {key: x[:, None] if of_leaves[key] == 0 else x for key, x in tree.items()}

    def joined(tree: Any) -> Any:
        return {key: x[:, 0] if of_leaves[key] == 0 else x for key, x in tree.items()}

    def on_devices(states: Any, grads: Any, params: Any) -> Any:
        updates, seen = run(states, cut(grads), cut(params))
        return {name: joined(each) for name, each in updates.items()}, jax.tree.map(lambda x: x[:, 0], seen)

    return on_devices


WAYS = {
    "one device": on_one_device,
    "sharded jit": in_sharded_jit,
    "shard_map": in_shard_map,
    "unchecked": where_types_do_not_tell(unchecked),
    "pmap": where_types_do_not_tell(pmapped),
}
ON_DEVICES = [way for way in WAYS if way != "one device"]


def of_those(names: Any, txs: dict[str, Any]) -> dict[str, Any]:
    return {name: txs[name] for name in names}


def in_ways(*of: str) -> list[Any]:
    """The parameters `way, member` of a test."""
    return [
        pytest.param(way, member, marks=() if member in CHOSEN[way] else pytest.mark.full)
        for way in ON_DEVICES
        for member in of
    ]


def steps_of(way: str, name: str, *of: str) -> list[Any]:
    """The gradients, the updates and the metrics of some steps; in the last of them one row is bad."""
    return _steps_of(way, name, tuple(CHOSEN[way]) if set(of) <= set(CHOSEN[way]) else tuple(MEMBERS))


@functools.cache
def _steps_of(way: str, name: str, of: tuple[str, ...]) -> list[Any]:
    model = MODELS[name]
    txs = of_those(of, members(model.axes))
    step = WAYS[way](model, txs)
    states = jax.jit(lambda params: {key: tx.init(params) for key, tx in txs.items()})(model.params)
    x, found = random(6, ROWS, FEATURES), []
    bad = x.copy()
    bad[5, 2] = np.nan
    for rows in (x, 2 * x, x / 2, bad):
        grads, updates, states, seen = jax.tree.map(np.asarray, step(states, model.params, rows))
        found.append((grads, updates, seen))
    return found


@pytest.mark.parametrize(("way", "member"), in_ways(*MEMBERS))
@pytest.mark.parametrize("name", MODELS)
def test_same_as_on_one_device(name: str, way: str, member: str) -> None:
    """To the rounding of the gradients, of which the least entries are sums that almost cancel."""
    found, expected = (
        [(updates[member], seen[member]) for _, updates, seen in steps_of(where, name, member)]
        for where in (way, "one device")
    )
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        finite = np.isfinite(b)
        np.testing.assert_array_equal(np.isfinite(a), finite, jax.tree_util.keystr(path))
        size = np.max(np.abs(b[finite]), initial=0)
        np.testing.assert_allclose(a[finite], b[finite], 0, 1e-5 * size, err_msg=jax.tree_util.keystr(path))


METRICS = {
    "bounded": ("clip_by_global_norm/norm", 2),
    "clip_by_global_norm": ("clip_by_global_norm/norm", 3),
    "clip_by_quantile": ("clip_by_quantile/norm", 2),
    "clip_by_value": ("clip_by_value/norm", np.inf),
}


@pytest.mark.parametrize(("way", "member"), in_ways(*METRICS))
@pytest.mark.parametrize("name", MODELS)
def test_every_leaf_counts_once(name: str, way: str, member: str) -> None:
    metric, p = METRICS[member]
    for grads, _, seen in steps_of(way, name, member)[:3]:
        np.testing.assert_allclose(seen[member][metric], float(exact_tree_norm(grads, p)), rtol=1e-6)


@pytest.mark.parametrize(("way", "member"), in_ways("bounded", "clip_by_global_norm", "units"))
@pytest.mark.parametrize("name", MODELS)
def test_the_bounds_hold(name: str, way: str, member: str) -> None:
    model = MODELS[name]
    for _, updates, _ in steps_of(way, name, member)[:3]:
        found = updates[member]
        if member == "clip_by_global_norm":
            assert exact_tree_norm(found, 3) <= 1
        for key, axis in model.axes.items():
            if member == "units":
                assert exact_norm(found[key], axis).max() <= 0.1
            if member == "bounded":
                assert exact_norm(model.params[key] + found[key], axis).max() <= 1.5


@pytest.mark.parametrize("way", ON_DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_all_skip_the_step_with_a_row_that_is_bad_on_some(name: str, way: str) -> None:
    _, updates, seen = steps_of(way, name, "bounded")[-1]
    assert seen["bounded"]["skip_nonfinite/skipped"] == 1
    assert all((leaf == 0).all() for leaf in updates["bounded"].values())
