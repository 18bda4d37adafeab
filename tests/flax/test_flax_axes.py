"""The axes of a Flax model: a unit is what one output depends on, as the layer's own derivative says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from clipjax import SKIP
from tests.support.oracles import exact_norm
from tests.support.trees import same_bits

pytest.importorskip("flax")
import flax.linen as nn
from flax import nnx
from flax.training.train_state import TrainState

from clipjax.flax import unit_axes

KEY = jax.random.key(0)


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), np.float32)


def with_random_weights(tree: Any) -> Any:
    """No weight is 0, as biases are at the start: it would hide what an output depends on."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([random(*leaf.shape, seed=i) for i, leaf in enumerate(leaves)])


# --------------------------------------------------------------------------------------------------
# The oracle: the entries of a parameter on which one output depends.


def units(shape: tuple[int, ...], reduced: tuple[int, ...]) -> set[frozenset[int]]:
    """The units that the reduced axes make, each as the flat indices of its entries."""
    entries: dict[tuple[int, ...], set[int]] = {}
    for flat, index in enumerate(np.ndindex(*shape)):
        unit = tuple(i for axis, i in enumerate(index) if axis not in reduced)
        entries.setdefault(unit, set()).add(flat)
    return {frozenset(unit) for unit in entries.values()}


def depends(function: Callable[[Any], Any], weights: Any, outputs: tuple[int, ...]) -> list[frozenset[int]]:
    """For each output, told apart by its indices along the axes `outputs`, the entries it depends on."""
    jacobian = np.asarray(jax.jit(jax.jacobian(function))(weights))
    rank = jacobian.ndim - weights.ndim
    others = tuple(axis for axis in range(rank) if axis - rank not in outputs)
    used = (jacobian != 0).any(axis=others).reshape(-1, weights.size)
    return [frozenset(np.flatnonzero(row).tolist()) for row in used]


class Layer(NamedTuple):
    """A layer, a parameter of it, and which axes of the output tell its units apart, from the right."""

    layer: Any
    inputs: tuple[Any, ...]
    number: int  # of units, by hand
    param: str = "kernel"
    outputs: tuple[int, ...] = (-1,)
    captured: str = ""  # the submodule whose output it is
    gates: int = 1  # units on which one output depends


def check(case: Layer, function: Callable[[Any], Any], weights: Any, reduced: Any) -> None:
    found = depends(function, weights, case.outputs)
    claimed = units(weights.shape, reduced)
    assert len(claimed) == case.number
    assert len(found) * case.gates == case.number
    if case.gates == 1:
        assert set(found) == claimed
    for output in found:
        parts = [unit for unit in claimed if unit & output]
        assert len(parts) == case.gates
        assert frozenset().union(*parts) == output


IMAGE = (random(2, 5, 5, 4),)
CARRY = random(3, 4, seed=1)
CELL = (random(3, 5), CARRY)
HEADS = {"outputs": (-2, -1)}


def lstm(cell: Any, **rest: Any) -> Layer:
    return Layer(cell, ((CARRY, random(3, 4, seed=2)), random(3, 5)), 4, **rest)


def attention(param: str) -> Layer:
    layer = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=6, out_features=3)
    if param == "out":
        return Layer(layer, (random(2, 3, 4),), 3, "out/kernel")
    return Layer(layer, (random(2, 3, 4),), 6, f"{param}/kernel", captured=param, **HEADS)


