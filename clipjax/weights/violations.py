"""A list of the weights that a projection would still change.

It is for tests, and for averages and casts of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from clipjax._core.aliases import SKIP, Reduced, Skip, Step, Tree
from clipjax._core.bounds import as_list
from clipjax._core.leaves import Leaf, flatten, is_inexact
from clipjax.weights.projection import Projection, as_projection


class Violation(NamedTuple):
    """Weights that a projection would change; `print` writes `kernel[:, 0]: 5 -> 2`."""

    path: str  # of the leaf, such as "encoder/Dense_0/kernel"
    unit: str  # its index as NumPy writes it, such as "[:, 0]"; "" for the whole leaf
    # The norm of a unit that would be rescaled; otherwise the element that would change
    # most.
    before: float
    after: float  # the same after the projection
    entries: int  # the number of elements that would change

    @property
    def change(self) -> float:
        """The change, as a fraction of the larger number; inf for NaN."""
        distance = abs(self.after - self.before)
        size = max(abs(self.before), abs(self.after)) or 1.0
        return distance / size if np.isfinite(distance) else np.inf

    def __str__(self) -> str:
        return f"{self.path}{self.unit}: {self.before:.5g} -> {self.after:.5g}"


def violations(
    params: Tree,
    projection: Projection
    | Callable[[Any], Any]
    | Sequence[Projection | Callable[[Any], Any]],
    *,
    old: Any = None,
    step: Step = None,
) -> list[Violation]:
    """List the weights that a projection would still change, the largest change first.

    Changes are compared as fractions of the larger of what is before and after.

    Use it in tests, after loading a checkpoint, and for weights that no projection has
    seen, such as averages of weights and casts to 16 bits.

    Args:
      params: the weights: concrete arrays, not tracers, that lie on devices of this
        process.
      projection: a projection such as `clipjax.max_norm(3.0)`, a function of the
        weights, or a sequence of these. Each projection of a sequence is applied to
        `params`, and not to the result of another projection.
      old: the weights before the update, which :func:`keep_norm` needs; None by
        default.
      step: the step at which bounds that are schedules are evaluated; None by default.

    Returns:
      A list of `Violation(path, unit, before, after, entries)`, which is empty if
      nothing would change. For `max_norm`, `min_max_norm`, `unit_norm` and `keep_norm`,
      the list has one violation for each unit that would be rescaled, and `before` and
      `after` are the norms of this unit. For other projections, the list has one
      violation for each leaf that would change, and `before` and `after` are the values
      of the element that would change most. `entries` is the number of elements that
      would change. NaN is always a violation.

    Raises:
      TypeError: `params` or a bound is traced; `projection` is not a projection.
      ValueError: `projection` has a schedule, and `step` is missing; `projection` is a
        `keep_norm`, and `old` is missing; `projection` is a `qk_clip`, whose logits
        cannot be passed here; a leaf is on devices of several processes.

    See Also:
      :func:`max_norm` and the other projections, whose `apply` changes these weights;
      :func:`record_norms` logs norms at each step.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> params = {"kernel": jnp.array([[3.0, 0.3], [4.0, 0.4]])}
      >>> print(*clipjax.violations(params, clipjax.max_norm(2.0)))
      kernel[:, 0]: 5 -> 2
      >>> clipjax.violations(params, clipjax.max_norm(6.0))
      []
    """
    weights = flatten(params)
    for leaf in weights.each:
        is_traced = isinstance(leaf.value, jax.core.Tracer)
        if not is_traced and not getattr(leaf.value, "is_fully_addressable", True):
            raise ValueError(
                f"params: {leaf} is on devices of several processes: gather it to one "
                "first"
            )
    found: list[Violation] = []
    for each in [as_projection("projection", one) for one in as_list(projection)]:
        needs = {"old": old} if "old" in each.needs else {}
        projected = flatten(each.apply(params, step=step, **needs)).values
        nowhere = [SKIP] * len(projected)
        where = each.axes_of(weights) if each.axes_of else nowhere
        for was, now, axes in zip(weights.each, projected, where, strict=True):
            if isinstance(now, jax.core.Tracer):
                raise TypeError(
                    f"params: {was}, or its bound, is traced: call violations outside "
                    "jit"
                )
            if is_inexact(was.value):
                found += _violations_of(was, now, axes)
    return sorted(found, key=lambda violation: -violation.change)


@np.errstate(all="ignore")
def _violations_of(old: Leaf, new: jax.Array, axes: Reduced | Skip) -> list[Violation]:
    """Return the units that differ, or, without units, the element farthest away."""
    was, is_now = (_wide(jax.device_get(x)) for x in (old.value, new))
    changed = was != is_now  # NaN differs from itself
    before, after = (abs(x) if np.iscomplexobj(x) else x for x in (was, is_now))
    if isinstance(axes, Skip):
        axes = ()
        distance = np.nan_to_num(abs(is_now - was), nan=np.inf)
        places = []
        if changed.any():
            farthest = np.argmax(np.where(changed, distance, -1))
            places = [np.unravel_index(farthest, was.shape)]
        counts = np.full(was.shape, changed.sum())
    else:
        axes = tuple(range(was.ndim)) if axes is None else axes
        before = np.sqrt(np.sum(before * before, axes, keepdims=True))
        after = np.sqrt(np.sum(after * after, axes, keepdims=True))
        counts = np.sum(changed, axes, keepdims=True)
        places = [tuple(at) for at in np.argwhere(counts)]

    def index(at: Sequence[Any]) -> str:
        kept = [":" if axis in axes else str(i) for axis, i in enumerate(at)]
        return f"[{', '.join(kept)}]" if len(axes) < len(at) else ""

    return [
        Violation(
            old.name, index(at), float(before[at]), float(after[at]), int(counts[at])
        )
        for at in places
    ]


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
