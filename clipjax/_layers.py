"""The axes of a model's parameters, once its layers are known."""

import glob
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from clipjax._core.aliases import SKIP, Skip
from clipjax._core.leaves import first_matches, flatten, short_repr
from clipjax._core.norms import check_axes


class Param(NamedTuple):
    """A parameter of a layer, perhaps of a stack of layers."""

    path: str  # in the model
    shape: tuple[int, ...]
    layer: Any
    name: str  # in the layer
    # The axes to reduce in one layer; None if they are not known.
    axes: tuple[int, ...] | Skip | None
    own_shape: tuple[int, ...]  # of one layer, as the layer says

    def __str__(self) -> str:
        of = f"{self.name!r} of {type(self.layer).__name__}"
        stacked = f"itself of shape {self.own_shape}: which axes are a stack?"
        why = "which is not known" if self.axes is None else stacked
        return f"{self.path} of shape {self.shape}: {of}, {why}"


def _ways(param: Param) -> set[Any]:
    """Return the axes to reduce, for each choice of the axes that stack layers.

    The other axes have the shape of one layer.
    """
    if not param.shape or isinstance(param.axes, Skip):  # a single number is no unit
        return {SKIP}
    if param.axes is None:
        return set()
    return {
        tuple(own[axis] for axis in param.axes)
        for own in itertools.combinations(range(len(param.shape)), len(param.own_shape))
        if tuple(param.shape[axis] for axis in own) == param.own_shape
    }


def axes_by_path(
    params: Iterable[Param], other: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the axes of each parameter, by a pattern that is its path.

    `other` wins over what is known.
    """
    if not isinstance(other, Mapping | None):
        raise TypeError(
            "other must be a mapping from path patterns to axes, got "
            f"{short_repr(other)}"
        )
    other = check_axes(other, "other") if other else {}
    by_path = {param.path: param for param in params}
    if not by_path:
        raise ValueError(
            "unit_axes: the model has no parameters, or none that a filter such as "
            "wrt= of clipjax.flax chooses"
        )
    patterns = first_matches("other", list(other), flatten(dict.fromkeys(by_path, 0)))
    axes: dict[str, Any] = {}
    unclear = []
    # Sorted, as JAX sorts the keys of a dict.
    for path, pattern in zip(sorted(by_path), patterns, strict=True):
        ways = _ways(by_path[path]) if pattern is None else {other[pattern]}
        if len(ways) == 1:
            (axes[path],) = ways
        else:
            unclear.append(f"\n  {by_path[path]}")
    if unclear:
        raise ValueError(
            "unit_axes: it is not known which weights of these parameters form an "
            "output unit. Pass the axes to reduce, or clipjax.SKIP, as other={path "
            f"pattern: axes}}:{''.join(unclear)}"
        )
    # A pattern also matches the end of a longer path, and the first match wins: so
    # longer paths come first.
    return {
        glob.escape(path): axes[path]
        for path in sorted(axes, key=lambda path: -path.count("/"))
    }
