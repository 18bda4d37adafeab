"""The axes of a model's parameters, once its layers are known, including stacked layers.

Layers that a `vmap` has stacked do not record along which axes. The fields of a layer specify the shape of
its own parameter; the remaining axes are the stack. If sizes coincide, other parameters resolve the
ambiguity.
"""

from __future__ import annotations

import glob
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from clipjax._core.axes import Skip, check_axes
from clipjax._core.paths import first_matches

Known: TypeAlias = tuple[int, ...] | Skip | str  # a string describes a parameter whose axes are unknown
Names: TypeAlias = tuple[Any, ...]
OwnShape: TypeAlias = tuple[int | None, ...]  # None stands for any size
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
    axes: Known  # as indices in the layer's own parameter
    places: list[Place]  # all places that the sizes allow
    layer: str  # for the error


def checked(other: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the axes that the user gives, by path pattern, after checking them."""
    if not isinstance(other, Mapping | None):
        raise TypeError(f"other must be a mapping from path patterns to axes, got {other!r}")
    check_axes(other or {}, "other")
    return dict(other or {})


def found(
    layer: Any, own_name: str, own_shape: OwnShape, axes: Known, names: Names, shape: tuple[int, ...]
) -> Found:
    """Find which axes of `shape` can be those of a layer's own parameter, of `own_shape`."""
    places = [
        place
        for place in itertools.combinations(range(len(shape)), len(own_shape))
        if all(own in (None, shape[axis]) for own, axis in zip(own_shape, place, strict=True))
    ]
    text = f"{own_name!r} of {type(layer).__name__}, itself of shape {own_shape}"
    return Found(names, shape, axes, [] if isinstance(axes, str) else places, text)


def unknown(layer: Any, own_name: str) -> str:
    """Describe a parameter whose axes are unknown."""
    return f"{own_name!r} of {type(layer).__name__}, which is not a known layer"


def placed(params: list[Found]) -> list[Param]:
    """Return the parameters, with the axes to reduce as indices in the stacked parameter."""
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
    """Return the axes of each parameter, by a pattern that is its path.

    Raises:
      ValueError: some axes are neither known nor in `other`, or a pattern in `other` matches nothing.
    """
    paths = dict.fromkeys(sorted(param.path for param in params), 0)
    patterns = dict(zip(paths, first_matches("other", list(other), paths), strict=True))
    missing = [param for param in params if isinstance(param.axes, str) and patterns[param.path] is None]
    if missing:
        listed = "\n  ".join(f"{param.path} of shape {param.shape}: {param.axes}" for param in missing)
        raise ValueError(
            "unit_axes: it is not known which weights of these parameters form one unit. Pass their "
            f"axes, or clipjax.SKIP, as other={{path: axes}}:\n  {listed}"
        )
    axes: dict[str, Any] = {param.path: param.axes for param in params}
    axes |= {name: other[pattern] for name, pattern in patterns.items() if pattern is not None}
    # A path may be the end of a longer one. So the longer path comes first, and is matched by its own
    # pattern.
    return {glob.escape(name): axes[name] for name in sorted(axes, key=lambda name: -name.count("/"))}


def _place(param: Found, params: list[Found]) -> Place | None:
    """Return which axes are the layer's own; None if that is ambiguous.

    Sizes may coincide, for example with a stack of three layers whose windows are 3 by 3. Then the nearest
    parameters in stacks of the same sizes decide: a stack has the same index in all of them, counted from
    the left or from the right.
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
    """Return sizes of the axes that are not the layer's own, and their indices from the left and right."""
    axes = [axis for axis in range(len(shape)) if axis not in place]
    return [shape[axis] for axis in axes], axes, [axis - len(shape) for axis in axes]


def _agrees(stack: Any, others: list[Any]) -> bool:
    others = [other for other in others if other[0] == stack[0]]
    return bool(others) and any(all(other[side] == stack[side] for other in others) for side in (1, 2))
