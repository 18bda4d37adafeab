"""States: the step, the metrics, and what a transformation itself remembers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.tree_util import GetAttrKey

from clipjax._core.aliases import DType, Memory, Scalar, State, Tree
from clipjax._core.messages import a_few
from clipjax._core.norms import stack, sum_dtype

_MOST = np.iinfo(np.int32).max


class MetricsState(NamedTuple):
    """The state of a transformation that has metrics; `clipjax.metrics` reads it."""

    step: Scalar  # int32: how many updates there were
    # {transformation: {metric: scalar}}, or a table. The dtype says what is kept: a
    # float is the value at the last update; an int32 is the sum of ints over all
    # updates; a uint32 is the number of updates at which a bool was true.
    metrics: dict[str, dict[str, jax.Array] | Table]
    memory: Memory  # what the transformation itself remembers


class NamedState(NamedTuple):
    """The state of transformations whose metrics begin with a name."""

    named: dict[str, Any]  # {name: their state}


class SkipMemory(NamedTuple):
    """What a transformation that skips steps remembers."""

    past: Memory  # what a step is compared with
    # int32: the number of steps skipped in a row. It is negative while bad steps are
    # applied because this many steps were skipped before them.
    in_a_row: Scalar
    inner: Any  # the state of the inner transformation


class BadSteps(NamedTuple):
    """The last bad steps that `record_norms` keeps, the newest last."""

    past: Memory  # the windows of norms and losses that a step is compared with
    held: Scalar  # int32: how many are kept
    steps: jax.Array  # int32 (n,): how many updates there were before each
    # float (n, 3 + names): norm, threshold, loss, and all norms of the table
    rows: jax.Array


# What the rows of bad steps have in place of a loss that was not given, and of the norm
# of a group that was not measured then. NaN would raise under `jax_debug_nans` where
# nothing is wrong, and infinity may be a loss.
UNKNOWN = -(2.0**127)


Names: TypeAlias = tuple[tuple[str, ...], ...]  # of floats, of ints, and of bools


class _Arrays(NamedTuple):
    text: jax.Array  # uint8: the names, one a line, in a paragraph for each kind
    floats: jax.Array
    counts: jax.Array | None  # int32: of the ints, and then of the bools


class Table(_Arrays):
    """Metrics whose names may depend on the tree: arrays, and names of their elements.

    The names are a leaf of the state, as text. They are no part of its structure, which
    must not depend on the paths of a tree: `optax.tree.map_params` calls `init` with a
    single placeholder. While a step is traced, the text cannot be read, so that the
    node carries the names along, too.
    """

    names: Names = ()  # nothing at all while they are not known

    def __new__(
        cls, text: Any, floats: Any, counts: Any = None, names: Names = ()
    ) -> Self:
        made = super().__new__(cls, text, floats, counts)
        made.names = names or _names_in(text)
        return made

    def _replace(self, **fields: Any) -> Self:
        names = () if "text" in fields else self.names
        text, floats, counts = super()._replace(**fields)
        return type(self)(text, floats, counts, names)

    @property
    def known_names(self) -> Names:
        """The names of floats, ints and bools; `record_norms` has floats alone."""
        names = self.names or _names_in(self.text)
        if not names:
            raise ValueError(
                "opt_state: inside jit, the names of norms are not known in a state "
                "that was restored or mapped, or in nnx.state: call this function "
                "outside of jit or after an update, or pass the optimizer itself"
            )
        return (*names, (), ())[:3]


def _names_in(text: Any) -> Names:
    """Return the names in a text, or none if it is traced or a placeholder."""
    letters: Any = next(iter(jax.tree.leaves(text)), None)  # in a box of Flax NNX
    is_array = isinstance(letters, jax.Array | np.ndarray)
    if not is_array or isinstance(letters, jax.core.Tracer) or letters.dtype != "uint8":
        return ()
    if not letters.size:  # of an ensemble without members
        return ()
    parts = decoded(letters)[:-1].split("\n\n")
    return tuple(tuple(part.split("\n")) if part else () for part in parts)


def decoded(letters: Any) -> str:
    """Return the text in an array of bytes; stacked states have the same text."""
    array = np.asarray(jax.device_get(letters))
    return array[(0,) * (array.ndim - 1)].tobytes().decode()


class _Carried:
    """Names in the structure of a tree; they differ only from other known names."""

    def __init__(self, names: Names) -> None:
        self.names = names

    def __eq__(self, other: object) -> bool:
        both = self.names, getattr(other, "names", ())
        return not all(both) or both[0] == both[1]

    def __hash__(self) -> int:
        return 0


def _carrying(carried: _Carried, arrays: Iterable[Any]) -> Table:
    text, floats, counts = arrays
    return Table(text, floats, counts, carried.names)


jax.tree_util.register_pytree_with_keys(
    Table,
    lambda table: (
        tuple(zip(map(GetAttrKey, table._fields), table, strict=True)),
        _Carried(table.names),
    ),
    _carrying,
)


def table(names: Names, floats: jax.Array, counts: jax.Array | None = None) -> Table:
    """Return a table, with its names as text, one a line."""
    broken = [name for name in itertools.chain(*names) if "\n" in name]
    if broken:
        raise ValueError(f"metrics: a name must be one line of text, got {broken[0]!r}")
    text = "\n\n".join("\n".join(each) for each in names)
    letters = jnp.asarray(np.frombuffer(f"{text}\n".encode(), np.uint8))
    return Table(letters, floats, counts, names)


def table_of(metrics: Mapping[str, Any]) -> Table:
    """Return single metrics as a table."""
    logged = as_logged(metrics)
    kinds = (np.floating, np.signedinteger, np.unsignedinteger)
    names = tuple(
        tuple(key for key, x in logged.items() if jnp.issubdtype(x.dtype, kind))
        for kind in kinds
    )
    floats = [logged[key] for key in names[0]]
    counts = [logged[key].astype(np.int32) for key in names[1] + names[2]]
    return table(names, _stacked(floats, np.float32), _stacked(counts, np.int32))


def _stacked(scalars: Sequence[jax.Array], dtype: DType) -> jax.Array:
    """Return scalars in one array, or a 0: Orbax saves no array without elements."""
    wide = np.result_type(dtype, *(x.dtype for x in scalars))
    return stack(x.astype(wide) for x in scalars or [jnp.zeros((), wide)])


_ADOPT = "; to go on from another chain, call clipjax.adopt(old, tx.init(params))"


def check_state(name: str, state: State, kind: type[Any] = MetricsState) -> None:
    """Raise unless the `init` of the transformation with this name made the state."""
    if state is None or isinstance(state, optax.EmptyState):
        raise ValueError(
            f"state: {name} needs the state that init returned, got {state!r}{_ADOPT}"
        )
    found = name_of(state) if isinstance(state, MetricsState) else name
    if not isinstance(state, kind) or found != name:
        given = f"that of {found}" if found != name else type(state).__name__
        raise TypeError(
            f"state: {name} needs the state that its init returned, got {given}{_ADOPT}"
        )


def check_same(argument: str, then: Any, now: Any) -> None:
    """Raise if a state was made with other arguments, or for another tree, than now."""
    if then != now:
        raise ValueError(f"{argument}: the state was made with {then}, got {now}")


def name_of(state: MetricsState) -> str:
    """Return the name of the transformation whose state this is."""
    return next(iter(state.metrics))


def as_logged(metrics: Mapping[str, Any] | Table) -> Any:
    """Return the form in which a state keeps the metrics of one step."""
    if isinstance(metrics, Table):  # what makes it stops its derivatives
        return metrics
    logged = {key: _logged(x) for key, x in metrics.items()}
    if "norm" in metrics and jnp.issubdtype(metrics["norm"].dtype, jnp.floating):
        is_bad = ~jnp.isfinite(metrics["norm"])
        logged["nonfinite_count"] = is_bad.astype(np.int32)
    return lax.stop_gradient(dict(sorted(logged.items())))


def _logged(x: jax.Array) -> jax.Array:
    if x.dtype == bool:
        return x.astype(np.uint32)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(sum_dtype(x.dtype))
    if not np.can_cast(x.dtype, np.int32):  # such as int64
        x = jnp.minimum(x, _MOST)
    return x.astype(np.int32)


def first_metrics(shapes: Any, has_leaves: bool) -> Any:
    """Return metrics of these shapes before the first step, in buffers of their own."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    if not isinstance(zeros, Table):
        return zeros
    first = table(zeros.names, zeros.floats, zeros.counts)
    # The placeholder of `optax.tree.map_params` has no leaves, so that not all of the
    # names are known: then none is carried.
    if not has_leaves:
        first.names = ()
    return first


