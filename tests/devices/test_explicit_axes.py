"""Mesh axes in the types of arrays (explicit sharding): the numbers of one device, split as they came."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipjax
from tests.support.eight_devices import (
    MEMBERS,
    SPECS,
    TWO_AXES,
    Builder,
    Program,
    Way,
    held,
    same,
    tree,
)

KINDS = {
    "explicit": ((2, 4), ("x", "y"), AxisType.Explicit, TWO_AXES),
    "auto": ((2, 4), ("x", "y"), AxisType.Auto, TWO_AXES),
}
SPECTRAL: dict[str, Builder] = {"spectral_cap": lambda s, a: clipjax.spectral_cap(2.0)}
ADAM: dict[str, Builder] = {
    "skip adam": lambda s, a: clipjax.bounded(
        optax.adamw(0.1), project=clipjax.max_norm(1.0), nonfinite="skip"
    ),
}
ALL = MEMBERS | SPECTRAL | ADAM
# What is run, and not only traced.
RUN = ["global", "units of rows", "min_max_norm", "tangent_cone", "agc", "quantile", "bounded, skip"]


def mesh_of(kind: str) -> Any:
    shape, names, axis_type, _ = KINDS[kind]
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))


def on_mesh(kind: str, values: Any, specs: Any = None) -> Any:
    mesh = mesh_of(kind)
    specs = KINDS[kind][3] if specs is None else specs
    return {key: jax.device_put(x, NamedSharding(mesh, specs[key])) for key, x in values.items()}


def sized(kind: str | None = None) -> list[Any]:
    grads = [jax.tree.map(lambda x, n=n: (x * n).astype(x.dtype), tree(0)) for n in (1, 3, np.nan)]
    return grads if kind is None else [on_mesh(kind, each) for each in grads]


@functools.cache
def steps_on(kind: str | None) -> list[tuple[Any, Any]]:
    """The steps of some members, compiled together; None is one device."""
    way = Way(lambda step, names: jax.jit(step), ALL)
    if kind is None:
        return Program(way, RUN).steps(sized(), tree(1))
    with jax.set_mesh(mesh_of(kind)):
        return Program(way, RUN).steps(sized(kind), on_mesh(kind, tree(1)))


@pytest.mark.parametrize("name", RUN)
@pytest.mark.parametrize("kind", KINDS)
def test_same_as_on_one_device(kind: str, name: str) -> None:
    got, expected = (
        [(updates[name], seen[name]) for updates, seen in steps_on(where)] for where in (kind, None)
    )
    same(got, expected)
    held(got[0][0], name)
    for key, leaf in on_mesh(kind, tree()).items():
        assert got[0][0][key].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


@pytest.mark.parametrize("name", ALL)
def test_every_member_traces_and_keeps_the_axes(name: str) -> None:
    """Of gradients split as the weights are, of gradients that are not split, and of large leaves."""
    kind = "explicit"
    tx, params = ALL[name](None, None), on_mesh(kind, tree())
    large = {
        "kernel": jnp.zeros((2**14, 16)),
        "columns": jnp.zeros((2**14, 16)),
        "replicated": jnp.zeros((8, 3)),
    }
    with jax.set_mesh(mesh_of(kind)):
        whole, big = on_mesh(kind, tree(), dict.fromkeys(SPECS, P())), on_mesh(kind, large)
        pairs = ((params, params), (tree(), params), (whole, params), (params, whole), (big, big))
        for grads, weights in pairs:
            updates, _ = jax.eval_shape(lambda g, p: tx.update(g, tx.init(p), p), grads, weights)
            if grads is weights:
                for key, leaf in grads.items():
                    assert updates[key].sharding.spec == jax.typeof(leaf).sharding.spec


@pytest.mark.parametrize("split", [P(("x", "y")), P("x", "y"), P(None, "x", "y")], ids=str)
def test_spectral_cap_of_a_stack(split: P) -> None:
    """Matrices on several devices, and matrices of which each device has a part."""
    stack = {"stack": np.random.default_rng(0).standard_normal((8, 8, 16)).astype(np.float32)}
    cap = clipjax.spectral_cap(2.0, flatten=(1, 2))
    with jax.set_mesh(mesh_of("explicit")):
        params = on_mesh("explicit", stack, {"stack": split})
        got = jax.jit(cap.__call__)(params)["stack"]
        assert jax.typeof(got) == jax.typeof(params["stack"])
    np.testing.assert_allclose(got, jax.jit(cap.__call__)(stack)["stack"], atol=1e-6)
    assert np.linalg.norm(np.asarray(got, np.float64), 2, axis=(1, 2)).max() <= 2


LAYERS: dict[str, Any] = {
    "clip_gradient_by_value": lambda tree: clipjax.clip_gradient_by_value(tree, -0.5, 0.5),
    "clip_gradient_by_norm": lambda tree: clipjax.clip_gradient_by_norm(tree, 0.5, axes=0),
    "clip_gradient_by_global_norm": lambda tree: clipjax.clip_gradient_by_global_norm(tree, 0.5),
    "max_norm": clipjax.max_norm(1.0),
    "spectral_cap": clipjax.spectral_cap(1.0),
}


@pytest.mark.parametrize("name", LAYERS)
def test_derivatives_keep_the_axes(name: str) -> None:
    def loss(tree: Any) -> Any:
        return sum(jnp.sum(x.astype(np.float32) ** 2) for x in LAYERS[name](tree).values())

    params = on_mesh("explicit", tree())
    with jax.set_mesh(mesh_of("explicit")):
        for key, slope in jax.eval_shape(jax.grad(loss), params).items():
            assert slope.sharding.spec == jax.typeof(params[key]).sharding.spec


def test_heads_may_be_split() -> None:
    spec, ones = P("x", "y"), np.ones((8, 8, 4), np.float32)
    mesh = mesh_of("explicit")
    with jax.set_mesh(mesh):
        params = {
            key: {"kernel": jax.device_put(ones, NamedSharding(mesh, spec))} for key in ("query", "key")
        }
        logits = jax.device_put(np.full(8, 400.0, np.float32), NamedSharding(mesh, P("y")))
        clipped = jax.jit(lambda params, logits: clipjax.qk_clip(100.0)(params, max_logits=logits))(
            params, logits
        )
    np.testing.assert_allclose(clipped["query"]["kernel"], ones / 2, rtol=1e-6)
