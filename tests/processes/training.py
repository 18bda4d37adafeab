"""What one of several processes does: it trains a small model that is split over the devices of all.

The runs that it is given follow one another, as it takes long to start a process. Of each run every process
writes down what it sees in the end: the whole state, put together from all, and the metrics of each step.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import clipjax
from clipjax.flax import unit_axes

BATCH, FEATURES, WIDTH = 8, 8, 16


class Model(nnx.Module):
    """Three layers: split over all devices, over the model axis by columns, and by rows."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def layer(inputs: int, outputs: int, *axes: str | None) -> nnx.Linear:
            def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
                return jax.random.normal(key, shape, dtype)

            return nnx.Linear(
                inputs,
                outputs,
                rngs=rngs,
                kernel_init=nnx.with_partitioning(init, axes),
                bias_init=nnx.with_partitioning(nnx.initializers.zeros, axes[1:]),
            )

        self.inner = layer(FEATURES, WIDTH, "data", "model")
        self.middle = layer(WIDTH, WIDTH, None, "model")
        self.outer = layer(WIDTH, 4, "model", None)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(jnp.tanh(self.middle(jnp.tanh(self.inner(x)))))


def transformation(model: nnx.Module) -> optax.GradientTransformation:
    return clipjax.bounded(
        optax.adam(0.05),
        clip=clipjax.clip_by_global_norm(1.0),
        project=clipjax.max_norm(2.0, axes=unit_axes(model)),
        nonfinite="skip",
    )


def made() -> tuple[Model, nnx.Optimizer]:
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, transformation(model), wrt=nnx.Param)


def example(step: int, bad: Any) -> tuple[np.ndarray, np.ndarray]:
    """The batch of a step, the same for any number of processes; `bad` is a step, and its row that is NaN."""
    rng = np.random.default_rng(step)
    x, y = (rng.standard_normal((BATCH, n)).astype(np.float32) for n in (FEATURES, 4))
    if bad and bad[0] == step:
        x[bad[1], 0] = np.nan
    return x, y


def train(run: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Train for some steps on a mesh: the state after them, and the metrics of each step."""
    mesh = jax.make_mesh(tuple(run["mesh"]), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        graph, like = nnx.split(nnx.eval_shape(made))
        places, everywhere = nnx.get_named_sharding(like, mesh), NamedSharding(mesh, P())
        if "restore" in run:
            state = restored(run["restore"], like, places)
        else:
            state = jax.jit(lambda: nnx.split(made())[1], out_shardings=places)()

        def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
            model, optimizer = nnx.merge(graph, state)
            grads = nnx.grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
            optimizer.update(model, grads)
            return nnx.split((model, optimizer))[1], clipjax.metrics(optimizer)

        compiled = jax.jit(step, out_shardings=(places, everywhere), donate_argnums=0)
        rows = NamedSharding(mesh, P("data"))
        seen = []
        for i in range(*run["steps"]):
            if i == run.get("save_at"):
                saved(run["save"], state)
            # Each process makes arrays of those rows alone that are on its devices.
            x, y = (
                jax.make_array_from_callback(whole.shape, rows, whole.__getitem__)
                for whole in example(i, run.get("bad"))
            )
            state, metrics = compiled(state, x, y)
            seen.append({key: float(value) for key, value in metrics.items()})
            print(f"{run['name']}: step {i}", flush=True)
        model, _ = nnx.merge(graph, state)
        beyond = clipjax.verify(nnx.state(model, nnx.Param), clipjax.max_norm(1.9, axes=unit_axes(model)))
        seen[-1]["units beyond 1.9"] = len(beyond)
    return state, seen


def saved(path: str, state: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def restored(path: str, like: Any, places: Any) -> Any:
    def described(leaf: Any, place: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, jax.tree.map(described, like, places))


def end_with_the_test() -> None:
    """End this process when what started it does, which holds the other end of the pipe."""
    sys.stdin.read()
    os._exit(1)


def main(plan: dict[str, Any]) -> None:
    threading.Thread(target=end_with_the_test, daemon=True).start()
    if plan["processes"] > 1:
        jax.distributed.initialize(
            plan["address"],
            plan["processes"],
            plan["process"],
            heartbeat_timeout_seconds=plan["timeout"],
            shutdown_timeout_seconds=plan["timeout"],
        )
    for run in plan["runs"]:
        state, seen = train(run)
        whole = multihost_utils.process_allgather(nnx.to_pure_dict(state), tiled=True)
        leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(whole)}
        path = Path(plan["results"]) / f"{run['name']}-{plan['process']}"
        np.savez(path.with_suffix(".npz"), **leaves)
        path.with_suffix(".json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