LINEN = {
    "Dense": Layer(nn.Dense(3), (random(2, 4),), 3),
    "DenseGeneral": Layer(nn.DenseGeneral((2, 3), axis=(-2, -1)), (random(2, 3, 4),), 6, **HEADS),
    "DenseGeneral-middle": Layer(nn.DenseGeneral(3, axis=1), (random(2, 3, 4),), 3),
    "DenseGeneral-batch": Layer(
        nn.DenseGeneral(3, axis=-1, batch_dims=(0,)), (random(2, 3, 4),), 6, outputs=(-3, -1)
    ),
    "Conv1D": Layer(nn.Conv(3, 2), (random(2, 5, 4),), 3),
    "Conv2D": Layer(nn.Conv(3, (2, 3), strides=2, padding="VALID"), IMAGE, 3),
    "Conv3D": Layer(nn.Conv(3, (2, 1, 2)), (random(2, 3, 3, 3, 2),), 3),
    "Conv-grouped": Layer(nn.Conv(6, (2, 2), feature_group_count=2), IMAGE, 6),
    "Conv-depthwise": Layer(nn.Conv(4, (2, 2), feature_group_count=4), IMAGE, 4),
    "ConvLocal1D": Layer(nn.ConvLocal(3, 2, padding="VALID"), (random(2, 5, 4),), 4 * 3, **HEADS),
    "ConvLocal2D": Layer(
        nn.ConvLocal(2, (2, 2), padding="VALID"), (random(2, 3, 3, 2),), 8, outputs=(-3, -2, -1)
    ),
    "ConvTranspose": Layer(nn.ConvTranspose(3, (2, 2), strides=(2, 2)), IMAGE, 3),
    "ConvTranspose-transposed": Layer(nn.ConvTranspose(3, (2, 2), transpose_kernel=True), IMAGE, 3),
    "Einsum": Layer(nn.Einsum((4, 2, 3), "abc,cde->abde"), (random(2, 3, 4),), 6, **HEADS),
    "Einsum-batch": Layer(nn.Einsum((3, 4, 2), "bld, ldh -> blh"), (random(2, 3, 4),), 6, **HEADS),
    "Einsum-two": Layer(nn.Einsum((2, 5, 4), "xdc,hcd->xh"), (random(3, 4, 5),), 2),
    "Embed": Layer(nn.Embed(5, 3), (jnp.arange(5),), 5, "embedding", outputs=(-2,)),
    "query": attention("query"),
    "key": attention("key"),
    "value": attention("value"),
    "out": attention("out"),
    **{f"LSTMCell-{g}": lstm(nn.LSTMCell(4), param=f"{g}/kernel") for g in ("ii", "if", "hg", "ho")},
    **{f"OptimizedLSTMCell-{g}": lstm(nn.OptimizedLSTMCell(4), param=f"{g}/kernel") for g in ("ig", "hf")},
    **{
        f"{type(cell).__name__}-{g}": Layer(cell, (CARRY, random(3, 5)), 4, f"{g}/kernel")
        for cell, gates in (
            (nn.GRUCell(4), ("ir", "iz", "hn")),
            (nn.MGUCell(4), ("if", "hn")),
            (nn.SimpleCell(4), "ih"),
        )
        for g in gates
    },
}


@pytest.mark.parametrize("name", LINEN)
def test_the_units_of_a_linen_layer(name: str) -> None:
    case = LINEN[name]
    layer, path = case.layer, case.param.split("/")
    axes = unit_axes(layer, KEY, *case.inputs)
    variables = with_random_weights(layer.init(KEY, *case.inputs))
    weights = variables["params"]
    for key in path:
        weights = weights[key]

    def function(changed: Any) -> Any:
        tree = jax.tree.map(lambda x: x, variables)
        at = tree["params"]
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = changed
        if not case.captured:
            output = layer.apply(tree, *case.inputs)
            return output[1] if isinstance(output, tuple) else output
        captured = layer.apply(tree, *case.inputs, capture_intermediates=True)[1]["intermediates"]
        return captured[case.captured]["__call__"][0]

    check(case, function, weights, axes[case.param])
    biases = [value for key, value in axes.items() if key.endswith("bias")]
    assert all(value is SKIP for value in biases)


RNGS = nnx.Rngs(0)
LIST = getattr(nnx, "List", list)  # older versions of Flax take any


def nnx_attention(param: str) -> Layer:
    layer = nnx.MultiHeadAttention(2, 4, qkv_features=6, out_features=3, decode=False, rngs=RNGS)
    if param == "out":
        return Layer(layer, (random(2, 3, 4),), 3, "out.kernel")
    return Layer(layer, (random(2, 3, 4),), 6, f"{param}.kernel", captured=param, **HEADS)


