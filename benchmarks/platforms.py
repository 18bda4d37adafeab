"""Compiling for TPUs and GPUs that are not here: XLA's compilers are wheels."""

import importlib.util
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks import programs
from benchmarks.steps import Recipe, WholeStep

# What libtpu and the CUDA plugin read when they are loaded, so that neither looks for a
# device.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}


class Platform(NamedTuple):
    """What a program can be compiled for."""

    label: str
    compiler: str  # JAX's name for it
    wheel: str  # the module that brings the compiler
    shape: str  # the smallest topology


# A GPU is described by a text in `targets`.
PLATFORMS = {
    "v5e": Platform("TPU v5e", "tpu", "libtpu", "2x2"),
    "v6e": Platform("TPU v6e", "tpu", "libtpu", "2x2"),
    "v5p": Platform("TPU v5p", "tpu", "libtpu", "2x2x1"),
    "tpu7x": Platform("TPU7x", "tpu", "libtpu", "2x2x1"),
    "b200": Platform("B200", "cuda", "jax_cuda12_plugin", "1x1x1"),
    "h100": Platform("H100", "cuda", "jax_cuda12_plugin", "1x1x1"),
    "a100": Platform("A100", "cuda", "jax_cuda12_plugin", "1x1x1"),
    "t4": Platform("T4", "cuda", "jax_cuda12_plugin", "1x1x1"),
}


def missing(platform: str) -> str:
    """Return why nothing can be compiled for a platform, or ""."""
    wheel = PLATFORMS[platform].wheel
    found = importlib.util.find_spec(wheel)
    return "" if found else f"{wheel} is not installed: pip install -e '.[platforms]'"


def devices_of(platform: str, shape: str = "") -> Sequence[Any]:
    """Return the devices of a topology such as "16x16", on which nothing can run."""
    from jax.experimental import topologies
    from jax.experimental.compilation_cache import compilation_cache

    if reason := missing(platform):
        raise SystemExit(reason)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # JAX can store such a program in its persistent cache, but not load it again. It
    # asks once whether there is a cache.
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    kind = PLATFORMS[platform]
    shape = shape or kind.shape
    if kind.compiler == "tpu":
        return topologies.get_topology_desc(f"{platform}:{shape}", "tpu").devices
    target = (Path(__file__).parent / "targets" / f"{platform}.txtpb").read_text()
    return topologies.get_topology_desc(
        "", "cuda", target_config=target, topology=shape
    ).devices


class Cost(NamedTuple):
    """What a compiled step takes, on each device."""

    bytes: float  # that its kernels read from memory and write to it
    operations: float  # the compiler's figure, for a TPU
    kernels: int
    temporaries: int  # bytes
    compile_seconds: float  # of the processor
    collectives: dict[str, int]


def compile_step(
    platform: str, recipe: Recipe | WholeStep, params: Any, inputs: Any = None
) -> Cost:
    """Trace, lower and compile a donated step.

    Args:
      platform: one of `PLATFORMS`.
      recipe: the step.
      params: a dict of `jax.ShapeDtypeStruct` with shardings; the state is sharded as
        they are.
      inputs: what the step gets besides; None: gradients like the parameters.
    """
    anywhere = next(iter(params.values())).sharding
    scalar = anywhere
    if isinstance(anywhere, jax.sharding.NamedSharding):
        scalar = jax.sharding.NamedSharding(anywhere.mesh, jax.sharding.PartitionSpec())

    def placed(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        like = params.get(getattr(path[-1], "key", None)) if path else None
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=like.sharding if like is not None else scalar
        )

    state = jax.tree_util.tree_map_with_path(
        placed, jax.eval_shape(recipe.init, params)
    )
    outs = jax.tree.map(lambda x: x.sharding, (params, state))
    jax.clear_caches()
    begin = time.process_time()  # of all threads: what else runs hardly changes it
    step = jax.jit(
        lambda *args: recipe.step(*args), donate_argnums=(0, 1), out_shardings=outs
    )
    lowered = step.trace(params, state, params if inputs is None else inputs).lower(
        lowering_platforms=(PLATFORMS[platform].compiler,)
    )
    compiled = lowered.compile()
    seconds = time.process_time() - begin
    program = programs.parse(compiled.as_text())
    kernels, moved = programs.work(program)
    costs = compiled.cost_analysis() or {}
    return Cost(
        moved,
        costs.get("flops", 0),
        kernels,
        compiled.memory_analysis().temp_size_in_bytes,
        seconds,
        programs.collectives(program),
    )
