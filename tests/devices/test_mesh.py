"""One device or many, the same numbers: sharded `jit`, `shard_map` and `pmap` on eight CPU devices."""

from __future__ import annotations

import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import clipjax
from tests.support.eight_devices import checks_of, mesh, results_of, run
from tests.support.oracles import exact_norm, exact_tree_norm
from tests.support.trees import same_bits


def tree() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "kernel": rng.standard_normal((16, 8)).astype(np.float32),
        "columns": rng.standard_normal((4, 8)).astype(np.float32),
        "rows": rng.standard_normal((8, 4)).astype(np.float32),
        "replicated": rng.standard_normal((4, 3)).astype(np.float32),
        "half": rng.standard_normal((8, 2)).astype(np.float16),
    }


def specs() -> dict[str, Any]:
    return {
        "kernel": P("d"),
        "columns": P(None, "d"),
        "rows": P("d", None),
        "replicated": P(),
        "half": P("d"),
    }


def members(axes_too: bool = True) -> dict[str, Any]:
    """Transformations by name, each of (specs, axis_name); those of units if `axes_too`."""
    found: dict[str, Any] = {
        "global": lambda s, a: clipjax.clip_by_global_norm(1.0, axis_name=a),
        "global p=3": lambda s, a: clipjax.clip_by_global_norm(1.0, ord=3, axis_name=a),
        "global inf": lambda s, a: clipjax.clip_by_global_norm(0.5, ord=float("inf"), axis_name=a),
        "leaves": lambda s, a: clipjax.clip_by_norm(1.0, axis_name=a),
        "rms": lambda s, a: clipjax.clip_by_rms(0.5, axis_name=a),
        "value": lambda s, a: clipjax.clip_by_value(0.5, axis_name=a),
    }
    if axes_too:
        found |= {
            "units": lambda s, a: clipjax.clip_by_norm(0.5, axes=0, specs=s, axis_name=a),
            "units 1": lambda s, a: clipjax.clip_by_norm(0.5, axes=1, specs=s, axis_name=a),
            "units rms": lambda s, a: clipjax.clip_by_rms(0.25, axes=0, specs=s, axis_name=a),
            "max_norm": lambda s, a: clipjax.max_norm(0.5, specs=s, axis_name=a),
        }
    return found


def one_device(tx: Any, grads: Any) -> Any:
    updates, state = tx.update(grads, tx.init(grads), grads)
    return updates, clipjax.metrics(state)


def same(got: Any, expected: Any, what: str) -> None:
    got_leaves, leaves = jax.tree.leaves(got), jax.tree.leaves(expected)
    assert len(got_leaves) == len(leaves), what
    for a, b in zip(got_leaves, leaves, strict=True):
        assert a.dtype == b.dtype, f"{what}: {a.dtype} instead of {b.dtype}"
        # Sums in another order may round one entry of 16 bits to its neighbour.
        tolerance = 1e-3 if b.dtype == np.float16 else 1e-6
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance / 10, err_msg=what)


def held(updates: Any, grads: Any, name: str) -> None:
    """The bound, measured in float64 after all devices' parts are put together."""
    updates = jax.tree.map(np.asarray, updates)
    if name == "global":
        assert exact_tree_norm(updates) <= 1
    if name == "leaves":
        assert all(exact_norm(x) <= 1 for x in updates.values())
    if name in ("units", "units 1"):
        axis = 1 if name == "units 1" else 0
        assert all((exact_norm(x, axis) <= 0.5).all() for x in updates.values())
    if name == "max_norm":
        after = {k: (grads[k] + u).astype(grads[k].dtype) for k, u in updates.items()}
        assert all((exact_norm(x, 0) <= 0.5).all() for x in after.values())


def mapped(tx: Any, m: Any, in_specs: Any, **options: Any) -> Any:
    def local(grads: Any) -> Any:
        updates, state = tx.update(grads, tx.init(grads), grads)
        return updates, clipjax.metrics(state)

    return jax.jit(jax.shard_map(local, mesh=m, in_specs=(in_specs,), out_specs=(in_specs, P()), **options))