NNX = {
    "Linear": Layer(nnx.Linear(4, 3, rngs=RNGS), (random(2, 4),), 3),
    "LinearGeneral": Layer(
        nnx.LinearGeneral((3, 4), (2, 3), axis=(-2, -1), rngs=RNGS), (random(2, 3, 4),), 6, **HEADS
    ),
    "LinearGeneral-batch": Layer(
        nnx.LinearGeneral(4, 3, batch_axis={0: 2}, rngs=RNGS), (random(2, 3, 4),), 6, outputs=(-3, -1)
    ),
    "Conv1D": Layer(nnx.Conv(4, 3, 2, rngs=RNGS), (random(2, 5, 4),), 3),
    "Conv2D": Layer(nnx.Conv(4, 3, (2, 3), rngs=RNGS), IMAGE, 3),
    "Conv3D": Layer(nnx.Conv(2, 3, (2, 1, 2), rngs=RNGS), (random(2, 3, 3, 3, 2),), 3),
    "Conv-grouped": Layer(nnx.Conv(4, 6, (2, 2), feature_group_count=2, rngs=RNGS), IMAGE, 6),
    "ConvTranspose": Layer(nnx.ConvTranspose(4, 3, (2, 2), rngs=RNGS), IMAGE, 3),
    "ConvTranspose-transposed": Layer(
        nnx.ConvTranspose(4, 3, (2, 2), transpose_kernel=True, rngs=RNGS), IMAGE, 3
    ),
    "Einsum": Layer(
        nnx.Einsum("abc,cde->abde", (4, 2, 3), (2, 3), rngs=RNGS), (random(2, 3, 4),), 6, **HEADS
    ),
    "Embed": Layer(nnx.Embed(5, 3, rngs=RNGS), (jnp.arange(5),), 5, "embedding", outputs=(-2,)),
    "LoRA": Layer(nnx.LoRA(4, 2, 3, rngs=RNGS), (random(2, 4),), 3, "lora_b"),
    "LoRALinear": Layer(nnx.LoRALinear(4, 3, lora_rank=2, rngs=RNGS), (random(2, 4),), 3),
    "query": nnx_attention("query"),
    "key": nnx_attention("key"),
    "value": nnx_attention("value"),
    "out": nnx_attention("out"),
    "LSTMCell": lstm(nnx.LSTMCell(5, 4, rngs=RNGS), param="hf.kernel"),
    "OptimizedLSTMCell": lstm(
        nnx.OptimizedLSTMCell(5, 4, rngs=RNGS), param="dense_i.kernel", gates=4
    )._replace(number=16),
    "GRUCell": Layer(nnx.GRUCell(5, 4, rngs=RNGS), (CARRY, random(3, 5)), 12, "dense_h.kernel", gates=3),
    "SimpleCell": Layer(nnx.SimpleCell(5, 4, rngs=RNGS), (CARRY, random(3, 5)), 4, "dense_i.kernel"),
}


@pytest.mark.parametrize("name", NNX)
def test_the_units_of_an_nnx_layer(name: str) -> None:
    case = NNX[name]
    axes = unit_axes(case.layer)
    graph, params, rest = nnx.split(case.layer, nnx.Param, ...)
    flat = dict(nnx.to_flat_state(with_random_weights(params)))
    path = tuple(case.param.split("."))

    def function(changed: Any) -> Any:
        new = nnx.from_flat_state({**flat, path: flat[path].replace(changed)})
        layer = nnx.merge(graph, new, rest)
        if case.captured:
            return getattr(layer, case.captured)(*case.inputs)
        output = layer(*case.inputs)
        return output[1] if isinstance(output, tuple) else output

    check(case, function, flat[path][...], axes["/".join(path)])
    assert all(value is SKIP for key, value in axes.items() if key.endswith("bias"))


def test_the_first_matrix_of_lora_has_a_unit_for_each_of_its_outputs() -> None:
    """What comes out of the whole depends on all of them."""
    axes = unit_axes(nnx.LoRA(4, 2, 3, rngs=RNGS))
    assert axes == {"lora_a": (0,), "lora_b": (0,)}


