"""Steps as compiled for devices that are not here: costs, and collectives."""

import functools

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from benchmarks.platforms import PLATFORMS, compile_step, devices_of
from benchmarks.steps import Recipe, Step, adam
from benchmarks.tables import Figure, Row
from benchmarks.trees import shapes_of

# By platform: the topology, and the shape of the mesh (data, model).
MESHES = {
    "v5e": ("16x16", (16, 16)),
    "v5p": ("16x16x16", (64, 64)),
    "h100": ("1x1x8", (4, 2)),
}


def _ratio(ours: float, theirs: float, goal: float | None = None) -> Figure:
    return Figure(ours / theirs if theirs else float(ours == theirs), goal)


@functools.cache
def _start_compiler(platform: str, device: SingleDeviceSharding) -> None:
    """Compile something small, since the first program takes longer."""
    compile_step(
        platform, Recipe(adam()), shapes_of("quick", "float32", lambda *_: device)
    )


def compare(step: Step, platform: str, tree: str, dtype: str) -> Row:
    """Compile both versions of a step for one device."""
    device = SingleDeviceSharding(devices_of(platform)[0])
    params = shapes_of(tree, dtype, lambda *_: device)
    _start_compiler(platform, device)
    ours, theirs = (
        compile_step(platform, recipe, params) for recipe in (step.ours, step.theirs)
    )
    kind, goals = PLATFORMS[platform], step.goals
    on_tpu = kind.compiler == "tpu"
    cells: dict[str, Figure | str] = {
        "bytes": _ratio(ours.bytes, theirs.bytes, goals.bytes if on_tpu else None),
        "operations": _ratio(ours.operations, theirs.operations, goals.operations)
        if on_tpu
        else "",
        "kernels": ""
        if on_tpu
        else _ratio(ours.kernels, theirs.kernels, goals.kernels),
        "number": "" if on_tpu else f"{ours.kernels} / {theirs.kernels}",
        "compile time": _ratio(
            ours.compile_seconds, theirs.compile_seconds, goals.compile
        ),
        "CPU s": f"{ours.compile_seconds:.2g} / {theirs.compile_seconds:.2g}",
        "scratch MB": f"{ours.temporaries / 1e6:.1f} / {theirs.temporaries / 1e6:.1f}",
    }
    return Row((step.label, step.peer, kind.label, tree, dtype), cells)


def mesh_of(platform: str) -> Mesh:
    """Return the mesh of many devices that stands for a platform."""
    topology, shape = MESHES[platform]
    return Mesh(
        np.array(devices_of(platform, topology)).reshape(shape), ("data", "model")
    )


def collectives_of(recipe: Recipe, platform: str, tree: str) -> dict[str, int]:
    """Return the collectives of a step; matrices are split over both axes of a mesh."""
    mesh = mesh_of(platform)

    def place(name: str, shape: tuple[int, ...]) -> NamedSharding:
        spec = PartitionSpec() if len(shape) < 2 else PartitionSpec("data", "model")
        if name.endswith(("out", "down")):
            spec = PartitionSpec("model", "data")
        return NamedSharding(mesh, spec)

    return compile_step(platform, recipe, shapes_of(tree, "float32", place)).collectives


def count_collectives(step: Step, platform: str, tree: str) -> Row:
    """Count the collectives of both versions of a step."""
    found = [
        collectives_of(recipe, platform, tree) for recipe in (step.ours, step.theirs)
    ]
    reduces = [each.get("all-reduce", 0) for each in found]
    others = [sum(each.values()) - n for each, n in zip(found, reduces, strict=True)]
    topology, shape = MESHES[platform]
    cells: dict[str, Figure | str] = {
        "all-reduces": f"{reduces[0]} / {reduces[1]}",
        "ratio": _ratio(*reduces, (reduces[1] + step.goals.maxima) / reduces[1])
        if reduces[1]
        else "",
        "others": f"{others[0]} / {others[1]}",
    }
    chips = f"{PLATFORMS[platform].label} {topology}, {shape[0] * shape[1]} chips"
    return Row((step.label, step.peer, chips, tree), cells)
