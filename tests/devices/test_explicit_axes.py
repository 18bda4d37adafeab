"""Mesh axes in the types of arrays (explicit sharding): every member traces, and keeps how leaves are split.

The numbers of what is run so are compared in test_layouts.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipjax
from tests.support.eight_devices import MEMBERS, SPECS, SPECTRAL, TWO_AXES, Builder, placed, tree, two_axes

ADAM: dict[str, Builder] = {
    "skip adam": lambda s, a: clipjax.bounded(
        optax.adamw(0.1), project=clipjax.max_norm(1.0), nonfinite="skip"
    ),
}
ALL = MEMBERS | SPECTRAL | ADAM


def explicit() -> Any:
    return two_axes(AxisType.Explicit)


def on_mesh(values: Any, specs: Any = TWO_AXES) -> Any:
    return placed(values, specs, explicit())


@pytest.mark.parametrize("name", ALL)
def test_every_member_traces_and_keeps_the_axes(name: str) -> None:
    """Of gradients split as the weights are, of gradients that are not split, and of large leaves."""
    tx, params = ALL[name](None, None), on_mesh(tree())
    large = {
        "kernel": jnp.zeros((2**14, 16)),
        "columns": jnp.zeros((2**14, 16)),
        "replicated": jnp.zeros((8, 3)),
    }
    with jax.set_mesh(explicit()):
        whole, big = on_mesh(tree(), dict.fromkeys(SPECS, P())), on_mesh(large)
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
    with jax.set_mesh(explicit()):
        params = on_mesh(stack, {"stack": split})
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

    params = on_mesh(tree())
    with jax.set_mesh(explicit()):
        for key, slope in jax.eval_shape(jax.grad(loss), params).items():
            assert slope.sharding.spec == jax.typeof(params[key]).sharding.spec


def test_heads_may_be_split() -> None:
    spec, ones = P("x", "y"), np.ones((8, 8, 4), np.float32)
    mesh = explicit()
    with jax.set_mesh(mesh):
        params = {
            key: {"kernel": jax.device_put(ones, NamedSharding(mesh, spec))} for key in ("query", "key")
        }
        logits = jax.device_put(np.full(8, 400.0, np.float32), NamedSharding(mesh, P("y")))
        clipped = jax.jit(lambda params, logits: clipjax.qk_clip(100.0)(params, max_logits=logits))(
            params, logits
        )
    np.testing.assert_allclose(clipped["query"]["kernel"], ones / 2, rtol=1e-6)
