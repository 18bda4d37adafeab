"""The parameters of an NNX model and their layers.

Layers that `nnx.vmap` stacked do not say along which axes. The fields of a layer tell the shape of its own
parameter, and the axes of other sizes are the stack. Where sizes coincide, other parameters tell.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, TypeAlias

from flax import nnx

from clipjax._core.axes import leaves_with_paths, path_name
from clipjax._flax_layers import Known, Param, own_axes

Names: TypeAlias = tuple[Any, ...]
Place: TypeAlias = tuple[int, ...]  # which axes of a stacked parameter are the layer's own


class _Found(NamedTuple):
    names: Names
    shape: tuple[int, ...]
    axes: Known  # counted in the layer's own parameter
    places: list[Place]  # all that the sizes allow
    layer: str  # for the error


def nnx_params(model: nnx.Module, wrt: Any) -> list[Param]:
    """The parameters of `model` that the filter `wrt` chooses, with the axes their layers give them."""
    found = [
        _find(model, (*names, *(path_name((key,)) for key in path)), tuple(leaf.shape))
        for names, variable in nnx.to_flat_state(nnx.state(model, wrt))
        for path, leaf in leaves_with_paths(variable)
    ]
    params = []
    for param in found:
        axes = param.axes
        if isinstance(axes, tuple):
            place = _place(param, found)
            known = None if place is None else tuple(place[axis] for axis in axes)
            axes = f"{param.layer}: which axes are a stack?" if known is None else known
        params.append(Param("/".join(map(str, param.names)), param.shape, axes))
    return params


def _find(model: nnx.Module, names: Names, shape: tuple[int, ...]) -> _Found:
    node: Any = model
    owner, depth = model, 0
    for i, name in enumerate(names):
        node = getattr(node, name) if isinstance(name, str) and hasattr(node, name) else node[name]
        if isinstance(node, nnx.Variable):
            break
        if isinstance(node, nnx.Module):
            owner, depth = node, i + 1
    own_name = "/".join(map(str, names[depth:]))
    own_shape = _own_shapes(owner).get(own_name, shape)
    axes = own_axes(owner, own_name, len(own_shape))
    places = [
        place
        for place in itertools.combinations(range(len(shape)), len(own_shape))
        if all(own in (None, shape[axis]) for own, axis in zip(own_shape, place, strict=True))
    ]
    layer = f"{own_name!r} of {type(owner).__name__}, itself of shape {own_shape}"
    return _Found(names, shape, axes, [] if isinstance(axes, str) else places, layer)


def _own_shapes(layer: Any) -> dict[str, tuple[int | None, ...]]:
    """The shapes of a layer's parameters before any stacking, as far as its fields tell; None is any size."""
    match layer:
        case nnx.Linear():
            return {"kernel": (layer.in_features, layer.out_features), "bias": (layer.out_features,)}
        case nnx.LinearGeneral():
            batch = tuple(layer.batch_axis.values())
            kernel = (*batch, *layer.in_features, *layer.out_features)
            return {"kernel": kernel, "bias": (*batch, *layer.out_features)}
        case nnx.Conv():
            channels = layer.in_features // layer.feature_group_count
            kernel = (*layer.kernel_size, channels, layer.out_features)
            return {"kernel": kernel, "bias": (layer.out_features,)}
        case nnx.ConvTranspose():
            return {"kernel": tuple(layer.kernel_shape), "bias": (layer.out_features,)}
        case nnx.Einsum():
            return {"kernel": tuple(layer.kernel_shape)}
        case nnx.Embed():
            return {"embedding": (layer.num_embeddings, layer.features)}
        case nnx.LoRA():
            return {"lora_a": (layer.in_features, None), "lora_b": (None, layer.out_features)}
    features = getattr(layer, "num_features", None)  # of layers that normalise
    return {} if features is None else {"scale": (features,), "bias": (features,)}


def _place(param: _Found, found: list[_Found]) -> Place | None:
    """Which axes are the layer's own; None where that cannot be told.

    Sizes may coincide, as for three layers whose windows are 3 by 3. Then the nearest parameters in stacks
    of the same sizes tell: a stack has the same index in all of them, from the left or from the right.
    """
    if len(param.places) == 1:
        return param.places[0]
    for depth in reversed(range(len(param.names))):
        near = [p for p in found if p.names[:depth] == param.names[:depth] and len(p.places) == 1]
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
