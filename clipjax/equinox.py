"""The axes of an Equinox model, derived from its layers: which weights form one unit.

This module needs Equinox, and `import clipjax` does not load it: `from clipjax.equinox import unit_axes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
from equinox import nn

from clipjax._core.axes import SKIP, is_measured
from clipjax._core.paths import path_name
from clipjax._unit_axes import Known, Names, OwnShape, axes_by_path, checked, found, placed, unknown

__all__ = ["unit_axes"]

# Layers whose weights have the units along their first axis.
_LAYERS = (nn.Linear, nn.Conv, nn.ConvTranspose, nn.Embedding, nn.GRUCell, nn.LSTMCell)
_WEIGHTS = ("weight", "weight_ih", "weight_hh")
# The parameters of each layer that are left alone.
_ALONE = (
    (_LAYERS, ("bias", "bias_n")),
    ((nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.BatchNorm), ("weight", "bias")),
    (nn.PReLU, ("negative_slope",)),
    (nn.WeightNorm, ("g",)),
)


def unit_axes(model: Any, *, other: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the axes to reduce for every parameter of an Equinox model, by the layer that owns it.

    A unit is the weights that compute one output: a row of a Linear layer's weight, which is `(out, in)`; a
    filter of a convolution (grouped and transposed too); one component of one head's query, key or value; a
    gate of a cell. In an embedding it is a row. If `equinox.filter_vmap` stacks layers, each layer has its
    own units. Biases and the scales of normalization layers are left alone.

    Args:
      model: an Equinox module, or a tree of them. Only its float arrays count; functions and integers, and
        the None that `equinox.filter` leaves in their place, do not.
      other: axes for parameters of unknown layers, by path pattern as in `axes`. They take precedence over
        the axes of known layers.

    Returns:
      A dict from each parameter's path to the axes to reduce, or :data:`clipjax.SKIP`. Pass it as the `axes`
      of any transformation. To change some axes, put them first:
      `{"head/*": clipjax.SKIP} | unit_axes(model)`.

    Raises:
      TypeError: `model` contains no Equinox module.
      ValueError: some parameters do not belong to a known layer (such as arrays in your own modules), or it
        is ambiguous which of their axes are a stack: the error lists them all, for `other`. Or a pattern in
        `other` matches nothing.

    Example:
      >>> import clipjax, equinox as eqx, jax
      >>> from clipjax.equinox import unit_axes
      >>> model = eqx.nn.MLP(2, 3, width_size=8, depth=1, key=jax.random.key(0))
      >>> axes = unit_axes(model)
      >>> axes["layers/0/weight"], axes["layers/0/bias"]  # (out, in)
      ((1,), clipjax.SKIP)
      >>> projection = clipjax.max_norm(3.0, axes=axes)
    """
    other = checked(other)
    params = []
    for owner, names, own, leaf in _owned(model, ()):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and is_measured(leaf):
            shape, name = tuple(leaf.shape), "/".join(own)
            own_shape = _own_shapes(owner).get(name, shape)
            axes = _own_axes(owner, name, len(own_shape))
            params.append(found(owner, name, own_shape, axes, (*names, *own), shape))
    if not any(map(_is_module, jax.tree.leaves(model, is_leaf=_is_module))):
        raise TypeError(f"unit_axes: model must be an Equinox module, or a tree of them, got {type(model)}")
    return axes_by_path(placed(params), other)


def _is_module(node: Any) -> bool:
    return isinstance(node, eqx.Module)


def _owned(owner: Any, names: Names) -> Iterator[tuple[Any, Names, Names, Any]]:
    """Yield each leaf's innermost module, the module's path, the leaf's path in it, and the leaf."""

    def is_inside(node: Any) -> bool:
        return _is_module(node) and node is not owner

    for path, node in jax.tree_util.tree_leaves_with_path(owner, is_leaf=is_inside):
        own = tuple(path_name((key,)) for key in path)
        if is_inside(node):
            yield from _owned(node, (*names, *own))
        else:
            yield owner, names, own, node


def _own_axes(layer: Any, name: str, rank: int) -> Known:
    """Return the axes to reduce in a layer's own parameter."""
    if isinstance(layer, _LAYERS) and name in _WEIGHTS:
        return tuple(range(1, rank))
    if isinstance(layer, nn.StateIndex) or name in next((n for of, n in _ALONE if isinstance(layer, of)), ()):
        return SKIP
    return unknown(layer, name)


def _own_shapes(layer: Any) -> dict[str, OwnShape]:
    """Return the shapes of a layer's parameters before any stacking, as far as its fields specify them."""
    match layer:
        case nn.Linear():
            sizes = [1 if size == "scalar" else size for size in (layer.out_features, layer.in_features)]
            return {"weight": tuple(sizes), "bias": tuple(sizes[:1])}
        case nn.Conv() | nn.ConvTranspose():
            weight = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)
            return {"weight": weight, "bias": (layer.out_channels, *(1 for _ in layer.kernel_size))}
        case nn.Embedding():
            return {"weight": (layer.num_embeddings, layer.embedding_size)}
        case nn.GRUCell() | nn.LSTMCell():
            gates = (3 if isinstance(layer, nn.GRUCell) else 4) * layer.hidden_size
            of_input, of_state = (gates, layer.input_size), (gates, layer.hidden_size)
            biases: dict[str, OwnShape] = {"bias": (gates,), "bias_n": (layer.hidden_size,)}
            return {"weight_ih": of_input, "weight_hh": of_state, **biases}
        case nn.LayerNorm() | nn.RMSNorm():
            return dict.fromkeys(("weight", "bias"), tuple(layer.shape))
        case nn.GroupNorm() | nn.BatchNorm():
            size = layer.channels if isinstance(layer, nn.GroupNorm) else layer.input_size
            return dict.fromkeys(("weight", "bias"), (size,))
    return {}
