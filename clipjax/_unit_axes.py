"""The axes of a model's parameters, once its layers are known: those of stacked layers, and the result.

Layers that a `vmap` stacked do not say along which axes. The fields of a layer tell the shape of its own
parameter, and the axes of other sizes are the stack. Where sizes coincide, other parameters tell.
"""

from __future__ import annotations

import glob
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from clipjax._core.axes import Skip, check_axes
from clipjax._core.paths import first_matches

Known: TypeAlias = tuple[int, ...] | Skip | str  # a string says whose axes are not known
Names: TypeAlias = tuple[Any, ...]
OwnShape: TypeAlias = tuple[int | None, ...]  # None is any size
Place: TypeAlias = tuple[int, ...]  # which axes of a stacked parameter are the layer's own


class Param(NamedTuple):
    """A parameter of a model, and the axes to reduce."""

    path: str
    shape: tuple[int, ...]
    axes: Known


class Found(NamedTuple):
    """A parameter of a layer that may be stacked."""

    names: Names
    shape: tuple[int, ...]
    axes: Known  # counted in the layer's own parameter
    places: list[Place]  # all that the sizes allow
    layer: str  # for the error


def checked(other: Mapping[str, Any] | None) -> dict[str, Any]:
    """The axes that the user gives, by path pattern."""
    if not isinstance(other, Mapping | None):
        raise TypeError(f"other must be a mapping from path patterns to axes, got {other!r}")
    check_axes(other or {}, "other")
    return dict(other or {})


def found(
    layer: Any, own_name: str, own_shape: OwnShape, axes: Known, names: Names, shape: tuple[int, ...]
) -> Found:
    """Find where a layer's own parameter of `own_shape` can be in one of `shape`."""
    places = [
        place
        for place in itertools.combinations(range(len(shape)), len(own_shape))
        if all(own in (None, shape[axis]) for own, axis in zip(own_shape, place, strict=True))
    ]
    text = f"{own_name!r} of {type(layer).__name__}, itself of shape {own_shape}"
    return Found(names, shape, axes, [] if isinstance(axes, str) else places, text)


def unknown(layer: Any, own_name: str) -> str:
    """Say whose axes are not known."""
    return f"{own_name!r} of {type(layer).__name__}, which is no layer that is known"


def placed(params: list[Found]) -> list[Param]:
    """The parameters with the axes to reduce counted in the stack."""
    result = []
    for param in params:
        axes = param.axes
        if isinstance(axes, tuple):
            place = _place(param, params)
            known = None if place is None else tuple(place[axis] for axis in axes)
            axes = f"{param.layer}: which axes are a stack?" if known is None else known
        result.append(Param("/".join(map(str, param.names)), param.shape, axes))
    return result


def axes_by_path(params: list[Param], other: Mapping[str, Any]) -> dict[str, Any]:
    """The axes of each parameter, by a pattern that is its path.

    Raises:
      ValueError: those of some are not known and not in `other`, or a pattern in `other` matches nothing.
    """
    paths = dict.fromkeys(sorted(param.path for param in params), 0)
    patterns = dict(zip(paths, first_matches("other", list(other), paths), strict=True))
    missing = [param for param in params if isinstance(param.axes, str) and patterns[param.path] is None]
    if missing:
        listed = "\n  ".join(f"{param.path} of shape {param.shape}: {param.axes}" for param in missing)
        raise ValueError(
            "unit_axes: it cannot be told which weights go into one unit of these parameters. Give their "
            f"axes, or clipjax.SKIP, as other={{path: axes}}:\n  {listed}"
        )
    axes: dict[str, Any] = {param.path: param.axes for param in params}
    axes |= {name: other[pattern] for name, pattern in patterns.items() if pattern is not None}
    # A path may be the end of a longer one, which must be the first to match itself.
    return {glob.escape(name): axes[name] for name in sorted(axes, key=lambda name: -name.count("/"))}


def _place(param: Found, params: list[Found]) -> Place | None:
    """Which axes are the layer's own; None where that cannot be told.

    Sizes may coincide, as for three layers whose windows are 3 by 3. Then the nearest parameters in stacks
    of the same sizes tell: a stack has the same index in all of them, from the left or from the right.
    """
    if len(param.places) == 1:
        return param.places[0]
    for depth in reversed(range(len(param.names))):
        near = [p for p in params if p.names[:depth] == param.names[:depth] and len(p.places) == 1]
        stacks = [_stack(p.shape, p.places[0]) for p in near]
        possible = [place for place in param.places if _agrees(_stack(param.shape, place), stacks)]
        if len(possible) == 1:
            return possible[0]
    return None


def _stack(shape: tuple[int, ...], place: Place) -> tuple[list[int], list[int], list[int]]:
    """The axes that are not a layer's own: their sizes, and their indices from the left and the right."""
    axes = [axis for axis in range(len(shape)) if axis not in place]
    return [shape[axis] for axis in axes], axes, [axis - len(shape) for axis in axes]


def _agrees(stack: Any, others: list[Any]) -> bool:
    others = [other for other in others if other[0] == stack[0]]
    return bool(others) and any(all(other[side] == stack[side] for other in others) for side in (1, 2))
