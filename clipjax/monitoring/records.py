"""Norms in the state of a chain, for a logger, without clipping."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

from clipjax._core.arguments import explained, shown
from clipjax._core.axes import is_measured
from clipjax._core.bounds import check_count
from clipjax._core.dtypes import as_arrays, in_float64, is_array, norm_dtype, only_arrays
from clipjax._core.links import Recorder
from clipjax._core.members import check_state, matching
from clipjax._core.mesh import AxisName, names_of_leaves
from clipjax._core.norms import joint_norms, norms_of, tree_norm
from clipjax._core.paths import first_matches, leaves_with_paths, path_name
from clipjax._core.stats import count

Of = Literal["updates", "params", "ratio"]
Groups: TypeAlias = Literal["leaf"] | int | Sequence[str] | None
Norms: TypeAlias = dict[str, jax.Array]  # by group; the whole tree has the key ""


class Recorded(NamedTuple):
    """What :func:`record_norms` has measured."""

    steps: jax.Array  # int32: steps so far
    nonfinite: jax.Array  # int32: measured steps at which a norm was not finite
    norms: dict[str, Norms]  # by what was measured ("updates", "params", "ratio"), then by group


class RecordNormsState(NamedTuple):
    """State of :func:`record_norms`."""

    record_norms: Recorded


@explained
def record_norms(
    groups: Groups = None,
    *,
    of: Of | Sequence[Of] = ("updates",),
    every: int = 1,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Record norms for a logger, and change nothing.

    At the start of a chain it records the gradients, at the end the updates that reach the parameters. In a
    compiled step, XLA measures each leaf only once for this and for a clip beside it.

    Args:
      groups: which leaves share a norm. None: the whole tree. `"leaf"`: each leaf has its own. An int n:
        leaves whose paths have the same first n components, so that 1 gives a norm for each top-level module.
        Path patterns, as in :func:`clip_by_group_norm`: leaves belong to the first pattern that matches them,
        and leaves that no pattern matches are left out.
      of: what is measured: `"updates"`, `"params"`, or `"ratio"`, the norm of a group's updates divided by
        that of its parameters; one of these or several.
      every: measure only at every `every`-th step, beginning with the first, and keep the last norms in
        between.
      axis_name: the mesh axes that split the leaves, in `pmap` and unchecked `shard_map`: names, or a mapping
        from path patterns to names, as in :func:`clip_by_global_norm`.

    Returns:
      A transformation with the metrics `record_norms/<of>/<group>`, or `record_norms/<of>` for the whole
      tree: float scalars, 0 before the first step. The metric `nonfinite_count` counts the measured steps at
      which a norm was not finite. With `"params"` or `"ratio"` it needs `params` in `update`. A ratio is
      infinite where only the parameters are 0, and 0 where both are.

    Raises:
      TypeError, ValueError: an argument has none of these forms. In `init`: a pattern matches no leaf. In
        `update`: norms of parameters are asked for, but `params` are missing.

    Guarantees: the updates come back unchanged, bit for bit; norms neither overflow nor underflow, and a norm
    is not finite exactly if an entry is not (or if the norm is beyond float32).

    With `every` above 1, a step branches on whether to measure. On an accelerator, the branch costs more than
    it saves if a clip beside it measures the same leaves anyway.

    Example:
      >>> import clipjax, optax, jax.numpy as jnp
      >>> params = {"encoder": {"w": jnp.array([3.0, 4.0])}, "head": jnp.array([2.0])}
      >>> tx = optax.chain(optax.sgd(0.1), clipjax.record_norms(1, of=("updates", "ratio")))
      >>> _, state = tx.update(params, tx.init(params), params)
      >>> for name, value in clipjax.metrics(state).items():
      ...     print(name, value)
      record_norms/steps 1
      record_norms/nonfinite_count 0
      record_norms/ratio/encoder 0.1
      record_norms/ratio/head 0.1
      record_norms/updates/encoder 0.5
      record_norms/updates/head 0.2
    """
    group_of = _check_groups(groups)
    measured = tuple(of) if isinstance(of, list | tuple) else (of,)
    if not measured or not all(isinstance(x, str) and x in get_args(Of) for x in measured):
        raise ValueError(f"of must be one or several of {get_args(Of)}, got {shown(of)}")
    period = check_count("every", every, 1)
    needs_params = measured != ("updates",)

    def init(params: Any) -> RecordNormsState:
        params = only_arrays(params)
        dtype, names = norm_dtype(jax.tree.leaves(params)), group_of(params)
        found = sorted({name for name in names if name is not None}) if names is not None else [""]
        counter = functools.partial(jnp.zeros, (), jnp.int32)  # separate buffers, to be donated
        zeros = {str(what): {name: jnp.zeros((), dtype) for name in found} for what in sorted(measured)}
        return RecordNormsState(Recorded(counter(), counter(), zeros))

    @in_float64
    def norms(tree: Any) -> Norms:
        tree = lax.stop_gradient(tree)
        names = group_of(tree)
        if names is None:
            return {"": tree_norm(tree, 2.0, axis_name)}
        each = zip(names, jax.tree.leaves(tree), names_of_leaves(tree, axis_name), strict=True)
        chosen = [(name, (x,), over) for name, x, over in each if name is not None and is_measured(x)]
        labels, leaves, over = zip(*chosen, strict=True) if chosen else ((), (), ())
        return joint_norms(labels, norms_of(leaves, [None] * len(leaves), 2.0, over), 2.0)

    @in_float64
    def measure(updates: Any, params: Any, old: Recorded) -> Recorded:
        sides = {"updates": updates, "params": params}
        found = {side: norms(sides[side]) for side in sides if {side, "ratio"} & set(measured)}
        if "ratio" in measured:
            params_of = found["params"]  # integer parameters have no norm, even if their updates have one
            pairs = {name: (x, params_of[name]) for name, x in found["updates"].items() if name in params_of}
            found["ratio"] = {name: _ratio(*pair) for name, pair in pairs.items()}
        bad = [~jnp.isfinite(x) for what in measured if what != "ratio" for x in found[what].values()]

        def stored(what: str, name: str, was: jax.Array) -> jax.Array:
            return lax.convert_element_type(found[what].get(name, jnp.zeros(())), was.dtype)

        return old._replace(
            nonfinite=count(old.nonfinite, jnp.any(jnp.stack(bad)) if bad else jnp.zeros((), bool)),
            norms={
                what: {name: stored(what, name, was) for name, was in each.items()}
                for what, each in old.norms.items()
            },
        )

    def update(
        updates: Any, state: RecordNormsState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, RecordNormsState]:
        del extra_args
        check_state("record_norms", RecordNormsState, state)
        updates, old = as_arrays(updates), state.record_norms
        params = matching("record_norms", updates, params, f"measures {shown(of)}") if needs_params else None
        due = old.steps % period == 0
        if isinstance(period, int) and period == 1:
            new = measure(updates, params, old)
        elif isinstance(due, jax.core.Tracer):
            new = lax.cond(due, measure, lambda *args: args[-1], updates, params, old)
        else:  # without jit, every step would compile the branch again
            new = measure(updates, params, old) if due else old
        return updates, RecordNormsState(new._replace(steps=count(old.steps, jnp.ones((), bool))))

    return Recorder(init, update)


