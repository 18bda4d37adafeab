"""List the weights that are out of bounds: for tests, and for averages and casts of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clipjax._core.arguments import explained
from clipjax._core.axes import leaves_with_paths, path_name
from clipjax._core.dtypes import only_arrays
from clipjax._core.links import Chain
from clipjax.weights.projections import Projection
from clipjax.weights.sequences import as_projections, projections_of


class Violation(NamedTuple):
    """A unit that is out of bounds. The numbers are Python floats, which are float64."""

    path: str
    """The path of the leaf, such as `"encoder/Dense_0/kernel"`."""
    unit: tuple[int, ...]
    """The index of the unit along the axes that are not reduced; `()` for a whole leaf."""
    value: float
    """The bounded value: a norm or an entry; for a function of the weights, how far it moves the leaf."""
    low: float
    """The lower bound of `value`; 0.0 if only `high` bounds a norm."""
    high: float
    """The upper bound of `value`."""

    @property
    def excess(self) -> float:
        """By how much `value` is above `high` or below `low`; NaN if `value` is NaN."""
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

    Use it in tests, and for weights that were not projected themselves: averages (averages of weights inside
    a ball are inside it), and casts to 16 bits (which are often outside: project them again).

    Args:
      params: concrete weights, as a Linen or Equinox tree or an `nnx.State`. Leaves that are not arrays are
        ignored.
      projection: a projection, such as `clipjax.max_norm(3.0)`; any function of the weights, in which case
        `value` is the distance by which it would move a leaf, rounding included; a sequence of several; or
        what `clipjax.chain` or `clipjax.bounded` returned.
      step: the step at which to evaluate bounds that are schedules. The last step of a chain is its
        metric `steps` - 1.

    Returns:
      A list of `Violation(path, unit, value, low, high)`, each with an `excess`. It is empty if all units are
      in bounds, so a test can say `assert not clipjax.verify(params, clipjax.max_norm(3.0))`. NaN is out of
      bounds.

    Raises:
      TypeError: `projection` is not a projection, or `params` are traced: call `verify` outside `jit`.
      ValueError: `projection` is a chain without a projection, or has a schedule and `step` is missing.

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
    """Measure what each projection bounds, leaf by leaf; arguments and errors as in :func:`verify`."""
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
        where = "this chain has no projection"
    else:
        found = as_projections("projection", projection)
        where = "there is no projection"
    if not found:
        raise ValueError(f"projection: {where}, so nothing is bounded")
    return found


def _violations(row: Judged) -> list[Violation]:
    value, low, high = row.value, row.low, row.high
    # Reduced axes are still present, with a size of 1.
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
    """Return a whole array, parts of which may be on other processes."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        from jax.experimental import multihost_utils  # slow to import, and rarely needed

        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x, np.float64)
