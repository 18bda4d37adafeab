"""A train step on many devices, compiled: which collectives it has, and what each device needs.

The parameters are a transformer's, whose matrices are split over both axes of a mesh, as data and tensor
parallelism do together. Biases and scales are on all devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import clipjax
from benchmarks import platforms, programs, trees
from benchmarks.steps import Recipe, adam, chain, clip_each_leaf, naive_link, naive_max_norm

# By platform: its topology, and the shape of the mesh (data, model).
MESHES = {
    "cpu": ("", (4, 2)),
    "h100": ("1x1x8", (4, 2)),
    "v5e": ("16x16", (16, 16)),
    "v5p": ("16x16x16", (64, 64)),
}
RADIUS = 0.5
# What each device of these meshes has of a leaf: matrices whose rows go over "model" follow the others.
_ROWS_OVER_MODEL = ("out", "down/kernel")


class Pair(NamedTuple):
    """A step of ours, what it is compared with, and how many all-reduces more it may have."""

    ours: Recipe
    theirs: Recipe
    more: int


def _clip(ours: optax.GradientTransformation, theirs: optax.GradientTransformation) -> Pair:
    return Pair(chain(ours, adam()), chain(theirs, adam()), 0)


_GLOBAL, _LEAF = optax.clip_by_global_norm(1.0), clip_each_leaf(1.0)
_CALLED = Recipe(adam(), lambda params: naive_max_norm(params, RADIUS))
_LINK = chain(adam(), naive_link(RADIUS))
_PROJECTIONS = {
    "max_norm": clipjax.max_norm(RADIUS),
    "min_max_norm": clipjax.min_max_norm(RADIUS, 1.0),
    "unit_norm": clipjax.unit_norm(),
}
_BOUNDED = clipjax.bounded(
    adam(), clip=clipjax.clip_by_global_norm(1.0), project=_PROJECTIONS["max_norm"], nonfinite="skip"
)

STEPS: dict[str, Pair] = {
    "clip_by_global_norm": _clip(clipjax.clip_by_global_norm(1.0), _GLOBAL),
    "clip_by_norm": _clip(clipjax.clip_by_norm(1.0), _LEAF),
    "clip_by_rms": _clip(clipjax.clip_by_rms(1.0), optax.clip_by_block_rms(1.0)),
    "autoclip": _clip(clipjax.autoclip(), _GLOBAL),
    "zclip": _clip(clipjax.zclip(), _GLOBAL),
    "clip_by_quantile": _clip(clipjax.clip_by_quantile(), _GLOBAL),
    "clip_by_lognormal": _clip(clipjax.clip_by_lognormal(), _GLOBAL),
    "adagc": _clip(clipjax.adagc(), _LEAF),
    **{f"{name}, called": Pair(Recipe(adam(), p), _CALLED, 2) for name, p in _PROJECTIONS.items()},
    **{
        f"{name}, last link": Pair(Recipe(clipjax.chain(adam(), p)), _LINK, 2)
        for name, p in _PROJECTIONS.items()
    },
    "adaptive_grad_clip": Pair(
        chain(clipjax.adaptive_grad_clip(0.01), adam()), chain(optax.adaptive_grad_clip(0.01), adam()), 2
    ),
    # The sum of both: of the clip as Optax has it, and of the projection.
    "bounded, skip": Pair(Recipe(_BOUNDED), chain(_GLOBAL, adam(), naive_link(RADIUS)), 2),
}


class Compiled(NamedTuple):
    """What a compiled step needs, on each device."""

    collectives: dict[str, int]
    collective_bytes: float
    temporaries: int  # bytes
    arguments: int  # bytes: parameters, state and gradients
    work: programs.Work  # where each condition takes its cheaper branch

    @property
    def all_reduces(self) -> int:
        """How often all devices wait for a sum or a maximum."""
        return self.collectives.get("all-reduce", 0)

    @property
    def others(self) -> int:
        """How often anything is gathered or sent elsewhere."""
        return sum(self.collectives.values()) - self.all_reduces


def mesh_of(
    platform: str,
    shape: Sequence[int] | None = None,
    topology: str = "",
    axes: AxisType = AxisType.Auto,
) -> Mesh:
    """The mesh of a platform, whose devices need not be here, or the first devices of another topology."""
    known, usual = MESHES[platform]
    topology = topology or known
    devices = jax.devices() if platform == "cpu" else platforms.topology(platform, topology)
    shape = tuple(shape or usual)
    return Mesh(
        np.array(devices[: int(np.prod(shape))]).reshape(shape), ("data", "model"), axis_types=(axes, axes)
    )


def transformer(mesh: Mesh, layers: int = 6, width: int = 512, words: int = 4096) -> dict[str, Any]:
    """The parameters, 74 leaves in six layers, without values."""
    shapes = {**trees.transformer(layers, width), "embedding": (words, width), "head": (width, words)}

    def spec(name: str, shape: tuple[int, ...]) -> P:
        if len(shape) < 2:
            return P()
        return P("model", "data") if name.endswith(_ROWS_OVER_MODEL) else P("data", "model")

    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec(name, shape)))
        for name, shape in shapes.items()
    }


def compile_step(platform: str, recipe: Recipe, params: dict[str, Any]) -> Compiled:
    """Compile a donated step whose state is split as its parameters are."""
    mesh = next(iter(params.values())).sharding.mesh

    def placed(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        name = getattr(path[-1], "key", None) if path else None
        like = params.get(name) if isinstance(name, str) else None
        sharding = NamedSharding(mesh, P()) if like is None else like.sharding
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    state = jax.tree_util.tree_map_with_path(placed, jax.eval_shape(recipe.tx.init, params))
    outs = jax.tree.map(lambda x: x.sharding, (params, state))
    traced = jax.jit(recipe.step, donate_argnums=(0, 1), out_shardings=outs).trace(params, state, params)
    compiler = "cpu" if platform == "cpu" else platforms.PLATFORMS[platform].compiler
    with platforms.without_cache():
        compiled = traced.lower(lowering_platforms=(compiler,)).compile()
    memory, program = compiled.memory_analysis(), programs.parse(compiled.as_text())
    return Compiled(
        programs.collectives(program),
        programs.collective_bytes(program),
        memory.temp_size_in_bytes,
        memory.argument_size_in_bytes,
        programs.work(program, min),
    )


def local_bytes(params: dict[str, Any]) -> int:
    """The bytes of the parameters that a device has."""
    return sum(4 * int(np.prod(x.sharding.shard_shape(x.shape))) for x in params.values())
