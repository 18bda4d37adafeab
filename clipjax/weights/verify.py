"""Which weights are out of bounds: for tests, averages and casts of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clipjax._core.arguments import explained
from clipjax._core.axes import leaves_with_paths, path_name
from clipjax._core.links import Chain
from clipjax._core.norms import only_arrays
from clipjax.weights.projections import Projection
from clipjax.weights.sequences import as_projections, projections_of


class Violation(NamedTuple):
    """One unit that is out of bounds, in Python's own numbers, which are float64."""

    path: str
    """The leaf, as `"encoder/Dense_0/kernel"`."""
    unit: tuple[int, ...]
    """The index of the unit along the axes that are kept; `()` for a whole leaf."""
    value: float
    """What is bounded: a norm, an entry; for a function of the weights how far it would move the leaf."""
    low: float
    high: float

    @property
    def excess(self) -> float:
        """By how much `value` is above `high` or below `low`; NaN if it is."""
        return max(self.value - self.high, self.low - self.value)

    def __str__(self) -> str:
        unit = f", unit {self.unit}" if self.unit else ""
        side, limit = ("below", self.low) if self.value < self.low else ("above", self.high)
        return f"{self.path}{unit}: {self.value:.9g}, {side} {limit:.9g} by {self.excess:.3g}"


@explained
def verify(
    params: Any,
    projection: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | optax.GradientTransformation,
    *,
    step: Any = None,
) -> list[Violation]:
    """List the units of weights that are out of bounds, the worst first.

    For tests, and for weights that no projection has seen: averages (of weights inside a ball, they are
    inside it), and casts to 16 bits (which are often outside: project them again).

    Args:
      params: concrete weights, as a Linen or Equinox tree or an `nnx.State`. What is no array is left
        out.
      projection: a projection, as `clipjax.max_norm(3.0)`; any function of the weights, whose `value` is
        the distance by which it would move a leaf, rounding included; several in a sequence; or what
        `clipjax.chain` or `clipjax.bounded` returned.
      step: the step at which to evaluate bounds that are schedules. The last step of a chain is its
        metric `steps` - 1.

    Returns:
      A list of `Violation(path, unit, value, low, high)` with its `excess`; empty if all obey, so that a
      test says `assert not clipjax.verify(params, clipjax.max_norm(3.0))`. NaN does not obey.

    Raises:
      TypeError: `projection` is none, or `params` are traced: call it outside `jit`.
      ValueError: `projection` is a chain without one, or has a schedule and `step` is missing.

    Guarantees: measured in float64, with no tolerance.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.array([[3.0, 0.3], [4.0, 0.4]])  # (in, out): a unit is a column
      >>> clipjax.verify({"kernel": kernel}, clipjax.max_norm(1.0))
      [Violation(path='kernel', unit=(0,), value=5.0, low=0.0, high=1.0)]
      >>> clipjax.verify({"kernel": kernel}, clipjax.max_norm(6.0))
      []
    """
    found = [violation for row in judged(params, projection, step) for violation in _violations(row)]
    return sorted(found, key=lambda v: -np.inf if np.isnan(v.excess) else -v.excess)


class Judged(NamedTuple):
    """The units of a leaf and their bounds: float64 arrays of one shape, whose reduced axes have size 1."""

    path: str
    shape: tuple[int, ...]  # of the leaf
    eps: float  # of its dtype
    value: np.ndarray
    low: np.ndarray
    high: np.ndarray


def judged(params: Any, projection: Any, step: Any) -> Iterator[Judged]:
    """Measure what each projection bounds, leaf by leaf; arguments and errors as those of :func:`verify`."""
    if isinstance(params, optax.GradientTransformation):
        raise TypeError(f"params must be weights, as in verify(params, projection), got {params!r}")
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params)):
        raise TypeError("params: verify looks at concrete weights, but these are traced: call it outside jit")
    params = only_arrays(params)
    leaves = {path_name(path): leaf for path, leaf in leaves_with_paths(params)}
    for each in _projections(projection):
        for measured in each.measure(params, step):
            leaf = leaves[measured.path]
            values = measured.value, measured.low, measured.high
            if any(isinstance(x, jax.core.Tracer) for x in values):
                raise TypeError("projection: its bound is traced: call verify outside jit")
            arrays = np.broadcast_arrays(*(_fetched(x) for x in values))
            yield Judged(measured.path, np.shape(leaf), float(jnp.finfo(leaf.dtype).eps), *arrays)


def _projections(projection: Any) -> tuple[Projection, ...]:
    if isinstance(projection, Chain):
        found = projections_of(projection)
        where = "this chain has none"
    else:
        found = as_projections("projection", projection)
        where = "there is none"
    if not found:
        raise ValueError(f"projection: {where}, so that nothing is bounded")
    return found


def _violations(row: Judged) -> list[Violation]:
    value, low, high = row.value, row.low, row.high
    # Reduced axes are there still, with a size of 1.
    kept = [i for i, n in enumerate(value.shape) if value.ndim != len(row.shape) or n == row.shape[i]]
    return [
        Violation(
            row.path,
            tuple(int(at[i]) for i in kept),
            *(float(x[tuple(at)]) for x in (value, low, high)),
        )
        for at in np.argwhere(~((value >= low) & (value <= high)))
    ]


def _fetched(x: Any) -> np.ndarray:
    """All of an array, of which other processes may have a part."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        from jax.experimental import multihost_utils  # which takes a while, and few need

        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x, np.float64)
