"""The axes of Flax models: a unit is what one output depends on."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from clipjax import SKIP

pytest.importorskip("flax")
import flax.linen as nn
from flax import nnx

from clipjax.flax import unit_axes

KEY = jax.random.key(0)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def weights(shapes: Any) -> Any:
    leaves, treedef = jax.tree.flatten(shapes)
    return treedef.unflatten(
        [random(*leaf.shape, seed=i) for i, leaf in enumerate(leaves)]
    )


# A layer, the shape of its input, and the axes of its kernel.
KERNELS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    "Dense": (nn.Dense(3), (2, 4), (0,)),
    "DenseGeneral": (nn.DenseGeneral((2, 3), axis=(-2, -1)), (2, 3, 4), (0, 1)),
    "DenseGeneral, batches": (
        nn.DenseGeneral(3, axis=-1, batch_dims=(0,)),
        (2, 3, 4),
        (1,),
    ),
    "Conv": (nn.Conv(6, (2, 3), feature_group_count=2), (1, 5, 5, 4), (0, 1, 2)),
    "ConvLocal": (nn.ConvLocal(2, (2, 2), padding="VALID"), (1, 3, 3, 2), (2,)),
    "ConvTranspose": (nn.ConvTranspose(3, 2, transpose_kernel=True), (1, 4, 2), (0, 2)),
    "Einsum": (nn.Einsum((3, 4, 2), "bld, ldh -> blh"), (2, 3, 4), (1,)),
}


def test_a_unit_is_what_one_output_depends_on() -> None:
    def jacobian(name: str, params: Any) -> Any:
        layer, shape, _ = KERNELS[name]
        return jax.jacobian(
            lambda k: layer.apply({"params": params | {"kernel": k}}, random(*shape))
        )(params["kernel"])

    made = {
        n: weights(jax.eval_shape(layer.init, KEY, random(*x)))
        for n, (layer, x, _) in KERNELS.items()
    }
    jacobians = jax.jit(
        lambda made: {
            name: jacobian(name, each["params"]) for name, each in made.items()
        }
    )(made)
    for name, (layer, shape, expected) in KERNELS.items():
        assert unit_axes(layer, KEY, random(*shape)) == {
            "kernel": expected,
            "bias": SKIP,
        }, name
        sizes = made[name]["params"]["kernel"].shape
        kept = [1 if axis in expected else size for axis, size in enumerate(sizes)]
        unit = np.broadcast_to(np.arange(np.prod(kept)).reshape(kept), sizes).ravel()
        depends = np.asarray(jacobians[name] != 0).reshape(-1, unit.size)
        np.testing.assert_array_equal(
            depends.T @ depends, unit[:, None] == unit, err_msg=name
        )


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        return nn.Dense(4)(x), None


def scanned(axis: int, size: int, module: Any = Block) -> Any:
    return nn.scan(
        module, variable_axes={"params": axis}, split_rngs={"params": True}, length=size
    )


class Model(nn.Module):
    @nn.compact
    def __call__(self, ids: Any, *, train: bool) -> Any:
        assert isinstance(train, bool)
        x = nn.Embed(11, 4, name="embed")(ids)
        x = nn.PReLU()(nn.MultiHeadDotProductAttention(2, name="attention")(x))
        x = nn.Conv(4, 3, feature_group_count=2, name="conv[0]*")(
            nn.LayerNorm()(nn.GroupNorm(2)(x))
        )
        x = nn.ConvTranspose(4, 2, transpose_kernel=True, name="up")(x)
        x = nn.Bidirectional(nn.RNN(nn.LSTMCell(4)), nn.RNN(nn.OptimizedLSTMCell(4)))(x)
        x, _ = scanned(0, 3)(name="stack")(
            nn.WeightNorm(nn.Dense(4, name="in"))(x), None
        )
        return x @ self.param(
            "w", nn.with_partitioning(nn.initializers.ones, (None, None)), (4, 3)
        )


def check_projected(
    before: Any, after: Any, bound: float, reduced: dict[str, Any]
) -> int:
    """Compare norms in float64, along `reduced` by the start of a path, else along axis
    0; count the kernels.
    """
    count = 0
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True
    ):
        name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix(
            "/value"
        )
        if name.endswith(("bias", "scale", "slope")) or "/scales/" in name:
            np.testing.assert_array_equal(new, old, err_msg=name)
            continue
        axis = next(
            (axis for start, axis in reduced.items() if name.startswith(start)), 0
        )
        norms = [
            np.sqrt(np.square(np.asarray(x, np.float64)).sum(axis)) for x in (new, old)
        ]
        np.testing.assert_allclose(
            norms[0], np.minimum(norms[1], bound), rtol=3e-6, err_msg=name
        )
        count += 1
    return count


def test_a_linen_model_in_a_projection() -> None:
    ids = jax.ShapeDtypeStruct((2, 5), np.int32)
    projection = clipjax.max_norm(
        0.5, axes=unit_axes(Model(), KEY, ids, train=True, other={"w": 1})
    )
    params = weights(
        jax.eval_shape(
            lambda key: Model().init(key, np.zeros((2, 5), np.int32), train=True), KEY
        )
    )
    without, within = jax.jit(
        lambda tree: (projection.apply(tree["params"]), projection.apply(tree))
    )(params)
    reduced = {
        "embed/": 1,
        "attention/out/": (0, 1),
        "conv[": (0, 1),
        "up/": (0, 2),
        "stack/": 1,
        "w": 1,
    }
    for after in (without, within["params"]):
        assert (
            check_projected(params["params"], after, 0.5, reduced)
            == 1 + 4 + 1 + 1 + 16 + 2 + 1
        )


def test_a_short_path_does_not_match_the_end_of_a_long_one() -> None:
    class Shared(nn.Module):
        def setup(self) -> None:
            self.inner = nn.Dense(3)
            self.up = nn.ConvTranspose(3, 2, transpose_kernel=True)
            nn.share_scope(self, self.inner)

        def __call__(self, x: Any) -> Any:
            return self.up(self.inner(x))

    axes = unit_axes(Shared(), KEY, random(2, 4, 4))
    assert [*axes.items()] == [
        ("up/bias", SKIP),
        ("up/kernel", (0, 2)),
        ("bias", SKIP),
        ("kernel", (0,)),
    ]


def test_nothing_is_computed() -> None:
    model = nn.Sequential([nn.Dense(10**6), nn.Dense(10**6)])  # 4 TB of weights
    axes = unit_axes(model, {"params": KEY}, jax.ShapeDtypeStruct((1, 10), np.float32))
    assert axes["layers_1/kernel"] == (0,)
    axes = unit_axes(
        model, KEY, random(1, 10), method=lambda model, x: model.layers[0](x)
    )
    assert axes == {"layers_0/kernel": (0,), "layers_0/bias": SKIP}


def test_stacks_of_linen_layers() -> None:
    x, kernel = random(3, 4), "Dense_0/kernel"
    options = {
        "variable_axes": {"params": 0},
        "split_rngs": {"params": True},
        "in_axes": None,
        "axis_size": 3,
    }
    assert unit_axes(nn.vmap(scanned(0, 2), **options)(), KEY, x)[kernel] == (2,)
    assert unit_axes(nn.vmap(nn.Conv, **options)(3, 2), KEY, x) == {
        "kernel": (1, 2),
        "bias": SKIP,
    }
    jitted = nn.jit(scanned(0, 2, nn.remat(Block)))
    for _ in range(2):  # JAX traces what is under nn.jit once only
        assert unit_axes(jitted(), KEY, x)[kernel] == (1,)
    assert unit_axes(scanned(1, 2)(), KEY, x)[kernel] == (0,)
    for axis in (0, 1):  # as many layers as inputs
        with pytest.raises(
            ValueError,
            match=r"'kernel' of Dense, itself of shape \(4, 4\): which axes "
            "are a stack",
        ):
            unit_axes(scanned(axis, 4)(), KEY, x)
    assert unit_axes(scanned(1, 4)(), KEY, x, other={"*kernel": 0})[kernel] == 0


class NNXModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(11, 4, rngs=rngs)
        self.tied = self.embed
        self.layers = nnx.List(
            [nnx.Linear(4, 3, rngs=rngs), nnx.BatchNorm(4, rngs=rngs), nnx.PReLU()]
        )
        self.dict = nnx.Dict(
            items=nnx.WeightNorm(nnx.Linear(4, 3, rngs=rngs), rngs=rngs)
        )
        self.general = nnx.LinearGeneral(4, (3, 2), batch_axis={0: 2}, rngs=rngs)
        self.conv = nnx.Conv(4, 6, (2, 3), feature_group_count=2, rngs=rngs)
        self.up = nnx.Sequential(
            nnx.ConvTranspose(4, 3, 2, transpose_kernel=True, rngs=rngs), nnx.relu
        )
        self.einsum = nnx.Einsum("abc,cde->abde", (4, 2, 3), (2, 3), rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=rngs)
        self.rnn = nnx.RNN(nnx.LSTMCell(4, 4, rngs=rngs))
        self.gru = nnx.GRUCell(5, 4, rngs=rngs)
        self.head = nnx.LoRA(
            4, 2, 3, base_module=nnx.Linear(4, 3, rngs=rngs), rngs=rngs
        )
        self.stack = nnx.split_rngs(splits=3)(
            nnx.vmap(lambda r: nnx.Linear(4, 5, rngs=r))
        )(rngs)
        self.w = nnx.List([nnx.Param(jnp.ones((2, 3)))])


def test_an_nnx_model_in_a_projection() -> None:
    model = nnx.eval_shape(lambda: NNXModel(nnx.Rngs(0)))
    projection = clipjax.max_norm(0.3, axes=unit_axes(model, other={"w/*": 0}))
    params = weights(nnx.state(model, nnx.Param))
    # What nnx.Optimizer updates.
    jax.eval_shape(projection.apply, nnx.to_pure_dict(params))
    reduced = {
        "embed": 1,
        "general": 1,
        "conv": (0, 1, 2),
        "up": (0, 2),
        "attention/out": (0, 1),
        "stack": 1,
    }
    after = jax.jit(projection.apply)(params)
    assert check_projected(params, after, 0.3, reduced) == 7 + 4 + 8 + 2 + 3 + 1 + 1
    assert unit_axes(model, wrt=nnx.LoRAParam) == {
        "head/lora_a": (0,),
        "head/lora_b": (0,),
    }
    with pytest.raises(
        ValueError, match=r"w/0 of shape \(2, 3\): '0' of List, which is not known"
    ):
        unit_axes(model)
    model.head.in_features = 3
    with pytest.raises(
        ValueError, match=r"head/lora_a.*of LoRA, itself of shape \(3, 2\): which axes"
    ):
        unit_axes(model, wrt=nnx.LoRAParam)
    for count, axis in ((2, 1), (4, 1), (4, 0)):
        stacked = nnx.split_rngs(splits=count)(
            nnx.vmap(lambda r: nnx.Linear(4, 5, rngs=r), out_axes=axis)
        )
        stack = nnx.eval_shape(stacked, nnx.Rngs(0))
        if count == 2:
            assert unit_axes(stack)["kernel"] == (0,)
        else:
            with pytest.raises(
                ValueError,
                match=r"of shape \(4, 4, 5\).*itself of shape \(4, 5\): which axes "
                "are a",
            ):
                unit_axes(stack)


def test_unknown_parameters_are_all_listed() -> None:
    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            parts = self.param(
                "parts", lambda _: {"a": jnp.ones((4, 4)), "kernel": jnp.ones(4)}
            )
            x = x * self.param("temperature", lambda _: jnp.ones(()))
            return nn.Einsum((4, 3), "ab,b...->a...", name="e")(
                nn.Dense(4)(x @ parts["a"])
            )

    with pytest.raises(
        ValueError, match="which weights of these parameters form an output unit"
    ) as caught:
        unit_axes(Odd(), KEY, random(3, 4))
    listed = [
        line.split(" of shape ")[0].strip()
        for line in str(caught.value).splitlines()[1:]
    ]
    assert listed == ["e/kernel", "parts/a", "parts/kernel"]
    axes = unit_axes(
        Odd(),
        KEY,
        random(3, 4),
        other={"e/*": 1, "parts/*": SKIP, "Dense_0/kernel": None},
    )
    assert axes["temperature"] is SKIP
    assert (axes["e/kernel"], axes["parts/a"], axes["Dense_0/kernel"]) == (
        1,
        SKIP,
        None,
    )


def test_wrong_calls() -> None:
    for model in (nn.Dense, nnx.Linear, {"kernel": random(2, 3)}, lambda x: x):
        with pytest.raises(TypeError, match="must be a Flax module"):
            unit_axes(model, KEY, random(2, 4))
    with pytest.raises(
        ValueError, match="no parameters, or none that a filter such as wrt="
    ):
        unit_axes(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), wrt=nnx.BatchStat)
    with pytest.raises(TypeError, match="no further arguments"):
        unit_axes(nnx.PReLU(), KEY)