def check_sharded_jit() -> None:
    m, grads = mesh(), tree()
    shardings = {key: NamedSharding(m, spec) for key, spec in specs().items()}
    placed = jax.device_put(grads, shardings)
    for name, build in members().items():
        tx = build(None, None)
        updates, seen = jax.jit(lambda g, tx=tx: one_device(tx, g))(placed)
        expected = one_device(tx, grads)
        same((updates, seen), expected, name)
        held(updates, grads, name)
        for key, leaf in updates.items():
            assert leaf.sharding.is_equivalent_to(shardings[key], leaf.ndim), f"{name}: {key} {leaf.sharding}"


def check_shard_map_tree_and_leaves() -> None:
    grads = tree()
    for name, build in members(axes_too=False).items():
        tx = build(None, None)
        got = mapped(tx, mesh(), specs())(grads)
        same(got, one_device(tx, grads), name)
        held(got[0], grads, name)


def check_shard_map_units() -> None:
    grads = tree()
    for name in ("units", "units 1", "units rms", "max_norm"):
        build = members()[name]
        got = mapped(build(specs(), None), mesh(), specs())(grads)
        same(got, one_device(build(None, None), grads), name)
        held(got[0], grads, name)


def check_units_that_are_whole_on_a_device_keep_their_bits() -> None:
    # Split between units, nothing is added in another order: the same bits, whatever the parts' size.
    for columns in (8, 400, 4000):
        grads = np.random.default_rng(columns).normal(size=(64, columns)).astype(np.float32)
        for build in (members()["units"], members()["units rms"]):
            got = mapped(build(P(None, "d"), None), mesh(), P(None, "d"))(grads)
            assert same_bits(got[0], one_device(build(None, None), grads)[0]), columns


def check_shard_map_units_need_specs() -> None:
    for name in ("units", "units 1", "units rms", "max_norm"):
        with pytest.raises(ValueError, match="specs"):
            mapped(members()[name](None, None), mesh(), specs())(tree())
    # A leaf that does not vary needs none.
    grads = tree()
    whole = jax.tree.map(lambda _: P(), grads)
    tx = members()["units"](None, None)
    same(mapped(tx, mesh(), whole)(grads), one_device(tx, grads), "replicated")


def check_shard_map_nonfinite() -> None:
    grads = tree()
    grads["rows"][0, 0] = np.nan  # on one device only
    tx = clipjax.skip_nonfinite(optax.sgd(1.0))
    updates, seen = mapped(tx, mesh(), specs())(grads)
    assert all((np.asarray(x) == 0).all() for x in updates.values()), "some devices took the step"
    assert seen["skip_nonfinite/skipped"] == 1
    updates, seen = mapped(clipjax.clip_by_global_norm(1.0), mesh(), specs())(grads)
    assert all(np.isnan(np.asarray(x)).all() for x in updates.values())
    assert seen["clip_by_global_norm/nonfinite_count"] == 1
    updates, seen = mapped(clipjax.zero_nonfinite(), mesh(), specs())(grads)
    assert seen["zero_nonfinite/nonfinite_count"] == 1
    assert updates["rows"][0, 0] == 0


def check_shard_map_gradients() -> None:
    grads = tree()
    tx = clipjax.clip_by_global_norm(1.0)

    def loss(grads: Any) -> Any:
        updates = tx.update(grads, tx.init(grads))[0]
        return {k: jnp.sin(u) for k, u in updates.items()}

    total = lambda f: lambda g: sum(jnp.sum(x.astype(jnp.float32)) for x in f(g).values())  # noqa: E731
    sharded = jax.shard_map(loss, mesh=mesh(), in_specs=(specs(),), out_specs=specs())
    assert P() == specs()["replicated"]
    got = jax.jit(jax.grad(total(sharded)))(grads)
    same(got, jax.jit(jax.grad(total(loss)))(grads), "gradient")