NORMS = {
    "BatchNorm": (nn.BatchNorm(use_running_average=False), nnx.BatchNorm(4, rngs=RNGS)),
    "LayerNorm": (nn.LayerNorm(), nnx.LayerNorm(4, rngs=RNGS)),
    "RMSNorm": (nn.RMSNorm(), nnx.RMSNorm(4, rngs=RNGS)),
    "GroupNorm": (nn.GroupNorm(2), nnx.GroupNorm(4, 2, rngs=RNGS)),
    "InstanceNorm": (nn.InstanceNorm(), hasattr(nnx, "InstanceNorm") and nnx.InstanceNorm(4, rngs=RNGS)),
    "PReLU": (nn.PReLU(), hasattr(nnx, "PReLU") and nnx.PReLU()),
}


@pytest.mark.parametrize("name", NORMS)
def test_scales_are_left_alone(name: str) -> None:
    linen, live = NORMS[name]
    assert set(unit_axes(linen, KEY, random(2, 3, 4)).values()) == {SKIP}
    if live:  # older versions of Flax have not all of them
        assert set(unit_axes(live).values()) == {SKIP}


@pytest.mark.parametrize("wrapper", [nn.WeightNorm, nn.SpectralNorm])
def test_reparametrised_layers(wrapper: Any) -> None:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            more = {"update_stats": True} if wrapper is nn.SpectralNorm else {}
            return wrapper(nn.Dense(3))(x, **more)

    axes = unit_axes(Model(), KEY, random(2, 4))
    params = Model().init(KEY, random(2, 4))["params"]
    scales = {f"{wrapper.__name__}_0/Dense_0/kernel/scale"} if wrapper is nn.WeightNorm else set()
    assert set(axes) == {"Dense_0/kernel", "Dense_0/bias"} | scales
    assert axes["Dense_0/kernel"] == (0,)
    assert all(axes[scale] is SKIP for scale in scales)
    clipjax.max_norm(1.0, axes=axes)(params)


# --------------------------------------------------------------------------------------------------
# Layers in stacks.


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
    layer = with_random_weights(model.init(KEY, x))["params"]["Dense_0"]

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

    Model().init(KEY, random(3, 4))
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


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs, bias: bool = True) -> None:
        self.linear = nnx.Linear(width, 6, use_bias=bias, rngs=rngs)
        self.conv = nnx.Conv(2, 5, (3, 3), use_bias=bias, rngs=rngs)
        self.norm = nnx.LayerNorm(7, rngs=rngs)


def stacked_blocks(axis: int, size: int, *more: Any) -> nnx.Module:
    return stacked(lambda rngs: Block(4, rngs, *more), axis, size)


def stacked(make: Any, axis: int, size: int) -> nnx.Module:
    return nnx.split_rngs(splits=size)(nnx.vmap(make, in_axes=0, out_axes=axis))(nnx.Rngs(0))


@pytest.mark.parametrize(
    ("axis", "linear", "conv"), [(0, (1,), (1, 2, 3)), (1, (0,), (0, 2, 3)), (-1, (0,), (0, 1, 2))]
)
def test_stacked_nnx_layers_have_units_of_their_own(axis: int, linear: Any, conv: Any) -> None:
    axes = unit_axes(stacked_blocks(axis, 2))
    assert (axes["linear/kernel"], axes["conv/kernel"]) == (linear, conv)
    assert axes["norm/scale"] is axes["conv/bias"] is SKIP


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("axis", "size", "linear", "conv"),
    [(0, 4, (1,), (1, 2, 3)), (0, 3, (1,), (1, 2, 3)), (1, 3, (0,), (0, 2, 3)), (-1, 3, (0,), (0, 1, 2))],
)
def test_sizes_that_coincide_are_told_apart_by_what_is_stacked_beside(
    axis: int, size: int, linear: Any, conv: Any, bias: bool
) -> None:
    """Three layers whose windows are 3 by 3: what is not of this size shows the index of the stack."""
    axes = unit_axes(stacked_blocks(axis, size, bias))
    assert (axes["linear/kernel"], axes["conv/kernel"]) == (linear, conv)


