"""Units in a checked shard_map, where `specs` says which of them are split over the devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import clipjax
from tests.support.eight_devices import (
    CHOSEN,
    MEMBERS,
    OF_UNITS,
    SPECS,
    check,
    members,
    mesh,
    same,
    steps_of,
    tree,
)
from tests.support.trees import same_bits


def mapped(tx: Any, specs: Any) -> Any:
    def local(grads: Any, params: Any) -> Any:
        updates, state = tx.update(grads, tx.init(params), params)
        return updates, clipjax.metrics(state)

    return jax.shard_map(local, mesh=mesh(), in_specs=(specs, specs), out_specs=(specs, P()))


@pytest.mark.parametrize(("way", "name"), members(OF_UNITS, "shard_map", "two mesh axes"))
def test_same_as_on_one_device(way: str, name: str) -> None:
    check(way, name)


@pytest.mark.parametrize("name", [name for name in MEMBERS if name not in CHOSEN["shard_map"]])
def test_what_is_reported_is_known_to_be_the_same_on_all_devices(name: str) -> None:
    """Else shard_map would not take `P()` for it, as tracing finds out: for those that are not run in one."""
    traced = mapped(MEMBERS[name](SPECS, None), SPECS)
    jax.eval_shape(traced, tree(), tree())


@pytest.mark.parametrize("build", [*OF_UNITS.values(), lambda *_: clipjax.adaptive_grad_clip()])
def test_units_of_a_leaf_that_varies_need_specs(build: Any) -> None:
    with pytest.raises(ValueError, match="specs"):
        jax.eval_shape(mapped(build(None, None), SPECS), tree(), tree())


def test_units_of_a_leaf_that_does_not_vary_need_no_specs() -> None:
    found = jax.jit(mapped(OF_UNITS["units"](None, None), P()))(tree(), tree(1))
    same(found, steps_of("one device", "units")[0])


def test_units_that_are_whole_on_a_device_keep_their_bits() -> None:
    """Split between units, nothing is added in another order: the same bits, whatever the parts' size."""
    rng = np.random.default_rng(0)
    grads = {f"{n}": rng.standard_normal((64, n)).astype(np.float32) for n in (8, 400, 4000)}
    both = {name: OF_UNITS[name] for name in ("units", "rms of units")}

    def clipped(specs: Any) -> Any:
        txs = {name: build(specs, None) for name, build in both.items()}
        return lambda grads: {name: tx.update(grads, tx.init(grads))[0] for name, tx in txs.items()}

    specs = P(None, "d")
    on_devices = jax.shard_map(clipped(specs), mesh=mesh(), in_specs=(specs,), out_specs=specs)
    assert same_bits(jax.jit(on_devices)(grads), jax.jit(clipped(None))(grads))


def test_attention_heads_that_are_whole_on_a_device() -> None:
    """Each device clips its own head; the report is of all, and counts a logit that is NaN on one of them."""
    rng = np.random.default_rng(1)
    kernels = {
        name: {"kernel": rng.standard_normal((4, 8, 2)).astype(np.float32)} for name in ("query", "key")
    }
    logits = np.linspace(10, 400, 8, dtype=np.float32)
    tx = clipjax.qk_clip(100.0)

    def local(params: Any, max_logits: Any) -> Any:
        nothing = jax.tree.map(jnp.zeros_like, params)
        updates, state = tx.update(nothing, tx.init(params), params, max_logits=max_logits)
        return jax.tree.map(jnp.add, params, updates), clipjax.metrics(state)

    heads = P(None, "d")
    clip = jax.jit(jax.shard_map(local, mesh=mesh(), in_specs=(heads, P("d")), out_specs=(heads, P())))
    factors = np.sqrt(np.minimum(1, 100 / logits))
    found, seen = clip(kernels, logits)
    for name in kernels:
        wanted = kernels[name]["kernel"] * factors[:, None]
        np.testing.assert_allclose(found[name]["kernel"], wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose([seen["qk_clip/norm"], seen["qk_clip/scale"]], [400, 0.25], rtol=1e-6)
    for device in (0, 3, 7):
        bad = np.where(np.arange(8) == device, np.float32(np.nan), logits)
        assert clip(kernels, bad)[1]["qk_clip/nonfinite_count"] == 1


@pytest.mark.full
def test_matrices_that_are_whole_on_a_device() -> None:
    """Each device caps its own matrix of a stack; the report is of all."""
    stack = np.random.default_rng(1).standard_normal((8, 3, 2)).astype(np.float32)
    tx = clipjax.spectral_cap(1.0, flatten=(1, 2), specs=P("d"))

    def local(params: Any) -> Any:
        updates, state = tx.update(jnp.zeros_like(params), tx.init(params), params)
        return params + updates, clipjax.metrics(state)

    cap = jax.jit(jax.shard_map(local, mesh=mesh(), in_specs=P("d"), out_specs=(P("d"), P())))
    capped, seen = cap(stack)
    u, s, v = np.linalg.svd(stack.astype(np.float64), full_matrices=False)
    np.testing.assert_allclose(capped, (u * np.minimum(s, 1)[:, None]) @ v, rtol=1e-5, atol=1e-5)
    found = [seen[f"spectral_cap/{key}"] for key in ("norm", "scale", "violation")]
    np.testing.assert_allclose(found, [s.max(), 1 / s.max(), s.max() - 1], rtol=1e-5)