def check_unchecked_shard_map() -> None:
    grads = {key: value for key, value in tree().items() if key != "replicated"}
    rows = jax.tree.map(lambda _: P("d"), grads)
    grads["columns"] = grads["columns"].repeat(2, axis=0)
    for name, build in members().items():
        if name == "units 1":
            continue  # its units are whole on each device: axis_name would be wrong
        got = mapped(build(None, "d"), mesh(), rows, check_vma=False)(grads)
        same(got, one_device(build(None, None), grads), name)
        held(got[0], grads, name)


def check_pmap() -> None:
    grads = {key: value for key, value in tree().items() if key != "replicated"}
    grads["columns"] = grads["columns"].repeat(2, axis=0)
    split = jax.tree.map(lambda x: x.reshape(8, -1, x.shape[-1]), grads)
    for name, build in members().items():
        if name == "units 1":
            continue
        tx = build(None, "d")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of pmap itself
            updates, seen = jax.pmap(lambda g, tx=tx: one_device(tx, g), axis_name="d")(split)
        updates = jax.tree.map(lambda u, g: np.asarray(u).reshape(g.shape), updates, grads)
        for key, value in seen.items():
            assert (np.asarray(value) == np.asarray(value)[0]).all(), f"{name}: {key} differs"
        seen = jax.tree.map(lambda x: np.asarray(x)[0], seen)
        same((updates, seen), one_device(build(None, None), grads), name)
        held(updates, grads, name)


def check_one_all_reduce() -> None:
    def collectives(tx: Any) -> dict[str, int]:
        text = mapped(tx, mesh(), specs()).lower(tree()).compile().as_text()
        kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
        return {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in kinds}

    found = collectives(clipjax.clip_by_global_norm(1.0))
    assert found == {
        "all-reduce": 1,
        "all-gather": 0,
        "all-to-all": 0,
        "collective-permute": 0,
        "reduce-scatter": 0,
    }, found


def check_two_mesh_axes() -> None:
    grads = tree()
    names = {
        "kernel": P("x", "y"),
        "columns": P(None, ("x", "y")),
        "rows": P("y"),
        "replicated": P(),
        "half": P(("x", "y")),
    }
    two = mesh(2, 4, names=("x", "y"))
    for name, build in members().items():
        got = mapped(build(names, None), two, names)(grads)
        same(got, one_device(build(None, None), grads), name)
        held(got[0], grads, name)


def check_thresholds_that_adapt() -> None:
    """Over some steps: what is remembered is the same on every device, and the same as on one."""
    m, grads = mesh(), tree()
    params = jax.tree.map(lambda x: x[::-1] / 2, grads)
    shardings = {key: NamedSharding(m, spec) for key, spec in specs().items()}
    adaptive: dict[str, Any] = {
        "autoclip": lambda s: clipjax.autoclip(50.0, window=4),
        "zclip": lambda s: clipjax.zclip(warmup_steps=2),
        "lognormal": lambda s: clipjax.clip_by_lognormal(0.1),
        "quantile": lambda s: clipjax.clip_by_quantile(),
        "adagc": lambda s: clipjax.adagc(warmup_steps=2),
        "agc": lambda s: clipjax.adaptive_grad_clip(specs=s),
    }
    for name, build in adaptive.items():

        def some_steps(tx: Any, grads: Any, params: Any) -> Any:
            state, updates = tx.init(params), []
            for size in (1, 3, 2, 9, 1):
                scaled = jax.tree.map(lambda x, size=size: (x * size).astype(x.dtype), grads)
                clipped, state = tx.update(scaled, state, params)
                updates.append(clipped)
            return updates, state

        whole = jax.jit(functools.partial(some_steps, build(None)))
        expected = whole(grads, params)
        same(
            whole(*jax.device_put((grads, params), (shardings, shardings))), expected, f"{name}, sharded jit"
        )
        split = jax.shard_map(
            functools.partial(some_steps, build(specs())),
            mesh=m,
            in_specs=(specs(), specs()),
            out_specs=([specs()] * 5, P()),
        )
        same(jax.jit(split)(grads, params), expected, f"{name}, shard_map")


def test_on_eight_devices() -> None:
    assert results_of(__name__) == dict.fromkeys(checks_of(globals()), "passed")


if __name__ == "__main__":
    run(checks_of(globals()))
