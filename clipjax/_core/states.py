"""States: what a transformation remembers, and the metrics that it logs."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.aliases import Metrics, Scalar
from clipjax._core.messages import a_few
from clipjax._core.norms import sum_dtype

_SEPARATOR = ", "
# A checkpoint may make a file name of a key, which has at most 255 bytes.
_LONGEST_KEY = 160

# In place of a loss that is not given, in the rows of bad steps. NaN would raise under
# `jax_debug_nans` where nothing is wrong, and a loss may be infinite.
NO_LOSS = -(2.0**127)


class MetricsState(NamedTuple):
    """The state of a transformation that has metrics; `clipjax.metrics` reads it.

    Numbers share arrays, since each array of a state costs time at each call of a step.
    The keys name them in order: `{"zclip/norm, scale": [2.0, 0.5]}`.
    """

    last: Metrics  # float (metrics,): those of the last update
    # int32 (1 + metrics,): `steps`, how many updates there were; the sums of int
    # metrics over all of them; and as `<metric>/steps` at how many a bool was true
    counts: Metrics
    memory: Any  # what the transformation itself remembers

    @property
    def step(self) -> Scalar:
        """How many updates there were."""
        return next(row[..., 0] for key, row in self.counts.items() if has_steps(key))


class BadSteps(NamedTuple):
    """The bad steps that a recorder keeps."""

    past: Any  # the windows of norms and losses that a step is compared with
    entered: Scalar  # int32: how many bad steps there were, as in a ring
    steps: jax.Array  # int32 (n,): how many updates there were before each
    # float (n, 3 + names): norm, threshold, loss, and all norms of the recorder
    rows: jax.Array


class NormsState(NamedTuple):
    """The state of a recorder of norms; `clipjax.metrics` reads it.

    One array holds them all, since a thousand would cost time at each call. Each has a
    key without a value. `nnx.state` loses such keys, but not the text.
    """

    step: Scalar  # int32: how many updates there were
    names: dict[str, tuple[()]]  # `<updates or params>/<group>`, sorted
    norms: jax.Array  # float (names,): those of the last update
    kept: dict[str, BadSteps]  # by what the updates are called; empty if none are kept
    text: jax.Array  # uint8: the names, in lines


def first_state(name: str, metrics: Mapping[str, Any], memory: Any) -> MetricsState:
    """Return the state before the first step, for metrics of these dtypes."""
    floats = {key: sum_dtype(x.dtype) for key, x in metrics.items() if _is_float(x)}
    last = _zeros(name, sorted(floats), np.result_type(np.float32, *floats.values()))
    counts = _zeros(name, ["steps", *sorted(_counts_in(metrics))], np.int32)
    return MetricsState(last, counts, memory)


def next_state(state: MetricsState, metrics: Metrics, memory: Any) -> MetricsState:
    """Return the state after a step with these metrics.

    A state that was made for other metrics is an error.
    """
    metrics = lax.stop_gradient(metrics)
    floats = {key: x for key, x in metrics.items() if _is_float(x)}
    counted = {"steps": np.int32(1)} | _counts_in(metrics)
    given = {*floats, *counted}
    known = {*_metrics_in(state.last), *_metrics_in(state.counts)}
    if given != known:
        more = sorted(given - known)
        less = sorted(known - given)
        raise ValueError(
            f"state: that of {name_in(state.counts)} was made for other metrics; this "
            f"step has {a_few(more, 5) or 'none'} more, and "
            f"{a_few(less, 5) or 'none'} less"
        )
    last = {
        key: jnp.stack([floats[x].astype(row.dtype) for x in _metrics_of(key, row)])
        for key, row in state.last.items()
    }
    counts = {
        key: saturating_add(
            row, jnp.stack([_as_int32(counted[x]) for x in _metrics_of(key, row)])
        )
        for key, row in state.counts.items()
    }
    return MetricsState(last, counts, memory)


def saturating_add(counter: jax.Array, more: jax.Array) -> jax.Array:
    """Add int32 numbers to int32 counters, which stop at their largest value."""
    most = np.iinfo(np.int32).max
    return jnp.where(counter > most - jnp.maximum(more, 0), most, counter + more)


def _as_int32(x: Any) -> Any:
    if not np.can_cast(x.dtype, np.int32):  # it has larger numbers
        x = jnp.minimum(x, np.iinfo(np.int32).max)
    return x.astype(np.int32)


def scalars_in(rows: Metrics) -> Metrics:
    """Return each metric by its whole name, `<transformation>/<metric>`."""
    name = name_in(rows)
    return {
        f"{name}/{metric}": row[..., i]
        for key, row in rows.items()
        for i, metric in enumerate(_metrics_of(key, row))
    }


def name_in(rows: Metrics) -> str:
    """Return the name of the transformation that rows are of."""
    return next(iter(rows), "").partition("/")[0]


def has_steps(key: Any) -> bool:
    """Return whether the first metric of a row is how many updates there were."""
    names = str(key).partition("/")[2]
    return names.split(_SEPARATOR)[0] == "steps"


def check_state(name: str, kind: type[Any], state: Any) -> None:
    """Raise an error if a state is not one that `init` returned, but of others."""
    is_ours = isinstance(state, MetricsState)
    found = name_in(state.counts) if is_ours else name
    if not isinstance(state, kind) or found != name:
        given = f"that of {found}" if found != name else type(state).__name__
        raise TypeError(
            f"state: {name} needs the state that its init returned, got {given}"
        )


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _counts_in(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return int metrics, and as `<metric>/steps` bools."""
    return {
        f"{key}/steps" if x.dtype == bool else key: x
        for key, x in metrics.items()
        if not _is_float(x)
    }


def _zeros(name: str, metrics: list[str], dtype: Any) -> Metrics:
    """Return rows of zeros for metrics: one, or one for each if its key is too long."""
    together = _SEPARATOR.join(metrics)
    is_short = len(together.encode()) <= _LONGEST_KEY
    can_be_split = together.split(_SEPARATOR) == metrics
    keys = [together] if is_short and can_be_split else metrics
    return {
        f"{name}/{key}": jnp.zeros(len(metrics) // len(keys), dtype) for key in keys
    }


def _metrics_in(rows: Metrics) -> list[str]:
    return [metric for key, row in rows.items() for metric in _metrics_of(key, row)]


def _metrics_of(key: str, row: jax.Array) -> list[str]:
    """Return the names of the metrics in a row."""
    names = key.partition("/")[2]
    return [names] if row.shape[-1] == 1 else names.split(_SEPARATOR)
