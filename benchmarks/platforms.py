"""Compile for a TPU or a GPU on a machine that has none, and read what the compiler says of the program.

XLA's compilers for both come as wheels and need no device:

    pip install -e '.[platforms]'

They belong in an environment of their own: JAX would look for the devices in every other program, too, unless
`JAX_PLATFORMS=cpu` is set.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

from benchmarks import programs

# What libtpu and the CUDA plugin read when they are loaded, so that neither looks for a device.
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
    compiler: str  # the name of JAX for it
    wheel: str  # the module that brings the compiler
    shape: str  # the smallest topology


# A GPU is described by a text of `targets`.
PLATFORMS = {
    "v5e": Platform("TPU v5e", "tpu", "libtpu", "2x2"),
    "v6e": Platform("TPU v6e", "tpu", "libtpu", "2x2"),
    "v5p": Platform("TPU v5p", "tpu", "libtpu", "2x2x1"),
    "h100": Platform("H100", "cuda", "jax_cuda12_plugin", "1x1x1"),
    "a100": Platform("A100", "cuda", "jax_cuda12_plugin", "1x1x1"),
    "t4": Platform("T4", "cuda", "jax_cuda12_plugin", "1x1x1"),
}


class Cost(NamedTuple):
    """What a compiled program takes."""

    bytes: float  # read and written: the compiler's figure for a TPU, the operands of all kernels for a GPU
    operations: float  # arithmetic ones: the compiler's figure for a TPU, read in the program for a GPU
    usual: programs.Work  # read in the program, where each condition takes its cheaper branch
    most: programs.Work  # the same, where it takes the dearer one
    kernels: int
    copies: int  # of whole leaves
    collectives: dict[str, int]
    temporaries: int  # bytes
    arguments: int  # bytes
    compile_seconds: float  # processor time of tracing, lowering and compiling
    text: str  # the program


def missing(platform: str) -> str:
    """Why nothing can be compiled for a platform, or ""."""
    wheel = PLATFORMS[platform].wheel
    found = importlib.util.find_spec(wheel)
    return "" if found else f"{wheel} is not installed: pip install -e '.[platforms]'"


def topology(platform: str, shape: str | None = None) -> Sequence[Any]:
    """The devices of a topology, to put into shardings: nothing can run on them.

    Args:
      platform: one of `PLATFORMS`.
      shape: for a TPU like "2x2" (v5e, v6e) or "2x2x1" (v5p), for a GPU like "1x1x8".
    """
    if reason := missing(platform):
        raise RuntimeError(reason)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    kind = PLATFORMS[platform]
    if kind.compiler == "tpu":
        described = topologies.get_topology_desc(f"{platform}:{shape or kind.shape}", "tpu")
    else:
        target = (Path(__file__).parent / "targets" / f"{platform}.txtpb").read_text()
        described = topologies.get_topology_desc(
            "", "cuda", target_config=target, topology=shape or kind.shape
        )
    devices: Sequence[Any] = described.devices
    return devices


@contextmanager
def without_cache() -> Iterator[None]:
    """JAX can store such a program in its persistent cache, but not load it again."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def compile_for(
    platform: str, function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()
) -> Cost:
    """Compile a function for one device of a platform, or for the devices that its arguments are on.

    Args:
      platform: one of `PLATFORMS`.
      function: what `jax.jit` takes.
      *args: trees of arrays or `jax.ShapeDtypeStruct`; those of the latter that have a sharding keep it.
      donate: which of them are donated.
    """
    alone = SingleDeviceSharding(topology(platform)[0])

    def described(x: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None) if isinstance(x, jax.ShapeDtypeStruct) else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or alone)

    shapes = jax.tree.map(described, args)
    compiler = PLATFORMS[platform].compiler
    with without_cache():
        begin = time.process_time()  # of all threads: a busy machine does not change it much
        # A new function object: nothing that JAX keeps for a function is found again.
        jitted = jax.jit(lambda *args: function(*args), donate_argnums=donate)
        compiled = jitted.trace(*shapes).lower(lowering_platforms=(compiler,)).compile()
        seconds = time.process_time() - begin
    return _cost(compiled, shapes, seconds)


def _cost(compiled: Any, shapes: Any, seconds: float) -> Cost:
    memory, text = compiled.memory_analysis(), compiled.as_text()
    program = programs.parse(text)
    usual, most = (programs.work(program, pick) for pick in (min, max))
    told = compiled.cost_analysis() or {"bytes accessed": most.bytes, "flops": most.operations}
    matrices = [x.size for x in jax.tree.leaves(shapes) if len(x.shape) > 1]
    return Cost(
        bytes=told["bytes accessed"],
        operations=told["flops"],
        usual=usual,
        most=most,
        kernels=most.kernels,
        copies=programs.copies(program, at_least=min(matrices, default=1)),
        collectives=programs.collectives(program),
        temporaries=memory.temp_size_in_bytes,
        arguments=memory.argument_size_in_bytes,
        compile_seconds=seconds,
        text=text,
    )
