"""Every member compiles for each platform, in float32 and bfloat16, alone and inside `shard_map`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import clipjax
from benchmarks.platforms import PLATFORMS, compile_for, missing, topology
from tests.support import walk
from tests.support.platforms import AXIS, DTYPES, MEMBERS, NO_PROGRAM, Part, parts, shapes_of, specs_of

MARKS = {"tpu": pytest.mark.tpu_compile, "cuda": pytest.mark.gpu_compile}
SEVERAL = {"tpu": "2x2", "cuda": "1x1x2"}  # the topologies of more than one device


def each_platform(*, with_every_change: str) -> pytest.MarkDecorator:
    """For each platform: for one of the TPUs, which share a compiler, with every change, else where asked."""

    def marks(name: str) -> list[pytest.MarkDecorator]:
        often = PLATFORMS[name].compiler == "cuda" or name == with_every_change
        return [MARKS[PLATFORMS[name].compiler], *(() if often else (pytest.mark.full,))]

    names = ("v5e", "v6e", "h100", "a100", "t4")
    return pytest.mark.parametrize("platform", [pytest.param(name, marks=marks(name)) for name in names])


each_member = pytest.mark.parametrize("name", MEMBERS)


def test_every_public_function_is_compiled() -> None:
    public = {*walk.public_callables(), *(f"functional.{name}" for name in clipjax.functional.__all__)}
    assert public == {*MEMBERS, *NO_PROGRAM}


def compiles(platform: str, programs: dict[str, tuple[Any, Any]]) -> None:
    """Compile all programs as one; only if that fails, one by one, to say which."""
    if reason := missing(platform):
        pytest.skip(reason)

    def together(arguments: dict[str, Any]) -> Any:
        return {key: programs[key][0](*values) for key, values in arguments.items()}

    try:
        compile_for(platform, together, {key: arguments for key, (_, arguments) in programs.items()})
    except Exception:
        failed = {}
        for key, (function, arguments) in programs.items():
            try:
                compile_for(platform, function, *arguments)
            except Exception as error:
                failed[key] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if not failed:
            raise  # only together
        shown = "\n".join(f"{key}: {error}" for key, error in failed.items())
        message = f"{len(failed)} of {len(programs)} do not compile:\n{shown}"
    else:
        return
    pytest.fail(message, pytrace=False)


@each_platform(with_every_change="v5e")
@each_member
def test_compiles_alone(name: str, platform: str) -> None:
    found = {}
    for label, part in parts(name).items():
        for kind, dtype in DTYPES.items():
            tree = shapes_of(name, dtype)
            found[f"{label}, {kind}"] = part.run, (jax.eval_shape(part.init, tree), tree, tree)
    compiles(platform, found)


def mapped(part: Part, specs: Any, mesh: Mesh, tree: Any) -> tuple[Any, Any]:
    """A part inside `shard_map`, and its arguments."""

    def placed(x: Any, spec: P) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.eval_shape(part.init, tree)
    spread = jax.tree.map(placed, tree, specs)
    ins, outs = (P(), specs, specs), (dict.fromkeys(part.trees, specs), P())
    run = jax.shard_map(part.run, mesh=mesh, in_specs=ins, out_specs=outs)
    return run, (jax.tree.map(lambda x: placed(x, P()), state), spread, spread)


@each_platform(with_every_change="v6e")
@each_member
def test_compiles_inside_shard_map(name: str, platform: str) -> None:
    if reason := missing(platform):
        pytest.skip(reason)
    devices = topology(platform, SEVERAL[PLATFORMS[platform].compiler])
    mesh, specs = Mesh(np.array(devices), (AXIS,)), specs_of(name)
    found = {}
    for label, part in parts(name, specs).items():
        for kind, dtype in DTYPES.items():
            found[f"{label}, {kind}"] = mapped(part, specs, mesh, shapes_of(name, dtype))
    compiles(platform, found)