def test_a_stack_that_cannot_be_told_is_named() -> None:
    model = stacked(lambda rngs: nnx.Linear(3, 3, rngs=rngs), 0, 3)
    with pytest.raises(ValueError, match=r"kernel of shape \(3, 3, 3\): .* itself of shape \(3, 3\)"):
        unit_axes(model)
    assert unit_axes(model, other={"kernel": 1}) == {"kernel": 1, "bias": SKIP}


# --------------------------------------------------------------------------------------------------
# What is not known, and what the answer is good for.


class Odd(nn.Module):
    """Parameters of its own, beside and below known layers."""

    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        assert isinstance(train, bool), "flags stay Python values"
        x = x @ self.param("w", nn.initializers.ones, (4, 4)) + self.param("shift", nn.initializers.ones, ())
        return Inner(name="inner")(nn.Dense(4)(x))


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        mixed = self.param("mixed", lambda _: {"a": jnp.ones((4, 4)), "b": jnp.ones(4)})
        return nn.ConvTranspose(3, 2, transpose_kernel=True, name="Dense_0")(x @ mixed["a"] + mixed["b"])


OWN = ["w", "shift", "inner/mixed/a", "inner/mixed/b"]


def test_unknown_parameters_are_all_named() -> None:
    with pytest.raises(ValueError, match="cannot be told") as caught:
        unit_axes(Odd(), KEY, random(2, 4), train=True)
    listed = [line.split(" of shape ")[0].strip() for line in str(caught.value).splitlines()[1:]]
    assert sorted(listed) == sorted(OWN)
    assert "w of shape (4, 4): 'w' of Odd" in str(caught.value)


OTHER = {"w": 1, "shift": SKIP, "mixed/*": clipjax.fan_in}


def test_other_serves_what_is_unknown_and_wins_over_what_is_known() -> None:
    axes = unit_axes(Odd(), KEY, random(2, 4), other=OTHER, train=True)
    assert axes == {
        "inner/mixed/a": clipjax.fan_in,
        "inner/mixed/b": clipjax.fan_in,
        "inner/Dense_0/kernel": (0, 2),
        "inner/Dense_0/bias": SKIP,
        "Dense_0/kernel": (0,),
        "Dense_0/bias": SKIP,
        "w": 1,
        "shift": SKIP,
    }
    axes = unit_axes(Odd(), KEY, random(2, 4), other=OTHER | {"inner/Dense_0/kernel": None}, train=True)
    assert axes["inner/Dense_0/kernel"] is None
    assert axes["Dense_0/kernel"] == (0,)
    with pytest.raises(ValueError, match="other: the pattern 'W' matches no leaf"):
        unit_axes(Odd(), KEY, random(2, 4), other=OTHER | {"W": 0}, train=True)
    with pytest.raises(TypeError, match="axes"):
        unit_axes(Odd(), KEY, random(2, 4), other={"w": "0"}, train=True)


def test_unknown_nnx_parameters_are_all_named() -> None:
    class Inner(nnx.Module):
        def __init__(self) -> None:
            self.parts = LIST([nnx.Param(jnp.ones((2, 3)))])
            self.pair = nnx.Param({"a": jnp.ones((2, 3)), "b": jnp.ones(3)})

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones((2, 3)))
            self.linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
            self.inner = Inner()

    with pytest.raises(ValueError, match="cannot be told") as caught:
        unit_axes(Model())
    listed = [line.split(" of shape ")[0].strip() for line in str(caught.value).splitlines()[1:]]
    assert sorted(listed) == ["inner/pair/a", "inner/pair/b", "inner/parts/0", "w"]
    axes = unit_axes(Model(), other={"w": 0, "parts/*": 1, "pair/*": SKIP})
    own = {"inner/parts/0": 1, "inner/pair/a": SKIP, "inner/pair/b": SKIP, "w": 0}
    assert axes == own | {"linear/kernel": (0,), "linear/bias": SKIP}
    projected = clipjax.max_norm(0.1, axes=axes)(nnx.state(Model()))
    np.testing.assert_allclose(exact_norm(projected["w"][...], 0), 0.1, rtol=1e-6)


