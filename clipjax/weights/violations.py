"""List the weights that a projection would still change: for tests, and for averages and casts of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from clipjax._core import trees, units
from clipjax.weights.projection import Projection, as_projection, is_projection


class Violation(NamedTuple):
    """Weights that a projection would change; `print` writes `kernel[:, 0]: 5 -> 2`."""

    path: str  # of the leaf, such as "encoder/Dense_0/kernel"
    unit: str  # its index as NumPy writes it, such as "[:, 0]"; "" for the whole leaf
    # the norm of a unit that would be rescaled; otherwise the entry that would change
    # most
    before: float
    after: float  # the same, projected
    entries: int  # how many entries would change

    @property
    def change(self) -> float:
        """How far it would move, relative to the larger of the two numbers; infinity if one is not finite."""
        size = max(abs(self.before), abs(self.after)) or 1.0
        return (
            abs(self.after - self.before) / size
            if np.isfinite(self.after - self.before)
            else np.inf
        )

    def __str__(self) -> str:
        return f"{self.path}{self.unit}: {self.before:.5g} -> {self.after:.5g}"


def violations(
    params: Any,
    projection: Callable[[Any], Any] | Sequence[Callable[[Any], Any]],
    *,
    step: Any = None,
) -> list[Violation]:
    """List the weights that a projection would still change, those that would move farthest first.

    Args:
      params: the weights, which must be concrete and on devices of this process.
      projection: a projection such as `clipjax.max_norm(3.0)`, a function of the
        weights, or a sequence of these; each is compared with the same weights.
      step: the step at which bounds that are schedules are evaluated.

    Returns:
      A list of `Violation(path, unit, before, after, entries)`, empty if nothing would
      change. There is one for each unit that `max_norm`, `min_max_norm` or `unit_norm`
      would rescale, with its norm; otherwise one for each leaf, with the entry that
      would change most. NaN is always a violation.

    Raises:
      TypeError: `params` or a bound is traced; `projection` is not a projection.
      ValueError: `projection` has a schedule, and `step` is missing; it is a `qk_clip`,
        which needs logits.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> params = {"kernel": jnp.array([[3.0, 0.3], [4.0, 0.4]])}
      >>> print(*clipjax.violations(params, clipjax.max_norm(2.0)))
      kernel[:, 0]: 5 -> 2
      >>> clipjax.violations(params, clipjax.max_norm(6.0))
      []
    """
    leaves, _ = trees.leaves_of(params)
    for leaf in leaves:
        if not isinstance(leaf.value, jax.core.Tracer) and not getattr(
            leaf.value, "is_fully_addressable", True
        ):
            raise ValueError(
                f"params: {leaf} is on devices of several processes: gather it to one "
                "first"
            )
    found: list[Violation] = []
    for each in _projections(projection):
        axes_at = (
            {found.place: found.axes for found in each.find(params)}
            if each.find
            else {}
        )
        for i, (old, new) in enumerate(
            zip(leaves, trees.leaves_of(each(params, step))[0], strict=True)
        ):
            if isinstance(old.value, jax.core.Tracer) or isinstance(
                new.value, jax.core.Tracer
            ):
                raise TypeError(
                    f"params: {old}, or its bound, is traced: call violations outside "
                    "jit"
                )
            if trees.is_float(old.value):
                found += _violations_of(old, new, axes_at.get(i, units.SKIP))
    return sorted(found, key=lambda violation: -violation.change)


def _projections(projection: Any) -> list[Projection]:
    if is_projection(projection):
        return [projection]
    if isinstance(projection, optax.GradientTransformation):
        raise TypeError(
            "projection must be a projection or a function of the weights: pass the "
            "last link of a chain"
        )
    if isinstance(projection, list | tuple):
        return [each for item in projection for each in _projections(item)]
    return [as_projection("projection", projection)]


@np.errstate(all="ignore")
def _violations_of(
    old: trees.Leaf, new: trees.Leaf, axes: tuple[int, ...] | units.Skip | None
) -> list[Violation]:
    exact = [np.asarray(leaf.value) for leaf in (old, new)]
    changed = exact[0] != exact[1]  # NaN differs from itself
    before, after = (
        np.asarray(abs(x) if np.iscomplexobj(x) else x, np.float64) for x in exact
    )
    if isinstance(axes, units.Skip):
        axes = ()
        distance = np.where(changed, np.nan_to_num(abs(after - before), nan=np.inf), -1)
        counts = np.full(before.shape, changed.sum())
        places = (
            [np.unravel_index(np.argmax(distance), before.shape)]
            if changed.any()
            else []
        )
    else:
        axes = tuple(range(before.ndim)) if axes is None else axes
        before, after = (
            np.sqrt(np.sum(x * x, axes, keepdims=True)) for x in (before, after)
        )
        counts = np.sum(changed, axes, keepdims=True)
        places = [tuple(at) for at in np.argwhere(counts)]

    def index(at: Sequence[Any]) -> str:
        kept = ", ".join(":" if axis in axes else str(i) for axis, i in enumerate(at))
        return f"[{kept}]" if len(axes) < len(at) else ""

    return [
        Violation(
            old.name, index(at), float(before[at]), float(after[at]), int(counts[at])
        )
        for at in places
    ]