def next_metrics(name: str, old: Any, logged: Any) -> Any:
    """Return the metrics after a step."""
    both = old, logged
    names = list(map(_names_of, both))
    if all(not isinstance(each, Table) or each.names for each in both):
        check_same(f"metrics of {name}", *(a_few(each, 40) for each in names))
    return jax.tree.map(_next, logged, old)


def _names_of(metrics: Any) -> list[str]:
    is_table = isinstance(metrics, Table)
    return sorted(itertools.chain(*metrics.names) if is_table else metrics)


def _next(new: jax.Array, old: Any) -> jax.Array:
    old = jnp.asarray(old)
    if old.dtype == np.uint8:  # the names
        return old
    check_same("metrics", old.shape, new.shape)
    if jnp.issubdtype(old.dtype, jnp.floating):
        return new.astype(old.dtype)
    return saturating_add(old, new)


def old_if(stays: Scalar, old: Tree, new: Tree) -> Any:
    """Return the old tree, in the dtypes of the new one, or the new tree."""

    def select(new: Any, old: Any) -> jax.Array:
        new, old = jnp.asarray(new), jnp.asarray(old)
        same = old if old.dtype == new.dtype else old.astype(new.dtype)
        return lax.select(stays, same, new)

    # The new tree first: the names of its tables are known.
    return jax.tree.map(select, new, old)


def saturating_add(counter: jax.Array, more: jax.Array) -> jax.Array:
    """Add to counters, which stop at the largest int32."""
    most = jnp.asarray(_MOST, counter.dtype)
    return jnp.where(counter > most - jnp.maximum(more, 0), most, counter + more)
