"""The axes of a model's parameters, once its layers are known."""

import glob
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from clipjax._core.aliases import SKIP, Skip
from clipjax._core.leaves import first_matches, flatten
from clipjax._core.messages import short_repr
from clipjax._core.units import check_axes


class Param(NamedTuple):
    """A parameter of a layer, perhaps of a stack of layers."""

    path: str  # in the model
    shape: tuple[int, ...]
    layer: Any
    name: str  # in the layer
    # The axes to reduce in one layer; None if they are not known.
    axes: tuple[int, ...] | Skip | None
    own_shape: tuple[int, ...]  # of one layer, as the layer says

    @property
    def mistake(self) -> str | None:
        """Why the axes are not known, or None."""
        layer = type(self.layer).__name__
        text = f"{self.path} of shape {self.shape}: {self.name!r} of {layer}"
        if self.axes is None and self.shape:
            return f"{text}, which is not known"
        if len(self.possible_axes) != 1:
            return f"{text}, itself of shape {self.own_shape}: which axes are a stack?"
        return None

    @property
    def possible_axes(self) -> set[Any]:
        """The axes to reduce, for each choice of the axes that stack layers.

        The other axes have the shape of one layer.
        """
        if not self.shape:  # a single number is no unit
            return {SKIP}
        if not isinstance(self.axes, tuple):
            return {self.axes}
        each = itertools.combinations(enumerate(self.shape), len(self.own_shape))
        ways = [
            tuple(place for place, _ in own)
            for own in each
            if tuple(size for _, size in own) == self.own_shape
        ]
        return {tuple(way[axis] for axis in self.axes) for way in ways}


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
    unknown = []
    # Sorted, as JAX sorts the keys of a dict.
    for path, pattern in zip(sorted(by_path), patterns, strict=True):
        param = by_path[path]
        if pattern is not None:
            axes[path] = other[pattern]
        elif param.mistake:
            unknown.append(param)
        else:
            (axes[path],) = param.possible_axes
    if unknown:
        vectors = [f"{x.path!r}: clipjax.SKIP" for x in unknown if len(x.shape) == 1]
        skipped = ", ".join(vectors)
        hint = f"\nVectors are rarely units: other={{{skipped}}}" if vectors else ""
        mistakes = "".join(f"\n  {x.mistake}" for x in unknown)
        raise ValueError(
            "unit_axes: it is not known which weights of these parameters form an "
            "output unit. Pass the axes to reduce, or clipjax.SKIP, as other={path "
            f"pattern: axes}}:{mistakes}{hint}"
        )
    # A pattern also matches the end of a longer path, and the first match wins: so
    # longer paths come first.
    return {
        glob.escape(path): axes[path]
        for path in sorted(axes, key=lambda path: -path.count("/"))
    }
