"""What the library runs on a device, member by member: programs to compile for a platform that is not there.

A member is a public function. Its parts are its variants, called and as a link where it can be both; each
part is run on a tree in float32 and in bfloat16, alone or inside `shard_map`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import clipjax
from tests.support import walk

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
AXIS = "d"

# Units that are split over the devices, units that are whole on each, and leaves that all devices have.
SHAPES = {"kernel": (256, 128), "columns": (128, 256), "replicated": (128, 8), "bias": (128,), "scale": ()}
SPECS = {"kernel": P(AXIS, None), "columns": P(None, AXIS), "replicated": P(), "bias": P(AXIS), "scale": P()}
WHOLE = dict.fromkeys(SHAPES, P())
# One matrix, whose proofs a TPU's compiler takes ten seconds for.
MATRIX = {"kernel": (32, 16)}
SPECTRAL = ("clip_by_spectral_norm", "spectral_cap")

ATTENTION = {
    side: {"kernel": (64, 4, 16), "bias": (4, 16)} if side != "value" else {"kernel": (64, 4, 16)}
    for side in ("query", "key", "value")
}
LOGITS = np.array([400.0, 50, 10, 1], np.float32)


class Part(NamedTuple):
    """One program of a member, as a function of its state and two trees of one shape."""

    # (state, grads, params) -> (outputs like the parameters, outputs that all devices share)
    run: Callable[[Any, Any, Any], tuple[dict[str, Any], Any]]
    init: Callable[[Any], Any] = lambda params: ()
    trees: tuple[str, ...] = ()  # the names of the former


Parts = dict[str, Part]


def counting() -> optax.GradientTransformation:
    """An optimizer whose state is a number, so that all devices share it."""
    return optax.sgd(lambda count: 1.0 / (1.0 + count))


def _of_transformation(tx: Any, **extra: Any) -> Part:
    def run(state: Any, grads: Any, params: Any) -> tuple[dict[str, Any], Any]:
        updates, state = tx.update(grads, state, params, **extra)
        trees = {"update": updates}
        if walk.is_projection(tx):
            trees["call"] = tx(params, **extra)
        return trees, (state, clipjax.metrics(state))

    return Part(run, tx.init, ("update", "call") if walk.is_projection(tx) else ("update",))


def _transformation(name: str, specs: Any) -> Parts:
    found = {}
    for case in walk.variants():
        if case.name != name:
            continue
        options = dict(case.options)
        if specs is not None:
            if "specs" in walk.parameters(name):
                options["specs"] = specs
            if "optimizer" in walk.parameters(name):
                options["optimizer"] = counting()
            if "project" in options:
                options["project"] = clipjax.max_norm(1.0, specs=specs)
        found[str(case)] = _of_transformation(walk.make(name, **options))
    if name.startswith("skip"):
        found["loss"] = _given_a_loss(walk.make(name, optimizer=counting(), max_consecutive=9))
    return found


def _chain(specs: Any) -> Parts:
    links = clipjax.clip_by_global_norm(1.0), counting(), clipjax.max_norm(1.0, specs=specs)
    return {"chain": _of_transformation(clipjax.chain(*links))}


def _qk_clip(specs: Any) -> Parts:
    tx = clipjax.qk_clip(100.0)
    return {"qk_clip": _of_transformation(tx, max_logits=LOGITS)}


def _given_a_loss(tx: Any) -> Part:
    """What skips, by the loss, too: the mean of one gradient, which differs from device to device."""

    def run(state: Any, grads: Any, params: Any) -> tuple[dict[str, Any], Any]:
        updates, state = tx.update(grads, state, params, loss=jnp.mean(grads["kernel"]))
        return {"update": updates}, (state, clipjax.metrics(state))

    return Part(run, tx.init, ("update",))


def _columns(path: str, leaf: Any) -> Any:
    return 0 if leaf.ndim > 1 else clipjax.SKIP


# Layers by name: functions of a tree, a probe and the specs.
LAYERS: dict[str, dict[str, Callable[[Any, Any, Any], Any]]] = {
    "clip_gradient_by_value": {
        "bound": lambda x, probe, specs: clipjax.clip_gradient_by_value(x, -0.5, 0.25, probe=probe),
    },
    "clip_gradient_by_norm": {
        "leaves": lambda x, probe, specs: clipjax.clip_gradient_by_norm(x, 0.5, probe=probe),
        "units": lambda x, probe, specs: clipjax.clip_gradient_by_norm(
            x, 0.5, _columns, specs=specs, probe=probe
        ),
    },
    "clip_gradient_by_global_norm": {
        "tree": lambda x, probe, specs: clipjax.clip_gradient_by_global_norm(x, 0.5, probe=probe),
    },
    "scale_gradient": {"half": lambda x, probe, specs: clipjax.scale_gradient(x, 0.5)},
    "replace_gradient": {
        "sine": lambda x, probe, specs: clipjax.replace_gradient(
            lambda y: jax.tree.map(jnp.round, y), lambda y: jax.tree.map(jnp.sin, y)
        )(x),
    },
}


def _layer(layer: Callable[[Any, Any, Any], Any], specs: Any) -> Part:
    def loss(x: Any, probe: Any) -> Any:
        leaves = jax.tree.leaves(layer(x, probe, specs))
        total = sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in leaves)
        return total if specs is None else lax.psum(total, AXIS)

    def run(state: Any, grads: Any, params: Any) -> tuple[dict[str, Any], Any]:
        of_tree, of_probe = jax.grad(loss, argnums=(0, 1))(grads, jnp.zeros(()))
        return {"gradient": of_tree}, of_probe

    return Part(run, trees=("gradient",))


# Pure functions by name: each a function of a tree that returns trees like it, and what all devices share.
FUNCTIONS: dict[str, dict[str, Callable[[Any], tuple[dict[str, Any], Any]]]] = {
    "global_norm": {
        f"ord={ord}": lambda tree, ord=ord: ({}, clipjax.functional.global_norm(tree, ord))  # noqa: A006
        for ord in (1, 2, 3, np.inf)  # noqa: A001
    },
    "leaf_norms": {
        f"ord={ord}": lambda tree, ord=ord: ({}, clipjax.functional.leaf_norms(tree, ord))  # noqa: A006
        for ord in (2, np.inf)  # noqa: A001
    },
    "unitwise_norms": {
        "fan_in": lambda tree: ({}, clipjax.functional.unitwise_norms(tree, clipjax.fan_in)),
    },
    "clip_by_value": {
        "bounds": lambda tree: ({"clipped": clipjax.functional.clip_by_value(tree, -0.5, 0.25)}, ()),
    },
    "clip_by_norm": {
        "leaves": lambda tree: ({"clipped": clipjax.functional.clip_by_norm(tree, 1.0)}, ()),
        "units": lambda tree: ({"clipped": clipjax.functional.clip_by_norm(tree, 1.0, _columns)}, ()),
    },
    "clip_by_global_norm": {
        "tree": lambda tree: _clipped(*clipjax.functional.clip_by_global_norm(tree, 1.0)),
    },
}


def _clipped(tree: Any, norm: Any) -> tuple[dict[str, Any], Any]:
    return {"clipped": tree}, norm


# Public functions that run no program of their own on a device, and why.
NO_PROGRAM = {
    "metrics": "reads a state: in the program of every transformation",
    "verify": "looks at values, outside of a program",
    "raise_if_skipping": "looks at values, outside of a program",
    "fan_in": "a rule, at work in other members",
    "fan_in_or_whole": "a rule, at work in other members",
}

OF_FUNCTIONS = tuple(f"functional.{name}" for name in FUNCTIONS)
MEMBERS = (*walk.names(), "chain", "qk_clip", *LAYERS, *OF_FUNCTIONS)


def parts(name: str, specs: Any = None) -> Parts:
    """The programs of a member; `specs` are given inside `shard_map`."""
    if name.startswith("functional."):
        name = name.removeprefix("functional.")
        trees = ("clipped",) if name.startswith("clip") else ()
        return {
            key: Part(lambda state, grads, params, f=f: f(grads), trees=trees)
            for key, f in FUNCTIONS[name].items()
        }
    if name in LAYERS:
        return {key: _layer(layer, specs) for key, layer in LAYERS[name].items()}
    if name in ("chain", "qk_clip"):
        return _chain(specs) if name == "chain" else _qk_clip(specs)
    return _transformation(name, specs)


def specs_of(name: str) -> Any:
    """How a member's tree is spread over the devices: whole, where it cannot be told how units are split."""
    if name == "qk_clip":
        return jax.tree.map(lambda _: P(), ATTENTION, is_leaf=lambda x: isinstance(x, tuple))
    if name in SPECTRAL:
        return dict.fromkeys(MATRIX, P())
    unsplit = ("functional.unitwise_norms", "functional.clip_by_norm")
    return WHOLE if name in unsplit else SPECS


def shapes_of(name: str, dtype: Any) -> Any:
    """The tree that a member is run on."""
    shapes = {"qk_clip": ATTENTION, **dict.fromkeys(SPECTRAL, MATRIX)}.get(name, SHAPES)
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
