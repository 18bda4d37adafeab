"""One of several processes that train together: `python -m tests.devices.process`, then
its number, how many there are, a port, and a folder.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipjax
from tests.devices.members import drawn, members
from tests.devices.members import step as step_of

EVERY = members(0) | {"keep": clipjax.record_norms("leaf", keep=4)}
# XLA divides the numbers' work: one member of each kind.
KINDS = ("clip_by_global_norm", "adagc", "keep_norm", "skip_spikes", "bounded", "keep")
MEMBERS = {name: EVERY[name] for name in KINDS}
SPECS = {"both": P("data", "model"), "held": P(), "bias": P("model")}
SHAPES = {"both": (8, 16), "held": (4, 3), "bias": (16,)}
LOSSES = np.float32([1, 1, 1, np.inf])

weights = functools.partial(drawn, SHAPES)
PARAMS, GRADS = weights(0), [weights(seed) for seed in range(1, 5)]
GRADS[1]["both"][7, 15] = np.nan  # on one device of one process
GRADS[2]["bias"][0] = np.inf


@jax.jit
def step(states: Any, grads: Any, params: Any, loss: Any) -> Any:
    return step_of(MEMBERS, states, grads, params, loss)


def train(place: Any) -> Any:
    """Return the last updates, the metrics and the bad steps of all members."""
    params = place(PARAMS)
    states = {name: tx.init(params) for name, tx in MEMBERS.items()}
    for grads, loss in zip(GRADS, LOSSES, strict=True):
        states, updates = step(states, place(grads), params, loss)
    metrics = {name: float(x) for name, x in clipjax.metrics(states).items()}
    return updates, metrics, clipjax.bad_steps(states["keep"])


def main(number: int, count: int, port: str, folder: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", count, number)
    assert (jax.process_count(), jax.device_count()) == (count, 8)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}

    def place(tree: Any) -> Any:
        """Of what is the same everywhere; `device_put` compares, and NaN is not NaN."""
        return {
            name: jax.make_array_from_callback(x.shape, shardings[name], x.__getitem__)
            for name, x in tree.items()
        }

    updates, metrics, bad = train(place)
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(updates)
    leaves = [np.asarray(x) for x in jax.tree.leaves(whole)]
    np.savez(Path(folder) / f"{number}.npz", *leaves)
    said = {"metrics": metrics, "bad": [each._asdict() for each in bad]}
    (Path(folder) / f"{number}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
