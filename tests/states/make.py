"""Write the golden checkpoint of a release: small states after five steps.

    python tests/states/make.py

writes `tests/states/<version>`, for the version of clipjax that is installed. A release
adds its checkpoint, and none is ever edited: the script refuses to overwrite one. It is
run with the code of the release, and so uses names that all releases have.
"""

import argparse
import functools
import gzip
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import serialization

import clipjax

HERE = Path(__file__).parent
STEPS, MORE = 5, 3  # updates before the checkpoint, and after it


def params() -> dict[str, Any]:
    draws = np.random.RandomState(0)
    return {
        "dense": {
            "bias": draws.normal(size=2).astype(np.float32),
            "kernel": draws.normal(size=(3, 2)).astype(np.float32),
        },
        "head": draws.normal(size=(2, 2)).astype(np.float32),
    }


def gradients(seed: int, *, bad: bool = False) -> Any:
    """Return the gradients of a step; bad ones have a NaN."""
    draws = np.random.RandomState(seed)
    size = 1 + seed % 3
    grads = jax.tree.map(
        lambda x: (size * draws.normal(size=x.shape)).astype(np.float32), params()
    )
    if bad:
        grads["head"][0, 0] = np.nan
    return grads


def _own() -> optax.GradientTransformation:
    def act(updates: Any, params: Any, step: Any, memory: Any, **extra: Any) -> Any:
        norm = optax.tree.norm(updates)
        metrics = {"norm": norm, "large": norm > memory, "calls": jnp.int32(1)}
        scaled = jax.tree.map(lambda x: x / (1 + memory), updates)
        return scaled, metrics, 0.9 * memory + 0.1 * norm

    return clipjax.with_metrics("own", act, lambda params: jnp.zeros(()))


@functools.cache
def members() -> dict[str, Any]:
    """Return one transformation for each kind of state, and some chains."""
    falling = optax.linear_schedule(1.0, 0.5, 10)
    adam = optax.adam(0.1)
    clip = clipjax.clip_by_global_norm(1.0)
    inject = optax.inject_hyperparams(clipjax.clip_by_global_norm)
    labels = {"dense": "a", "head": "b"}
    return {
        "adagc": clipjax.adagc(warmup_steps=2),
        "adagc of units": clipjax.adagc(warmup_steps=2, axes={"kernel": 0, "*": None}),
        "adaptive_grad_clip": clipjax.adaptive_grad_clip(0.1),
        "autoclip": clipjax.autoclip(50.0, window=4),
        "clip_by_global_norm": clip,
        "clip_by_global_norm of a schedule": clipjax.clip_by_global_norm(falling),
        "clip_by_group_norm": clipjax.clip_by_group_norm({"dense/*": 1.0, "*": 0.5}),
        "clip_by_lognormal": clipjax.clip_by_lognormal(),
        "clip_by_norm": clipjax.clip_by_norm(1.0),
        "clip_by_quantile": clipjax.clip_by_quantile(),
        "clip_by_rms": clipjax.clip_by_rms(1.0),
        "clip_by_value": clipjax.clip_by_value(1.0),
        "record_norms": clipjax.record_norms(),
        "record_norms of leaves": clipjax.record_norms("leaf", keep=2),
        "record_norms of probes": clipjax.record_norms(
            of=("updates", "ratio"), keep=2, probes={"blocks": 2, "embed": 0}
        ),
        "relative_update": clipjax.relative_update(),
        "skip_nonfinite": clipjax.skip_nonfinite(adam),
        "skip_spikes": clipjax.skip_spikes(adam, window=4, warmup_steps=3),
        "tangent_cone": clipjax.tangent_cone(1.0),
        "with_metrics": _own(),
        "zclip": clipjax.zclip(warmup_steps=3),
        "zero_nonfinite": clipjax.zero_nonfinite(),
        "max_norm": clipjax.max_norm(falling),
        "min_max_norm": clipjax.min_max_norm(0.1, falling),
        "box": clipjax.box(-1.0, falling),
        "spectral_cap": clipjax.spectral_cap(falling),
        "bounded": clipjax.bounded(
            adam, clip=clip, project=clipjax.max_norm(falling), nonfinite="skip"
        ),
        "bounded with accumulate": clipjax.bounded(
            adam, clip=clip, nonfinite="skip", accumulate=2
        ),
        "chain": optax.chain(
            clipjax.record_norms("leaf", keep=2),
            clipjax.skip_nonfinite(
                optax.chain(clip, clipjax.autoclip(window=4), optax.adamw(0.1), clip)
            ),
        ),
        "inject_hyperparams": optax.chain(
            inject(max_norm=falling), optax.inject_hyperparams(optax.adam)(0.1)
        ),
        "MultiSteps": optax.MultiSteps(optax.chain(clip, adam), 2),
        "named": clipjax.named("part", optax.chain(clip, clipjax.named("in", clip))),
        "partition": optax.partition(
            {"a": optax.chain(clip, adam), "b": optax.chain(clip, adam)}, labels
        ),
    }


