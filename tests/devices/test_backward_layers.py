"""Layers that clip the gradient in the backward pass, on eight devices: the gradients of one device."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import clipjax
from tests.support.eight_devices import DEVICES, mesh, placed, pmap, split, tree
from tests.support.oracles import exact_norm
from tests.support.trees import same_bits

LAYERS = {
    "norm": lambda x, specs=None, **o: clipjax.clip_gradient_by_norm(x, 0.5, **o),
    "units": lambda x, **o: clipjax.clip_gradient_by_norm(x, 0.5, 0, **o),
    "units of rows": lambda x, **o: clipjax.clip_gradient_by_norm(x, 0.5, 1, **o),
    "global": lambda x, specs=None, **o: clipjax.clip_gradient_by_global_norm(x, 0.5, **o),
    "value": lambda x, specs=None, **o: clipjax.clip_gradient_by_value(x, -0.5, 0.5, **o),
}
# With a named axis every unit counts as split, which those of rows are not.
NAMED = [name for name in LAYERS if name != "units of rows"]
ZERO = np.zeros((), np.float32)


SPECS = {"kernel": P("d", None), "columns": P(None, "d"), "half": P("d")}
ROWS = dict.fromkeys(SPECS, P("d"))


def leaves() -> dict[str, Any]:
    kernel, columns, other = tree().values()
    dtypes = (np.float32, np.float32, ml_dtypes.bfloat16)
    parts = zip(SPECS, (kernel, columns, other), dtypes, strict=True)
    return {key: x.astype(dtype) for key, x, dtype in parts}


def total(values: Any) -> Any:
    return sum(jnp.sum(jnp.sin(x.astype(jnp.float32)) * 3) for x in jax.tree.leaves(values))


def loss_of(name: str, over: str | None = None, **options: Any) -> Any:
    """The loss behind a layer; its second argument is a probe, whose gradient is a norm."""

    def loss(x: Any, probe: Any) -> Any:
        value = total(LAYERS[name](x, probe=probe, **options))
        return value if over is None else lax.psum(value, over)

    return loss


def gradient(loss: Any) -> Any:
    return jax.grad(loss, argnums=(0, 1))


@functools.cache
def one_device() -> Any:
    def gradients(x: Any, probe: Any) -> Any:
        return {name: gradient(loss_of(name))(x, probe) for name in LAYERS}

    return jax.jit(gradients)


@functools.cache
def expected() -> Any:
    return one_device()(leaves(), ZERO)


def alike(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        tolerance = 1e-2 if b.dtype == ml_dtypes.bfloat16 else 1e-6
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=1e-6)


@functools.cache
def of_sharded_jit() -> Any:
    return one_device()(placed(leaves(), SPECS), ZERO)


@pytest.mark.parametrize("name", LAYERS)
def test_under_sharded_jit(name: str) -> None:
    alike(of_sharded_jit()[name], expected()[name])
    for key, leaf in placed(leaves(), SPECS).items():
        assert of_sharded_jit()[name][0][key].sharding.is_equivalent_to(leaf.sharding, leaf.ndim), key


@functools.cache
def of_shard_map() -> Any:
    def mapped(function: Any, out_specs: Any) -> Any:
        return jax.shard_map(function, mesh=mesh(), in_specs=(SPECS, P()), out_specs=out_specs)

    def gradients(x: Any, probe: Any) -> Any:
        found = {}
        for name in LAYERS:
            local = loss_of(name, "d", specs=SPECS)
            found[name, "of"] = gradient(mapped(local, P()))(x, probe)
            found[name, "of, with remat"] = gradient(jax.checkpoint(mapped(local, P())))(x, probe)
            found[name, "inside"] = mapped(gradient(local), (SPECS, P()))(x, probe)
        return found

    return jax.jit(gradients)(leaves(), ZERO)


@pytest.mark.parametrize("where", ["of", "of, with remat", "inside"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_gradient_of_a_shard_map_and_inside_one(name: str, where: str) -> None:
    (got, probe), (want, norm) = of_shard_map()[name, where], expected()[name]
    alike((got, probe), (want, norm))


def test_gradients_of_shared_parameters_are_clipped_once_added_up() -> None:
    rng = np.random.default_rng(1)
    w = rng.standard_normal((4, 2)).astype(np.float32)
    x = rng.standard_normal((16, 4)).astype(np.float32)

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum((x @ clipjax.clip_gradient_by_norm(w, 0.5)) ** 2)

    def local(w: Any, x: Any) -> Any:
        return lax.psum(loss(w, x), "d")

    mapped = jax.shard_map(local, mesh=mesh(), in_specs=(P(), P("d")), out_specs=P())
    got = jax.jit(jax.grad(mapped))(w, x)
    alike(got, jax.jit(jax.grad(loss))(w, x))
    assert exact_norm(got) <= 0.5


def test_units_of_a_leaf_that_varies_need_specs() -> None:
    mapped = jax.shard_map(LAYERS["units"], mesh=mesh(), in_specs=(SPECS,), out_specs=SPECS)
    with pytest.raises(ValueError, match="specs"):  # in the forward pass already
        jax.eval_shape(mapped, leaves())
    whole = jax.shard_map(LAYERS["units"], mesh=mesh(), in_specs=(P(),), out_specs=P())
    assert same_bits(jax.jit(whole)(leaves()), leaves())


def test_second_derivatives() -> None:
    x = np.random.default_rng(2).standard_normal(DEVICES).astype(np.float32)
    clips = {
        "norm": lambda x: clipjax.clip_gradient_by_norm(x, 0.5),
        "value": lambda x: clipjax.clip_gradient_by_value(x, 0.5),
        "low and high value": lambda x: clipjax.clip_gradient_by_value(x, -0.5, 0.25),
    }

    def second(mapped: Any) -> Any:
        """Forward over reverse, and reverse over reverse."""

        def derivatives(x: Any) -> Any:
            found = {}
            for name, clip in clips.items():
                layer = mapped(lambda x, clip=clip: clip(jnp.sin(x)) ** 3)
                summed = lambda x, layer=layer: jnp.sum(layer(x))  # noqa: E731
                found[name] = jax.hessian(summed)(x), jax.jacrev(jax.grad(summed))(x)
            return found

        return jax.jit(derivatives)(x)

    got = second(lambda f: jax.shard_map(f, mesh=mesh(), in_specs=P("d"), out_specs=P("d")))
    want = second(lambda f: f)
    for name in clips:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-5, err_msg=name)


def gradients_of(names: Iterable[str]) -> Any:
    return lambda x: {name: gradient(loss_of(name, axis_name="d"))(x, ZERO) for name in names}


@functools.cache
def of_unchecked_shard_map() -> Any:
    outs = dict.fromkeys(NAMED, (ROWS, P()))
    options = {"mesh": mesh(), "in_specs": (ROWS,), "out_specs": outs, "check_vma": False}
    return jax.jit(jax.shard_map(gradients_of(NAMED), **options))(leaves())


@functools.cache
def of_pmap(names: tuple[str, ...]) -> Any:
    return pmap(gradients_of(names))(split(leaves()))


@pytest.mark.parametrize("name", NAMED)
def test_inside_an_unchecked_shard_map(name: str) -> None:
    alike(of_unchecked_shard_map()[name], expected()[name])


@pytest.mark.parametrize(
    ("names", "name"),
    [(("units", "global"), name) for name in ("units", "global")]
    + [pytest.param(("norm", "value"), name, marks=pytest.mark.full) for name in ("norm", "value")],
)
def test_inside_pmap(names: tuple[str, ...], name: str) -> None:
    x, norm = of_pmap(names)[name]
    alike(jax.tree.map(lambda g, x: g.reshape(x.shape), x, leaves()), expected()[name][0])
    alike(list(norm), [expected()[name][1]] * DEVICES)


def test_scaled_and_replaced_gradients() -> None:
    x = np.linspace(-2, 2, 8, dtype=np.float32)
    w = np.float32(3)

    def local(w: Any, x: Any) -> Any:
        x = clipjax.scale_gradient(x, 2.0)
        return jnp.sum(clipjax.replace_gradient(jnp.sign, lambda x: w * x)(x) ** 2)

    specs = (P(), P("d"))
    mapped = jax.shard_map(
        lambda w, x: lax.psum(local(w, x), "d"), mesh=mesh(), in_specs=specs, out_specs=P()
    )
    both = (0, 1)
    got = jax.jit(lambda w, x: (jax.grad(mapped, both)(w, x), jax.jacfwd(mapped, both)(w, x)))(w, x)
    want = jax.jit(jax.grad(local, both))(w, x)
    alike(got, (want, want))