@pytest.mark.parametrize("equation", ["...a,ab->...b", "ab,b...->a..."])
def test_an_einsum_that_is_not_understood_is_named(equation: str) -> None:
    layer = nn.Einsum((4, 3), equation, use_bias=False)
    if equation.endswith("b"):
        assert unit_axes(layer, KEY, random(2, 4)) == {"kernel": (0,)}
    else:
        with pytest.raises(ValueError, match="'kernel' of Einsum"):
            unit_axes(layer, KEY, random(2, 4))


def test_what_is_no_model() -> None:
    for model in (nn.Dense, {"kernel": jnp.ones((2, 3))}, lambda x: x):
        with pytest.raises(TypeError, match="must be a Flax module"):
            unit_axes(model, KEY, random(2, 4))
    with pytest.raises(TypeError, match="takes the arguments of its init"):
        unit_axes(nn.Dense(3))
    with pytest.raises(TypeError, match="no further arguments"):
        unit_axes(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), KEY)


class Model(nn.Module):
    """A layer of every kind that has something to tell, names that patterns would trip over among them."""

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x = nn.Embed(11, 8, name="embed")(ids)
        x = nn.MultiHeadDotProductAttention(2, name="attention")(x)
        x = nn.LayerNorm()(x)
        x = nn.Conv(6, 3, feature_group_count=2, name="conv[0]*")(x)
        x = nn.ConvTranspose(6, 2, transpose_kernel=True)(x)
        x = nn.Bidirectional(nn.RNN(nn.LSTMCell(4)), nn.RNN(nn.OptimizedLSTMCell(4)))(x)
        return nn.Dense(3)(x)


IDS = jax.ShapeDtypeStruct((2, 5), np.int32)


