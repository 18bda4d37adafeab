"""Steps compile for TPUs and GPUs that are not here, and cost no more than Optax's or
those by hand.

    python -m pytest -m tpu_compile -n 2 --dist=worksteal tests/platforms
    python -m pytest -m gpu_compile -n 2 --dist=worksteal tests/platforms

The extras `platforms-tpu` and `platforms` bring the compilers; where they are missing,
the tests are skipped. `python -m benchmarks --compiled` prints the figures, on larger
trees.
"""

from collections.abc import Iterator

import jax
import pytest

from benchmarks.compiled import collectives_of
from benchmarks.members import MEMBERS, weigh
from benchmarks.platforms import compile_step, devices_of
from benchmarks.steps import STEPS
from benchmarks.trees import shapes_of
from tests.support.platforms import skip_where_missing


@pytest.fixture(autouse=True)
def _without_cache() -> Iterator[None]:
    """Compile anew: JAX can store such programs, but not load them again."""
    before = jax.config.jax_enable_compilation_cache
    yield
    jax.config.update("jax_enable_compilation_cache", before)


def costs(platform: str, name: str, dtype: str, tree: str = "quick") -> list[object]:
    device = jax.sharding.SingleDeviceSharding(devices_of(platform)[0])
    params = shapes_of(tree, dtype, lambda *_: device)
    return [
        compile_step(platform, recipe, params)
        for recipe in (STEPS[name].ours, STEPS[name].theirs)
    ]


@pytest.mark.tpu_compile
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", STEPS)
def test_a_tpu_reads_and_computes_no_more(name: str, dtype: str) -> None:
    skip_where_missing("v5e")
    ours, theirs = costs("v5e", name, dtype)
    # What a leaf costs is in the larger trees; here a kernel for the metrics counts as
    # much as one for a leaf.
    assert ours.bytes <= theirs.bytes * (STEPS[name].goals.bytes + 0.05)
    assert ours.operations <= theirs.operations * STEPS[name].goals.operations


def missed(name: str, platform: str) -> dict[str, str]:
    """Return the figures of a member that miss their goals."""
    skip_where_missing(platform)
    trees = [MEMBERS[name].step.tree or "huge"]
    row = weigh(MEMBERS[name], platform, trees, "float32")
    return {key: str(x) for key, x in row.figures.items() if x.missed}


@pytest.mark.tpu_compile
@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_costs_a_tpu_what_its_arithmetic_needs(name: str) -> None:
    """Bytes and scratch of a step, on a tree larger than the chip's own memory."""
    assert not missed(name, "v5e")


@pytest.mark.gpu_compile
@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_costs_a_gpu_what_its_arithmetic_needs(name: str) -> None:
    assert not missed(name, "h100")


@pytest.mark.gpu_compile
@pytest.mark.parametrize("platform", ["h100", "t4"])
@pytest.mark.parametrize("name", STEPS)
def test_a_gpu_runs_hardly_more_kernels(name: str, platform: str) -> None:
    skip_where_missing(platform)
    ours, theirs = costs(platform, name, "float32")
    assert ours.bytes <= theirs.bytes * 1.05
    # The metrics are up to ten kernels, however many leaves there are.
    assert ours.kernels <= theirs.kernels * STEPS[name].goals.kernels + 10


@pytest.mark.tpu_compile
@pytest.mark.parametrize("name", ["global", "called", "link", "bounded", "agc", "cone"])
def test_256_tpus_add_norms_with_as_many_collectives_as_by_hand(name: str) -> None:
    skip_where_missing("v5e")
    ours, theirs = (
        collectives_of(r, "v5e", "quick")
        for r in (STEPS[name].ours, STEPS[name].theirs)
    )
    assert set(ours) <= {"all-reduce"}
    assert ours["all-reduce"] <= theirs["all-reduce"] + STEPS[name].goals.maxima
