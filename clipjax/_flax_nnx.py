"""Whose parameters are whose in an NNX model: told from the live modules."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, TypeAlias

from flax import nnx

from clipjax._core.axes import leaves_with_paths, path_name
from clipjax._flax_layers import Known, Param, no_rule, rule_of

Names: TypeAlias = tuple[Any, ...]
OwnShape: TypeAlias = tuple[int | None, ...]


class _Found(NamedTuple):
    names: Names
    shape: tuple[int, ...]
    axes: Known  # counted in the layer's own parameter
    places: list[tuple[int, ...]]  # where its axes may be in a stack
    why: str


def nnx_params(model: nnx.Module, wrt: Any) -> list[Param]:
    """Find the parameters of `model` that the filter `wrt` chooses, and what their layers say of them."""
    found = [_find(model, names, tuple(leaf.shape)) for names, leaf in _leaves(model, wrt)]
    return [_param(each, found) for each in found]


def _leaves(model: nnx.Module, wrt: Any) -> list[tuple[Names, Any]]:
    return [
        ((*names, *(path_name((key,)) for key in path)), leaf)
        for names, variable in nnx.to_flat_state(nnx.state(model, wrt))
        for path, leaf in leaves_with_paths(variable)
    ]


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
    rule, own_shape = rule_of(owner, own_name), _own_shape(owner, own_name)
    if rule is None:
        return _Found(names, shape, None, [], no_rule(owner, own_name))
    axes = rule(owner, len(shape) if own_shape is None else len(own_shape))
    if own_shape is None:
        return _Found(names, shape, axes, [tuple(range(len(shape)))], no_rule(owner, own_name))
    places = [
        place
        for place in itertools.combinations(range(len(shape)), len(own_shape))
        if all(own in (None, shape[axis]) for own, axis in zip(own_shape, place, strict=True))
    ]
    why = f"{own_name!r} of {type(owner).__name__}, itself of shape {own_shape}: which axes are a stack?"
    return _Found(names, shape, axes, places, no_rule(owner, own_name) if axes is None else why)


def _own_shape(layer: Any, name: str) -> OwnShape | None:
    """The shape of a layer's parameter before any stacking; None where it is not known or does not matter."""
    of: dict[type, Any] = {
        nnx.Linear: lambda x: {"kernel": (x.in_features, x.out_features), "bias": (x.out_features,)},
        nnx.LinearGeneral: lambda x: {
            "kernel": (*x.batch_axis.values(), *x.in_features, *x.out_features),
            "bias": (*x.batch_axis.values(), *x.out_features),
        },
        nnx.Conv: lambda x: {
            "kernel": (*x.kernel_size, x.in_features // x.feature_group_count, x.out_features),
            "bias": (x.out_features,),
        },
        nnx.ConvTranspose: lambda x: {"kernel": tuple(x.kernel_shape), "bias": (x.out_features,)},
        nnx.Einsum: lambda x: {"kernel": tuple(x.kernel_shape)},
        nnx.Embed: lambda x: {"embedding": (x.num_embeddings, x.features)},
        nnx.LoRA: lambda x: {"lora_a": (x.in_features, None), "lora_b": (None, x.out_features)},
    }
    if hasattr(layer, "num_features") and name in ("scale", "bias"):
        return (layer.num_features,)
    shapes: dict[str, OwnShape] = next((f(layer) for kind, f in of.items() if isinstance(layer, kind)), {})
    return shapes.get(name)


def _param(param: _Found, all_params: list[_Found]) -> Param:
    axes = param.axes
    if isinstance(axes, tuple):
        place = _place(param, all_params)
        axes = None if place is None else tuple(place[axis] for axis in axes)
    return Param("/".join(map(str, param.names)), param.shape, axes, param.why)


def _place(param: _Found, all_params: list[_Found]) -> tuple[int, ...] | None:
    """Where the axes of a layer's own parameter are in a stack of many; None where that cannot be told.

    Sizes may coincide, as with three layers whose windows are 3 by 3. Then the nearest parameters in as
    large stacks tell: a transformation puts its axis at one index in all of them, from either end.
    """
    if len(param.places) == 1:
        return param.places[0]
    for depth in reversed(range(len(param.names))):
        near = [p for p in all_params if p.names[:depth] == param.names[:depth] and len(p.places) == 1]
        told = [place for place in param.places if _agrees(_stack(param.shape, place), near)]
        if len(told) == 1:
            return told[0]
    return None


def _agrees(stack: _Stack, params: list[_Found]) -> bool:
    others = [_stack(p.shape, p.places[0]) for p in params]
    others = [other for other in others if other.sizes == stack.sizes]
    same_left = all(other.from_left == stack.from_left for other in others)
    same_right = all(other.from_right == stack.from_right for other in others)
    return bool(others) and (same_left or same_right)


class _Stack(NamedTuple):
    """The axes that are not a layer's own."""

    sizes: tuple[int, ...]
    from_left: tuple[int, ...]
    from_right: tuple[int, ...]


def _stack(shape: tuple[int, ...], place: tuple[int, ...]) -> _Stack:
    added = tuple(axis for axis in range(len(shape)) if axis not in place)
    return _Stack(tuple(shape[a] for a in added), added, tuple(a - len(shape) for a in added))
