"""The axes of Linen layers that `scan` or `vmap` stacks: each layer of the stack has units of its own."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from clipjax import SKIP
from tests.support.units import depends, random, random_weights, units

pytest.importorskip("flax")
import flax.linen as nn

from clipjax.flax import unit_axes

KEY = jax.random.key(0)


class Apart(nn.Module):
    """Hands on x, beside what its layer makes of it: no layer of a stack sees another's weights."""

    width: int

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        return x, nn.Dense(self.width)(x)


def stack(transform: Any, axis: int, size: int, module: Any = Apart) -> Any:
    more = {"length": size} if transform is nn.scan else {"in_axes": None, "axis_size": size}
    return transform(module, variable_axes={"params": axis}, split_rngs={"params": True}, **more)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("transform", "axis"), [(nn.scan, 0), (nn.scan, 1), (nn.vmap, 0), (nn.vmap, 1), (nn.vmap, -1)]
)
def test_stacked_linen_layers_have_units_of_their_own(transform: Any, axis: int, size: int) -> None:
    """Also where the stack is as long as the layers are wide, so that the shapes say nothing."""
    model, x = stack(transform, axis, size)(4), random(3, 4)
    axes = unit_axes(model, KEY, x)
    layer = random_weights(model.init, KEY, x)["params"]["Dense_0"]

    def function(changed: Any) -> Any:
        return model.apply({"params": {"Dense_0": {**layer, "kernel": changed}}}, x, None)[1]

    found = depends(function, layer["kernel"], (-3, -1))
    assert len(found) == size * 4
    assert set(found) == units(layer["kernel"].shape, axes["Dense_0/kernel"])
    assert axes["Dense_0/bias"] is SKIP


def test_stacks_of_stacks_in_a_larger_model() -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            both = stack(nn.vmap, 1, 2, stack(nn.scan, 0, 2))(2, name="both")
            x = both(x, None)[0][0]
            x = nn.jit(nn.Dense)(2, name="jitted")(x)
            return nn.Dense(2, name="last")(x)

    axes = unit_axes(Model(), KEY, random(3, 2))
    # The scan puts its axis first, (layers, in, out), and the vmap its own second: (layers, copies, in, out).
    assert axes["both/Dense_0/kernel"] == (2,)
    assert axes["jitted/kernel"] == axes["last/kernel"] == (0,)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_function_that_is_scanned(axis: int) -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            scan = nn.scan(
                lambda module, carry, _: (module(carry)[1], None),
                variable_axes={"params": axis},
                split_rngs={"params": True},
                length=2,
            )
            return scan(nn.remat(Apart)(2, name="block"), x, None)[0]

    assert unit_axes(Model(), KEY, random(3, 2))["block/Dense_0/kernel"] == (1 - axis,)


def test_modules_that_jax_has_traced_before() -> None:
    """JAX runs the Python of what is under `nn.jit` once only, and a stack could go unseen."""
    jitted = nn.jit(stack(nn.scan, 1, 2))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return jitted(4)(x, None)[0]

    jax.eval_shape(Model().init, KEY, random(3, 4))
    for _ in range(2):
        assert unit_axes(Model(), KEY, random(3, 4))["JitScanApart_0/Dense_0/kernel"] == (0,)


@pytest.mark.parametrize("wrapper", [nn.WeightNorm, nn.SpectralNorm])
def test_reparametrised_layers_in_a_stack(wrapper: Any) -> None:
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any = None) -> Any:
            layer = wrapper(nn.Dense(4))
            more = {"update_stats": True} if wrapper is nn.SpectralNorm else {}
            return layer(layer(x, **more), **more), None

    axes = {"params": 1, "batch_stats": 0}
    model = nn.scan(Twice, variable_axes=axes, split_rngs={"params": True}, length=4)()
    assert unit_axes(model, KEY, random(3, 4))["Dense_0/kernel"] == (0,)


def test_a_linen_stack_that_cannot_be_told_is_named() -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return stack(nn.vmap, 0, 2, nn.WeightNorm)(nn.Dense(4))(x)

    with pytest.raises(ValueError, match="'kernel' of Dense: which axes are a stack"):
        unit_axes(Model(), KEY, random(3, 4))