def norms_by_hand(params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The norm of each unit of `Model`, by its paths."""
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    found = {}
    for path, leaf in flat:
        name = jax.tree_util.keystr(path, simple=True, separator="/").removeprefix("params/")
        if name.endswith(("kernel", "embedding")):
            axis: Any = 0
            if name == "embed/embedding":
                axis = 1
            elif name == "attention/out/kernel" or name.startswith("conv["):
                axis = (0, 1)
            elif name.startswith("ConvTranspose"):
                axis = (0, 2)
            found[name] = exact_norm(leaf, axis)
    return found


@pytest.mark.parametrize("outer", [True, False], ids=["with-params", "without"])
def test_a_linen_model_with_and_without_the_outer_params(outer: bool) -> None:
    axes = unit_axes(Model(), KEY, IDS)
    variables = with_random_weights(Model().init(KEY, jnp.zeros((2, 5), np.int32)))
    params = variables if outer else variables["params"]
    projection = clipjax.max_norm(0.5, axes=axes)
    projected = projection(params)
    by_hand = norms_by_hand(params)
    assert len(by_hand) == 1 + 4 + 1 + 1 + 16 + 1
    for name, norms in norms_by_hand(projected).items():
        np.testing.assert_allclose(norms, np.minimum(by_hand[name], 0.5), rtol=1e-6)
        assert (norms <= 0.5).all()
    assert clipjax.verify(projected, projection) == []
    still = jax.tree.map(jnp.zeros_like, params)
    for tx in (projection, clipjax.clip_by_norm(0.5, axes=axes), clipjax.adaptive_grad_clip(axes=axes)):
        jax.eval_shape(tx.update, still, tx.init(params), params)


def test_a_linen_train_state() -> None:
    model = Model()
    params = with_random_weights(model.init(KEY, jnp.zeros((2, 5), np.int32)))["params"]
    axes = unit_axes(model, KEY, IDS)
    frozen = jax.tree_util.tree_map_with_path(lambda path, _: path[0].key == "embed", params)
    tx = optax.chain(
        optax.sgd(0.1), optax.masked(clipjax.max_norm(0.5, axes=axes), jax.tree.map(lambda x: not x, frozen))
    )
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, params))
    for name, norms in norms_by_hand(state.params).items():
        assert (norms <= 0.5).all() == (name != "embed/embedding")


def test_an_entry_can_be_changed() -> None:
    axes = {"attention/*": SKIP} | unit_axes(Model(), KEY, IDS)
    params = with_random_weights(Model().init(KEY, jnp.zeros((2, 5), np.int32)))["params"]
    projected = clipjax.max_norm(0.5, axes=axes)(params)
    assert same_bits(projected["attention"], params["attention"])
    assert not same_bits(projected["embed"], params["embed"])


class NNXModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.layers = LIST(
            [nnx.Linear(8, 6, rngs=rngs), nnx.BatchNorm(6, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)]
        )
        self.rnn = nnx.RNN(nnx.LSTMCell(6, 4, rngs=rngs))
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.head = nnx.LoRA(4, 2, 3, base_module=nnx.Linear(4, 3, rngs=rngs), rngs=rngs)
        self.tied = self.embed


def test_an_nnx_model_in_its_optimizer() -> None:
    model = NNXModel(nnx.Rngs(0))
    axes = unit_axes(model)
    assert axes["embed/embedding"] == (1,)
    assert axes["layers/0/kernel"] == axes["rnn/cell/hf/kernel"] == axes["head/base_module/kernel"] == (0,)
    assert axes["layers/1/scale"] is SKIP
    projection = clipjax.max_norm(0.1, axes=axes)
    optimizer = nnx.Optimizer(model, clipjax.chain(optax.adam(1e-3), projection), wrt=nnx.Param)
    gradients = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    optimizer.update(model, gradients)
    state = nnx.state(model, nnx.Param)
    assert clipjax.verify(state, projection) == []
    assert clipjax.verify(state, clipjax.max_norm(0.09, axes=axes))
    flat = {"/".join(map(str, k)): v[...] for k, v in nnx.to_flat_state(state)}
    np.testing.assert_allclose(exact_norm(flat["embed/embedding"], 1), 0.1, rtol=1e-6)
    np.testing.assert_allclose(exact_norm(flat["attention/out/kernel"], (0, 1)), 0.1, rtol=1e-6)


def test_wrt_chooses_the_parameters() -> None:
    model = NNXModel(nnx.Rngs(0))
    axes = unit_axes(model, wrt=nnx.LoRAParam)
    assert set(axes) == {"head/lora_a", "head/lora_b"}
    state = nnx.state(model, nnx.LoRAParam)
    clipjax.max_norm(0.1, axes=axes)(state)


def test_nothing_is_computed_and_flags_may_be_keywords() -> None:
    class Huge(nn.Module):
        @nn.compact
        def __call__(self, x: Any, *, wide: bool) -> Any:
            return nn.Dense(10**6 if wide else 3)(nn.Dense(10**6)(x))

    x = jax.ShapeDtypeStruct((1, 10), np.float32)
    axes = unit_axes(Huge(), KEY, x, wide=True)  # 4 TB of weights
    assert axes["Dense_1/kernel"] == (0,)


def test_modules_that_share_a_scope() -> None:
    class Outer(nn.Module):
        def setup(self) -> None:
            self.inner = nn.Dense(3)
            nn.share_scope(self, self.inner)

        def __call__(self, x: Any) -> Any:
            return self.inner(x)

    assert unit_axes(Outer(), KEY, random(2, 4)) == {"kernel": (0,), "bias": SKIP}


def test_other_methods_and_collections() -> None:
    class TwoWays(nn.Module):
        def setup(self) -> None:
            self.layer, self.norm = nn.Dense(3), nn.BatchNorm(use_running_average=False)

        def embed(self, x: Any) -> Any:
            return self.norm(self.layer(x))

    axes = unit_axes(TwoWays(), {"params": KEY, "dropout": KEY}, random(2, 4), method=TwoWays.embed)
    assert set(axes) == {"layer/kernel", "layer/bias", "norm/scale", "norm/bias"}
