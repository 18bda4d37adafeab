"""For the tests on eight devices: a mesh, a tree spread over it, and the transformations that reduce over it.

All transformations share one program for each way to run them: how much there is to compile is what these
tests cost.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import clipjax
from tests.support.oracles import exact_norm, exact_tree_norm
from tests.support.trees import same_bits

DEVICES = 8

# A leaf whose units are split over the devices, one whose units are whole on each, and one that all have.
SPECS = {"kernel": P("d", None), "columns": P(None, "d"), "replicated": P()}
ROWS = dict.fromkeys(SPECS, P("d"))
TWO_AXES = {"kernel": P("x", "y"), "columns": P(None, ("x", "y")), "replicated": P("y")}
# The parts of these by one of the two axes.
OF_X = {"kernel": P("x"), "columns": P(None, "x"), "replicated": P()}
OF_Y = {"kernel": P(None, "y"), "columns": P(None, "y"), "replicated": P("y")}

# How the gradients and the weights of a model are split over an axis x for data and an axis y for its layers.
LAYOUTS = {
    "data": (dict.fromkeys(SPECS, P("x")), dict.fromkeys(SPECS, P())),
    "tensor": ({"kernel": P(None, "y"), "columns": P("y"), "replicated": P()},) * 2,
    "fully sharded": (TWO_AXES,) * 2,
}

KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh(*shape: int, names: tuple[str, ...] = ("d",)) -> Any:
    """A mesh of the eight devices: one axis, or axes of a shape."""
    return jax.make_mesh(shape or (DEVICES,), names, axis_types=(AxisType.Auto,) * len(names))


def two_axes(axis_type: AxisType) -> Any:
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)


def shardings(specs: Mapping[str, P]) -> dict[str, NamedSharding]:
    """The specs as shardings of a mesh of two axes."""
    of_no_devices = jax.sharding.AbstractMesh((2, 4), ("x", "y"))  # as there may be one yet
    return {key: NamedSharding(of_no_devices, spec) for key, spec in specs.items()}


def tree(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "kernel": rng.standard_normal((16, 8)).astype(np.float32),
        "columns": rng.standard_normal((8, 8)).astype(np.float16),
        "replicated": rng.standard_normal((8, 3)).astype(np.float32),
    }


Builder = Callable[[Any, Any], optax.GradientTransformation]

# Transformations by name, each a function of (specs, axis_name).
OF_LEAVES: dict[str, Builder] = {
    "global": lambda s, a: clipjax.clip_by_global_norm(1.0, axis_name=a),
    "global p=3": lambda s, a: clipjax.clip_by_global_norm(1.0, ord=3, axis_name=a),
    "global p=8": lambda s, a: clipjax.clip_by_global_norm(1.0, ord=8, axis_name=a),
    "global inf": lambda s, a: clipjax.clip_by_global_norm(0.5, ord=np.inf, axis_name=a),
    "leaves": lambda s, a: clipjax.clip_by_norm(1.0, axis_name=a),
    "rms": lambda s, a: clipjax.clip_by_rms(0.5, axis_name=a),
    "value": lambda s, a: clipjax.clip_by_value(0.5, axis_name=a),
    "low and high value": lambda s, a: clipjax.clip_by_value(-0.5, 0.25, axis_name=a),
    # At the first step it clips two entries, neither of them on the first device.
    "array of values": lambda s, a: clipjax.clip_by_value(np.full((1, 1), 2.35, np.float32), axis_name=a),
    "box": lambda s, a: clipjax.box(-0.5, 0.25, axis_name=a),
    "non_negative": lambda s, a: clipjax.non_negative(axis_name=a),
    "groups": lambda s, a: clipjax.clip_by_group_norm({"kernel": 1.0, "*": 0.5}, axis_name=a),
    "records": lambda s, a: clipjax.record_norms("leaf", of=("updates", "ratio"), axis_name=a),
    "hyperball": lambda s, a: clipjax.hyperball(0.25, axes=None, specs=s, axis_name=a),
}
OF_UNITS: dict[str, Builder] = {
    "units": lambda s, a: clipjax.clip_by_norm(0.5, axes=0, specs=s, axis_name=a),
    "units of rows": lambda s, a: clipjax.clip_by_norm(0.5, axes=1, specs=s, axis_name=a),
    # At the first step it clips one unit, which is on one device.
    "few units": lambda s, a: clipjax.clip_by_norm(3.6, axes={"columns": 0}, specs=s, axis_name=a),
    "rms of units": lambda s, a: clipjax.clip_by_rms(0.25, axes=0, specs=s, axis_name=a),
    "max_norm": lambda s, a: clipjax.max_norm(0.5, specs=s, axis_name=a),
    "min_max_norm": lambda s, a: clipjax.min_max_norm(2.5, 3.5, specs=s, axis_name=a),
    "unit_norm": lambda s, a: clipjax.unit_norm(specs=s, axis_name=a),
    "tangent_cone": lambda s, a: clipjax.tangent_cone(1.5, specs=s, axis_name=a),
    "tangent_space": lambda s, a: clipjax.tangent_space(axes=0, specs=s, axis_name=a),
}
ADAPTIVE: dict[str, Builder] = {
    "autoclip": lambda s, a: clipjax.autoclip(50.0, window=4, axis_name=a),
    "zclip": lambda s, a: clipjax.zclip(warmup_steps=2, axis_name=a),
    "lognormal": lambda s, a: clipjax.clip_by_lognormal(0.1, axis_name=a),
    "quantile": lambda s, a: clipjax.clip_by_quantile(axis_name=a),
    "adagc": lambda s, a: clipjax.adagc(warmup_steps=2, axis_name=a),
    "moving max": lambda s, a: clipjax.clip_by_moving_max(0.9, axis_name=a),
    "moving norm": lambda s, a: clipjax.normalize_by_moving_norm(axis_name=a),
    "agc": lambda s, a: clipjax.adaptive_grad_clip(specs=s, axis_name=a),
}


def counting() -> Any:
    """An optimizer with a state: its rate is 1, 1/2, 1/3, … at the steps that it takes."""
    return optax.sgd(lambda count: 1.0 / (1.0 + count))


SKIPPING: dict[str, Builder] = {
    "zero_nonfinite": lambda s, a: clipjax.zero_nonfinite(axis_name=a),
    "skip_nonfinite": lambda s, a: clipjax.skip_nonfinite(counting(), axis_name=a),
    "skip_spikes": lambda s, a: clipjax.skip_spikes(optax.sgd(1.0), warmup_steps=2, axis_name=a),
    "bounded, zero": lambda s, a: clipjax.bounded(optax.sgd(1.0), nonfinite="zero", axis_name=a),
    "bounded, skip": lambda s, a: clipjax.bounded(optax.sgd(1.0), nonfinite="skip", axis_name=a),
}
# These have no `axis_name`: they are for where the type of a leaf tells.
BY_TYPE: dict[str, Builder] = {
    "project": lambda s, a: clipjax.project(lambda w: jax.tree.map(lambda x: jnp.maximum(x, 0), w))
}
MEMBERS = OF_LEAVES | OF_UNITS | ADAPTIVE | SKIPPING | BY_TYPE
# For matrices that are whole on a device, or that the compiler splits.
SPECTRAL: dict[str, Builder] = {
    "spectral_cap": lambda s, a: clipjax.spectral_cap(2.0),
    "clip_by_spectral_norm": lambda s, a: clipjax.clip_by_spectral_norm(2.0),
    "soft": lambda s, a: clipjax.clip_by_spectral_norm(2.0, soft=True),
}

# (states, grads, params) -> (updates, states, metrics), each but `grads` and `params` by member
Step = Callable[[Any, Any, Any], tuple[Any, Any, Any]]


class Way(NamedTuple):
    """A way to run steps on devices."""

    compiled: Callable[[Step, Iterable[str]], Step]  # of the step, and the names of the members in it
    members: Mapping[str, Builder]  # those that can be run so
    specs: Any = None  # what the members are told, as specs or as shardings
    axis_name: str | None = None


def _jitted(step: Step, names: Iterable[str]) -> Step:
    return jax.jit(step)


def _sharded(step: Step, names: Iterable[str]) -> Step:
    jitted = jax.jit(step)
    return lambda states, grads, params: jitted(states, placed(grads), placed(params))


def _mapped(specs: Any, m: Callable[[], Any], **options: Any) -> Callable[[Step, Iterable[str]], Step]:
    def compiled(step: Step, names: Iterable[str]) -> Step:
        ins, outs = (P(), specs, specs), (dict.fromkeys(names, specs), P(), P())
        return jax.jit(jax.shard_map(step, mesh=m(), in_specs=ins, out_specs=outs, **options))

    return compiled


def _partly_mapped(kind: str, step: Step, names: Iterable[str]) -> Step:
    """Mapped over one axis of two, the other of which is for the compiler."""
    return _placed_on_two_axes(_over("x", OF_X, step, names), axis_type=KINDS[kind])


def _nested(step: Step, names: Iterable[str]) -> Step:
    """Mapped over one axis in what is mapped over the other."""
    return _placed_on_two_axes(_over("x", OF_X, _over("y", OF_Y, step, names), names))


def _over(axis: str, specs: Any, step: Step, names: Iterable[str]) -> Step:
    ins, outs = (P(), specs, specs), (dict.fromkeys(names, specs), P(), P())
    return jax.shard_map(step, axis_names={axis}, in_specs=ins, out_specs=outs)


def _placed_on_two_axes(
    step: Step,
    grads_split: Mapping[str, P] = TWO_AXES,
    params_split: Mapping[str, P] = TWO_AXES,
    axis_type: AxisType = AxisType.Auto,
) -> Step:
    jitted = jax.jit(step)

    def on_devices(states: Any, grads: Any, params: Any) -> Any:
        with jax.set_mesh(two := two_axes(axis_type)):
            return jitted(states, placed(grads, grads_split, two), placed(params, params_split, two))

    return on_devices


def _laid_out(layout: str, kind: str, step: Step, names: Iterable[str]) -> Step:
    return _placed_on_two_axes(step, *LAYOUTS[layout], axis_type=KINDS[kind])


def _pmapped(step: Step, names: Iterable[str]) -> Step:
    each = pmap(step)

    def on_devices(states: Any, grads: Any, params: Any) -> Any:
        repeated = jax.tree.map(lambda x: np.broadcast_to(x, (DEVICES, *np.shape(x))), states)
        updates, *others = each(repeated, split(grads), split(params))
        for name in names:
            for path, value in jax.tree.leaves_with_path([part[name] for part in others]):
                key = jax.tree_util.keystr(path)
                if not any(metric in key for metric in left_out("pmap", name)):
                    assert same_bits([value[0]] * DEVICES, list(value)), f"{name}: {key} differs"
        whole = {name: jax.tree.map(lambda u, g: u.reshape(g.shape), updates[name], grads) for name in names}
        return whole, *jax.tree.map(lambda x: x[0], others)

    return on_devices


def left_out(way: str, name: str) -> tuple[str, ...]:
    """A metric that is not taken over a named axis: by how much entries came in outside their limits."""
    return ("violation",) if WAYS[way].axis_name and name in ("box", "non_negative") else ()


def pmap(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.pmap`, which returns NumPy arrays, and without the warning that it is deprecated."""

    def mapped(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return jax.tree.map(np.asarray, each(*args))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        each = jax.pmap(function, axis_name="d")
    return mapped


def placed(values: Any, specs: Mapping[str, P] = SPECS, on: Any = None) -> Any:
    """The tree on the devices, as its specs say."""
    on = mesh() if on is None else on
    return {key: jax.device_put(x, NamedSharding(on, specs[key])) for key, x in values.items()}


def split(values: Any) -> Any:
    """The tree's rows, for each device its own."""
    return jax.tree.map(lambda x: x.reshape(DEVICES, -1, x.shape[-1]), values)


NESTED = ("one of two axes", "beside an explicit axis", "one in the other")
IN_JIT = [f"{layout}, {kind}" for layout in LAYOUTS for kind in KINDS]
# With a named axis every unit counts as split, which those of rows are not.
NAMED = {name: build for name, build in MEMBERS.items() if name not in ("units of rows", *BY_TYPE)}
WAYS = {
    "one device": Way(_jitted, MEMBERS | SPECTRAL),
    "sharded jit": Way(_sharded, MEMBERS),
    "shard_map": Way(_mapped(SPECS, mesh), MEMBERS, SPECS),
    "two mesh axes": Way(_mapped(TWO_AXES, lambda: mesh(2, 4, names=("x", "y"))), MEMBERS, TWO_AXES),
    "unchecked": Way(_mapped(ROWS, mesh, check_vma=False), NAMED, None, "d"),
    "pmap": Way(_pmapped, NAMED, None, "d"),
    "one of two axes": Way(functools.partial(_partly_mapped, "automatic"), MEMBERS, shardings(TWO_AXES)),
    "beside an explicit axis": Way(
        functools.partial(_partly_mapped, "explicit"), MEMBERS, shardings(TWO_AXES)
    ),
    "one in the other": Way(_nested, MEMBERS, shardings(TWO_AXES)),
}
WAYS |= {way: Way(functools.partial(_laid_out, *way.split(", ")), MEMBERS | SPECTRAL) for way in IN_JIT}
# What is compiled by default; the other members are marked "full". To the library, sharded jit is nothing
# special, and pmap is nothing else than an unchecked shard_map: each member is in one of these two. Members
# that differ from others by nothing that depends on devices need not be in the checked shard_map as well.
ALIKE = ["non_negative", "unit_norm", "autoclip", "zclip", "lognormal", "bounded, zero", "bounded, skip"]
CHOSEN = {
    "sharded jit": ["global", "value", "units", "units of rows", "max_norm", "quantile", "agc"],
    "shard_map": [name for name in MEMBERS if name not in ALIKE],
    "two mesh axes": ["global", "value", "units", "units of rows", "rms of units"],
    "one of two axes": ["global", "value", "units", "units of rows", "max_norm", "agc", "bounded, skip"],
    "beside an explicit axis": ["global", "units"],
    "one in the other": [
        "global",
        "units",
        "units of rows",
        "min_max_norm",
        "tangent_cone",
        "skip_nonfinite",
    ],
    "pmap": [
        *("global", "global inf", "value", "box", "non_negative", "units", "min_max_norm", "unit_norm"),
        *ADAPTIVE,
        *("skip_nonfinite", "bounded, skip", "skip_spikes"),
    ],
}
for i, way in enumerate(IN_JIT):  # each member in one of them
    CHOSEN[way] = ["global", *list(MEMBERS | SPECTRAL)[i :: len(IN_JIT)]]
CHOSEN["unchecked"] = [*("global", "units"), *(name for name in NAMED if name not in CHOSEN["pmap"])]


def members(of: Iterable[str], *ways: str) -> list[Any]:
    """The parameters `way, name` of a test of some members, in the ways in which they can be run."""
    return [
        pytest.param(way, name, marks=() if name in CHOSEN[way] else pytest.mark.full)
        for way in ways
        for name in of
        if name in WAYS[way].members
    ]


class Program:
    """The steps of some members in one way, compiled together and run on trees of one shape."""

    def __init__(self, way: Way, names: Iterable[str]) -> None:
        txs = {name: way.members[name](way.specs, way.axis_name) for name in names}

        def step(states: Any, grads: Any, params: Any) -> tuple[Any, Any, Any]:
            done = {name: tx.update(grads, states[name], params) for name, tx in txs.items()}
            updates, new = ({name: pair[i] for name, pair in done.items()} for i in (0, 1))
            return updates, new, {name: clipjax.metrics(state) for name, state in new.items()}

        self.step = way.compiled(step, list(txs))
        self.states = jax.jit(lambda params: {name: tx.init(params) for name, tx in txs.items()})(tree())

    def steps(self, grads: Iterable[Any], params: Any) -> list[tuple[Any, Any]]:
        """The updates and the metrics of each step, by member."""
        states, found = self.states, []
        for each in grads:
            updates, states, seen = self.step(states, each, params)
            states = jax.tree.map(np.asarray, states)  # spread over devices they would be another program's
            found.append((updates, seen))
        return found


@functools.cache
def program(way: str, chosen: bool = True) -> Program:
    chosen_names = CHOSEN.get(way, WAYS[way].members)
    return Program(WAYS[way], [name for name in WAYS[way].members if (name in chosen_names) == chosen])


class Bad(NamedTuple):
    """Entries of one leaf, of the gradients or the weights, that a NaN or a spike is put into."""

    leaf: str
    entries: Any  # an index
    weights: bool = False
    value: float = np.nan


@functools.cache
def run(way: str, chosen: bool, bad: Bad | None) -> list[tuple[Any, Any]]:
    """The steps of all members: of gradients of several sizes, or a bad one, which has to come after
    others to be a spike.
    """
    grads, params = tree(0), tree(1)
    if bad is None:
        sized = [jax.tree.map(lambda x, n=n: (x * n).astype(x.dtype), grads) for n in (1, 3, 2, 9, 1)]
        return program(way, chosen).steps(sized, params)
    spoilt = tree(0)
    (params if bad.weights else spoilt)[bad.leaf][bad.entries] = bad.value
    before = [grads] * 3 if np.isfinite(bad.value) else []
    return program(way, chosen).steps([*before, spoilt], params)


def steps_of(way: str, name: str, bad: Bad | None = None) -> list[tuple[Any, Any]]:
    chosen = way not in CHOSEN or name in CHOSEN[way]
    return [(updates[name], seen[name]) for updates, seen in run(way, chosen, bad)]


def check(way: str, name: str) -> None:
    """A member's updates and metrics are, over some steps, those on one device; and the bound holds."""
    same(steps_of(way, name), steps_of("one device", name), but=left_out(way, name))
    held(steps_of(way, name)[0][0], name)


def same(got: Any, expected: Any, but: tuple[str, ...] = ()) -> None:
    """The same numbers, but for their rounding. Over devices, a maximum of NaN may be infinite."""
    paths, leaves = jax.tree.leaves_with_path(got), jax.tree.leaves(expected)
    assert len(paths) == len(leaves)
    for (path, a), b in zip(paths, leaves, strict=True):
        where, a, b = jax.tree_util.keystr(path), np.asarray(a), np.asarray(b)
        if any(metric in where for metric in but):
            continue
        assert a.dtype == b.dtype, f"{where}: {a.dtype} instead of {b.dtype}"
        finite = np.isfinite(b)
        np.testing.assert_array_equal(np.isfinite(a), finite, where)
        assert not np.any(np.isnan(b) & (a == -np.inf)), f"{where}: -inf instead of NaN"
        # Sums in another order may round one entry of 16 bits to its neighbor.
        tolerance = 1e-3 if b.dtype == np.float16 else 1e-6
        np.testing.assert_allclose(a[finite], b[finite], rtol=tolerance, atol=tolerance / 10, err_msg=where)


def held(updates: Any, name: str) -> None:
    """The bound, measured in float64 after all devices' parts are put together."""
    updates = jax.tree.map(np.asarray, updates)
    if name == "global":
        assert exact_tree_norm(updates) <= 1
    if name == "leaves":
        assert all(exact_norm(x) <= 1 for x in updates.values())
    if name in ("units", "units of rows"):
        axis = 0 if name == "units" else 1
        assert all((exact_norm(x, axis) <= 0.5).all() for x in updates.values())
    if name == "max_norm":
        params = tree(1)
        after = {key: (params[key] + u).astype(params[key].dtype) for key, u in updates.items()}
        assert all((exact_norm(x, 0) <= 0.5).all() for x in after.values())