# These see a NaN at the third step.
WITH_NAN = ("record_norms", "skip", "zero_nonfinite", "bounded", "chain")


def extra(name: str) -> dict[str, Any]:
    """Return what an update of a member needs by name."""
    if name != "record_norms of probes":
        return {}
    rows = np.arange(18, dtype=np.float32).reshape(3, 6) * [1, 0, 1, 1, 0, 1]
    return {"taps": {"blocks": rows[:2], "embed": rows[2]}}


@functools.cache
def _update(name: str) -> Any:
    return jax.jit(members()[name].update)


def run(name: str, state: Any, weights: Any, seeds: Any) -> tuple[Any, Any, list[Any]]:
    """Take a step for each seed; return the state, the weights, and the updates."""
    seen = []
    for seed in seeds:
        bad = name.startswith(WITH_NAN) and seed == 2
        given = gradients(seed, bad=bad), state, weights
        updates, state = _update(name)(*given, **extra(name))
        finite = jax.tree.map(jnp.nan_to_num, updates)  # a recorder passes a NaN on
        weights = optax.apply_updates(weights, finite)
        seen.append(updates)
    return state, weights, jax.device_get(seen)


def metrics_of(state: Any) -> dict[str, Any]:
    """Return the metrics of a state as floats; a projection has none."""
    try:
        metrics = clipjax.metrics(state)
    except ValueError:
        return {}
    return {key: float(x) for key, x in jax.device_get(metrics).items()}


def plain(node: Any) -> Any:
    """Return a state as dicts, lists and NumPy's arrays."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return {key: plain(x) for key, x in node._asdict().items()}
    if isinstance(node, dict):
        return {key: plain(x) for key, x in node.items()}
    if isinstance(node, tuple | list):
        return list(map(plain, node))
    return node if node is None else np.asarray(node)


def write(folder: Path) -> None:
    """Write the states of all members in each format."""
    states, weights, updates, metrics = {}, {}, {}, {}
    for name, tx in members().items():
        state, now, _ = run(name, tx.init(params()), params(), range(STEPS))
        after, _, later = run(name, state, now, range(STEPS, STEPS + MORE))
        metrics[name] = metrics_of(after)
        states[name], weights[name], updates[name] = state, now, later
    states = jax.device_get(states)
    folder.mkdir(parents=True)
    written = {
        "states": plain(states),
        # With the types of clipjax, as users write it.
        "typed": pickle.dumps(states),
        "params": jax.device_get(weights),
        "seeds": list(range(STEPS, STEPS + MORE)),
        "updates": updates,
        "metrics": metrics,
    }
    (folder / "states.pickle.gz").write_bytes(gzip.compress(pickle.dumps(written)))
    (folder / "states.msgpack").write_bytes(serialization.to_bytes(states))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute() / "orbax", states)
        checkpointer.wait_until_finished()
    # It names a folder of the machine that wrote it.
    (folder / "orbax" / "commit_success.txt").unlink(missing_ok=True)


@functools.cache
def read(folder: Path) -> dict[str, Any]:
    """Return what was written, with the states of each format without a template."""
    packed = (folder / "states.pickle.gz").read_bytes()
    written = pickle.loads(gzip.decompress(packed))
    msgpack = (folder / "states.msgpack").read_bytes()
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder.absolute() / "orbax")
    return written | {
        "pickle": written["states"],
        "msgpack": serialization.msgpack_restore(msgpack),
        "orbax": restored,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", default=clipjax.__version__)
    write(HERE / parser.parse_args().version)
