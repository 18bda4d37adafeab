"""States: the step, the metrics, and what a transformation itself remembers."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax._core.aliases import Memory, Metrics, Scalar, State, Tree
from clipjax._core.leaves import a_few
from clipjax._core.norms import sum_dtype

_MOST = np.iinfo(np.int32).max


class MetricsState(NamedTuple):
    """The state of a transformation that has metrics; `clipjax.metrics` reads it."""

    step: Scalar  # int32: how many updates there were
    # {transformation: {metric: scalar}}. The dtype says what is kept: a float is the
    # value at the last update; an int32 is the sum of ints over all updates; a uint32
    # is the number of updates at which a bool was true.
    metrics: dict[str, dict[str, jax.Array]]
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
    # int32 (n,): how many bad steps came directly after the first of a row; -1 for
    # these, and where no step is kept.
    followed_by: jax.Array
    # float (n, 4 + names): norm, threshold, loss, its threshold, and then all norms, in
    # the order of their names, as JAX sorts the keys of the metrics.
    rows: jax.Array
    usual: jax.Array  # float (names,), likewise: the norms at the last fine step
    # int32 (names,): the places of the names in the order of the model. The last update
    # writes it, since a restart may bring another order.
    order: jax.Array


# What a row has in place of a loss that was not given. NaN would raise under
# `jax_debug_nans` where nothing is wrong, and infinity may be a loss.
UNKNOWN = -(2.0**127)


_ADOPT = (
    "; to go on from another chain, call clipjax.adopt(old, into=tx.init(params)), "
    "with like=, what init of the old chain returns, if a checkpoint restored dicts"
)


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


def as_logged(metrics: Mapping[str, Any]) -> Metrics:
    """Return the form in which a state keeps the metrics of one step."""
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


def next_metrics(name: str, old: Any, logged: Metrics) -> Any:
    """Return the metrics after a step."""
    if not isinstance(old, Mapping):  # of a tree without leaves
        return old
    pairs = (old, logged), (logged, old)
    only = (a_few(sorted({*a} - {*b})) or "no others" for a, b in pairs)
    check_same(f"metrics of {name}", *only)
    return {key: _next(logged[key], old[key]) for key in logged}


def _next(new: jax.Array, old: Any) -> jax.Array:
    old = jnp.asarray(old)
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

    return jax.tree.map(select, new, old)


def saturating_add(counter: jax.Array, more: jax.Array) -> jax.Array:
    """Add to counters, which stop at the largest int32."""
    most = jnp.asarray(_MOST, counter.dtype)
    return jnp.where(counter > most - jnp.maximum(more, 0), most, counter + more)
