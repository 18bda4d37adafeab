"""The parameters of an NNX model and their layers."""

from __future__ import annotations

from typing import Any

from flax import nnx

from clipjax._core.paths import leaves_with_paths, path_name
from clipjax._flax_layers import own_axes
from clipjax._unit_axes import Found, Names, OwnShape, Param, found, placed


def nnx_params(model: nnx.Module, wrt: Any) -> list[Param]:
    """Return the parameters of `model` that the filter `wrt` chooses, with their axes by layer."""
    params = [
        _find(model, (*names, *(path_name((key,)) for key in path)), tuple(leaf.shape))
        for names, variable in nnx.to_flat_state(nnx.state(model, wrt))
        for path, leaf in leaves_with_paths(variable)
    ]
    return placed(params)


def _find(model: nnx.Module, names: Names, shape: tuple[int, ...]) -> Found:
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
    return found(owner, own_name, own_shape, axes, names, shape)


def _own_shapes(layer: Any) -> dict[str, OwnShape]:
    """Return the shapes of a layer's parameters before any stacking, as far as its fields specify them."""
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
    features = getattr(layer, "num_features", None)  # of normalization layers
    return {} if features is None else {"scale": (features,), "bias": (features,)}
