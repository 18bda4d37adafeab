"""The collectives of one step on 256 and 4,096 TPUs and on eight GPUs, as compiled without them."""

from __future__ import annotations

import functools

import pytest
from jax.sharding import AxisType

import clipjax
from benchmarks import sharded
from benchmarks.platforms import missing
from benchmarks.steps import adam, chain
from tests.platforms.test_members import MARKS

# What has a part of every other step. Each takes a minute to compile: with every change for 256 TPUs, where
# the program is that for 4,096.
ON_MANY = ("clip_by_global_norm", "max_norm, called", "bounded, skip")


def cases(*names: str, on: str) -> list[object]:
    def marks(name: str) -> list[pytest.MarkDecorator]:
        often = on == "v5e" and name in ON_MANY
        return [MARKS["cuda" if on == "h100" else "tpu"], *(() if often else (pytest.mark.slow,))]

    return [pytest.param(on, name, marks=marks(name)) for name in names]


@functools.cache
def compiled(platform: str, name: str, whose: str) -> sharded.Compiled:
    recipe = getattr(sharded.STEPS[name], whose)
    return sharded.compile_step(platform, recipe, sharded.transformer(sharded.mesh_of(platform)))


@pytest.mark.parametrize(
    ("platform", "name"),
    [
        *cases(*sharded.STEPS, on="v5e"),
        *cases(*ON_MANY, on="v5p"),
        *cases(*sharded.STEPS, on="h100"),
    ],
)
def test_a_step_has_as_many_collectives_as_its_limit(platform: str, name: str) -> None:
    if reason := missing(platform):
        pytest.skip(reason)
    ours, theirs = (compiled(platform, name, whose) for whose in ("ours", "theirs"))
    assert ours.others == 0
    assert ours.all_reduces <= theirs.all_reduces + sharded.STEPS[name].more
    # On a TPU a sum is sent in pieces: 19 of a sum of squares, its rest, and two for what is out of range.
    times = 23 if platform != "h100" else 3
    measured = 2 if name == "adaptive_grad_clip" else 1
    assert ours.collective_bytes <= 2 * 74 * 5 * 4 * measured + times * measured * theirs.collective_bytes


@pytest.mark.tpu_compile
@pytest.mark.slow
def test_a_tangent_cone_takes_as_many_however_many_leaves_there_are() -> None:
    if reason := missing("v5e"):
        pytest.skip(reason)
    recipe = chain(clipjax.tangent_cone(0.5), adam())
    mesh = sharded.mesh_of("v5e")
    found = [sharded.compile_step("v5e", recipe, sharded.transformer(mesh, layers=n)) for n in (1, 2)]
    assert all(step.others == 0 for step in found)
    # Norms, inner products, what is left, the metrics: over each of the two axes of the mesh.
    assert [step.all_reduces for step in found] == [8, 8]


@pytest.mark.parametrize(
    ("platform", "name"), [*cases("adaptive_grad_clip", on="v5e"), *cases("bounded, skip", on="h100")]
)
def test_explicit_axes_take_no_more(platform: str, name: str) -> None:
    if reason := missing(platform):
        pytest.skip(reason)
    automatic, explicit = (
        sharded.compile_step(
            platform,
            sharded.STEPS[name].ours,
            sharded.transformer(sharded.mesh_of(platform, axes=axes), layers=1),
        )
        for axes in (AxisType.Auto, AxisType.Explicit)
    )
    assert explicit.collectives == automatic.collectives
