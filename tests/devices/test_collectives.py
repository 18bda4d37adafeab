"""How often devices wait for each other in one step, and what they send: read off the compiled program."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import programs, sharded
from tests import versions
from tests.support.eight_devices import OF_LEAVES, SPECS, mesh, tree

# What has a part of every other one.
COVERING = ("clip_by_norm", "zclip", "max_norm, called", "adaptive_grad_clip", "bounded, skip")


@pytest.mark.parametrize("name", ["global", "value"])
def test_one_all_reduce(name: str) -> None:
    tx = OF_LEAVES[name](None, None)

    def local(grads):
        updates, state = tx.update(grads, tx.init(grads))
        return updates, state[0]

    mapped = jax.jit(jax.shard_map(local, mesh=mesh(), in_specs=(SPECS,), out_specs=(SPECS, P())))
    text = mapped.lower(tree()).compile().as_text()
    assert programs.collectives(programs.parse(text)) == {"all-reduce": 1}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in COVERING)) for name in sharded.STEPS]
)
def test_a_step_on_eight_devices(name: str) -> None:
    """Of 74 leaves; the naive formula takes two all-reduces, and Optax's clips take three."""
    params = sharded.transformer(sharded.mesh_of("cpu"))
    pair = sharded.STEPS[name]
    ours = sharded.compile_step("cpu", pair.ours, params)
    usual = {"bounded, skip": 5, "adaptive_grad_clip": 2}.get(name, 2 if pair.more else 3)
    assert ours.all_reduces <= usual + pair.more
    assert ours.others == 0
    # A unit's sum of squares is sent in 8 bytes where the formula sends 4, and besides ten numbers for each
    # matrix: the metrics.
    matrices = [x for x in params.values() if x.ndim > 1]
    units = sum(x.sharding.shard_shape(x.shape)[1] for x in matrices)
    measured = {"adaptive_grad_clip": 2 * units, "bounded, skip": units + 2 * len(matrices)}
    sent = measured.get(name, units if pair.more else 2 * len(matrices))
    assert ours.collective_bytes <= 8 * (sent + 10 * len(matrices))
    # What updates the weights by a difference keeps all updates, and the step that may be skipped the state.
    share = 2.5 if "bounded" in name else 2.2 if "link" in name else 0.1
    if versions.jaxlib() >= (0, 10):  # older versions of XLA keep more
        assert ours.temporaries <= share * sharded.local_bytes(params)