def _check_groups(groups: Any) -> Callable[[Any], list[str | None] | None]:
    """Return the function that names the group of each leaf of a tree; it returns None for a single group."""
    if groups is None:
        return lambda _: None
    if isinstance(groups, int) and not isinstance(groups, bool):
        depth = check_count("groups", groups, 1)
        return lambda tree: _names(tree, depth)
    if groups == "leaf":
        return _names
    if is_array(groups):
        raise TypeError(
            "groups must be known when tracing, because it names the metrics, got "
            f"{shown(groups)}: name it in static_args of optax.inject_hyperparams"
        )
    patterns = groups if isinstance(groups, Sequence) and not isinstance(groups, str) else None
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"groups must be None, 'leaf', an int or a list of path patterns, got {shown(groups)}"
        )
    return lambda tree: first_matches("groups", patterns, tree)


def _names(tree: Any, depth: int | None = None) -> list[str | None]:
    """Return for each leaf that has a norm its path, or the first components of it."""
    return [path_name(path[:depth]) if is_measured(leaf) else None for path, leaf in leaves_with_paths(tree)]


def _ratio(updates: jax.Array, params: jax.Array) -> jax.Array:
    both = (params == 0) & (updates == 0)
    return jnp.where(both, 0.0, updates / jnp.where(both, 1.0, params))
