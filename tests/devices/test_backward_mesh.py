"""Layers that clip what is handed back, on eight devices: the gradients of one device."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import clipjax
from tests.support.eight_devices import checks_of, mesh, results_of, run
from tests.support.oracles import exact_norm
from tests.support.trees import same_bits


def parts() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    tree = {
        "rows": rng.standard_normal((16, 4)).astype(np.float32),
        "columns": rng.standard_normal((4, 8)).astype(np.float32),
        "half": rng.standard_normal((8, 2)).astype(ml_dtypes.bfloat16),
    }
    return tree, {"rows": P("d"), "columns": P(None, "d"), "half": P("d")}


SHARDED = {
    "norm": lambda x, **o: clipjax.clip_gradient_by_norm(x, 0.5, **o),
    "units 0": lambda x, specs=None, **o: clipjax.clip_gradient_by_norm(x, 0.5, 0, specs=specs, **o),
    "units 1": lambda x, specs=None, **o: clipjax.clip_gradient_by_norm(x, 0.5, 1, specs=specs, **o),
    "global": lambda x, **o: clipjax.clip_gradient_by_global_norm(x, 0.5, **o),
    "value": lambda x, **o: clipjax.clip_gradient_by_value(x, -0.5, 0.5, **o),
}


def total(tree: Any) -> Any:
    return sum(jnp.sum(jnp.sin(x.astype(jnp.float32)) * 3) for x in jax.tree.leaves(tree))


def alike(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        tolerance = 1e-2 if b.dtype == ml_dtypes.bfloat16 else 1e-6
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=tolerance, atol=1e-6
        )


def check_sharded_jit() -> None:
    tree, specs = parts()
    placed = jax.device_put(tree, {k: NamedSharding(mesh(), s) for k, s in specs.items()})
    for layer in SHARDED.values():

        def f(x, p, layer=layer):
            return total(layer(x, probe=p))

        gradient = jax.jit(jax.grad(f, argnums=(0, 1)))
        got = gradient(placed, jnp.zeros(()))
        alike(got, gradient(tree, jnp.zeros(())))
        for key, leaf in got[0].items():
            assert leaf.sharding.is_equivalent_to(placed[key].sharding, leaf.ndim), key


def check_shard_map() -> None:
    """The gradient of a shard_map, and a gradient inside one."""
    tree, specs = parts()
    for name, layer in SHARDED.items():
        options = {"specs": specs} if "units" in name else {}

        def local(x: Any, p: Any, layer: Any = layer, options: Any = options) -> Any:
            return lax.psum(total(layer(x, probe=p, **options)), "d")

        def inside(x: Any, p: Any, local: Any = local) -> Any:
            return jax.grad(local, argnums=(0, 1))(x, p)

        want = jax.jit(jax.grad(lambda x, p, layer=layer: total(layer(x, probe=p)), argnums=(0, 1)))(
            tree, jnp.zeros(())
        )
        outer = jax.shard_map(local, mesh=mesh(), in_specs=(specs, P()), out_specs=P())
        alike(jax.jit(jax.grad(outer, argnums=(0, 1)))(tree, jnp.zeros(())), want)
        alike(jax.jit(jax.grad(jax.checkpoint(outer), argnums=(0, 1)))(tree, jnp.zeros(())), want)
        inner = jax.shard_map(inside, mesh=mesh(), in_specs=(specs, P()), out_specs=(specs, P()))
        alike(jax.jit(inner)(tree, jnp.zeros(())), want)


def check_shard_map_replicated() -> None:
    """Shared parameters: their gradients are added over the devices, and the sum is clipped once."""
    rng = np.random.default_rng(1)
    w = rng.standard_normal((4, 2)).astype(np.float32)
    x = rng.standard_normal((16, 4)).astype(np.float32)

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum((x @ clipjax.clip_gradient_by_norm(w, 0.5)) ** 2)

    def local(w, x):
        return lax.psum(loss(w, x), "d")

    mapped = jax.shard_map(local, mesh=mesh(), in_specs=(P(), P("d")), out_specs=P())
    got = jax.jit(jax.grad(mapped))(w, x)
    alike(got, jax.grad(loss)(w, x))
    assert exact_norm(got) <= 0.5


def check_shard_map_needs_specs() -> None:
    tree, specs = parts()
    f = jax.shard_map(SHARDED["units 0"], mesh=mesh(), in_specs=(specs,), out_specs=specs)
    with pytest.raises(ValueError, match="specs"):  # already on the way forward
        f(tree)
    whole = jax.tree.map(lambda _: P(), tree)
    f = jax.shard_map(SHARDED["units 0"], mesh=mesh(), in_specs=(whole,), out_specs=whole)
    assert same_bits(f(tree), tree)


def check_shard_map_higher() -> None:
    x = np.random.default_rng(2).standard_normal(8).astype(np.float32)
    clips = (
        lambda x: clipjax.clip_gradient_by_norm(x, 0.5),
        lambda x: clipjax.clip_gradient_by_value(x, 0.5),
        lambda x: clipjax.clip_gradient_by_value(x, -0.5, 0.25),
    )
    for clip in clips:

        def layer(x: Any, clip: Any = clip) -> Any:
            return clip(jnp.sin(x)) ** 3

        outer = jax.shard_map(layer, mesh=mesh(), in_specs=P("d"), out_specs=P("d"))
        for second in (jax.hessian, lambda f: jax.jacrev(jax.grad(f))):
            got = jax.jit(second(lambda x, outer=outer: jnp.sum(outer(x))))(x)
            want = second(lambda x, layer=layer: jnp.sum(layer(x)))(x)
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def check_unchecked_shard_map_and_pmap() -> None:
    tree, _ = parts()
    tree["columns"] = tree["columns"].T
    rows = jax.tree.map(lambda _: P("d"), tree)
    split = jax.tree.map(lambda x: x.reshape(8, -1, x.shape[-1]), tree)
    for name, layer in SHARDED.items():
        if name == "units 1":
            continue  # its units are whole on each device
        want = jax.grad(lambda x, layer=layer: total(layer(x)))(tree)

        def f(x, layer=layer):
            return jax.grad(lambda x: total(layer(x, axis_name="d")))(x)

        mapped = jax.shard_map(f, mesh=mesh(), in_specs=(rows,), out_specs=rows, check_vma=False)
        alike(jax.jit(mapped)(tree), want)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of pmap itself
            got = jax.pmap(f, axis_name="d")(split)
        alike(jax.tree.map(lambda g, x: np.asarray(g).reshape(x.shape), got, tree), want)


def check_scale_and_replace() -> None:
    x = np.linspace(-2, 2, 8, dtype=np.float32)
    w = np.float32(3)

    def local(w: Any, x: Any) -> Any:
        x = clipjax.scale_gradient(x, 2.0)
        return jnp.sum(clipjax.replace_gradient(jnp.sign, lambda x: w * x)(x) ** 2)

    mapped = jax.shard_map(
        lambda w, x: lax.psum(local(w, x), "d"), mesh=mesh(), in_specs=(P(), P("d")), out_specs=P()
    )
    both = (0, 1)
    alike(jax.jit(jax.grad(mapped, both))(w, x), jax.grad(local, both)(w, x))
    alike(jax.jit(jax.jacfwd(mapped, both))(w, x), jax.grad(local, both)(w, x))


def test_on_eight_devices() -> None:
    assert results_of(__name__) == dict.fromkeys(checks_of(globals()), "passed")


if __name__ == "__main__":
    assert jax.device_count() == 8
    run(checks_of(globals()))
