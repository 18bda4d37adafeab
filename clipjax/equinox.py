"""The axes of an Equinox model, from its layers: which weights form a unit.

This module needs Equinox, and `import clipjax` does not load it: `from clipjax.equinox import unit_axes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
from equinox import nn

from clipjax._core import bounds, trees, units
from clipjax._layers import Param, axes_by_path

__all__ = ["unit_axes"]


def unit_axes(model: Any, *, other: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the axes to reduce in each parameter of an Equinox model, by the layer that it belongs to.

    A unit is the weights that compute one output: a row of a Linear weight `(out, in)`, a filter of a
    convolution, one component of one head's query, key or value, a gate of a cell; in an embedding, a row. If
    `filter_vmap` stacks layers on a first axis, each has its units. Biases and scales of norms are skipped.

    Args:
      model: an Equinox module, or a tree of them. Only its arrays of floats count.
      other: axes by path pattern, for parameters of other layers; they win over those of known layers.

    Returns:
      A dict from each parameter's path to its axes or :data:`clipjax.SKIP`, for `axes=`. To change some,
      name them in `other`: `{"layers/1/*": clipjax.SKIP}`.

    Raises:
      TypeError: `model` contains no Equinox module; `other` is not a mapping to axes.
      ValueError: parameters do not belong to known layers, or are stacked along another axis: all are listed,
        for `other`. Or a pattern in `other` matches nothing.

    Example:
      >>> import clipjax, equinox as eqx, jax
      >>> from clipjax.equinox import unit_axes
      >>> model = eqx.nn.MLP(2, 3, width_size=8, depth=1, key=jax.random.key(0))
      >>> axes = unit_axes(model)
      >>> axes["layers/0/weight"], axes["layers/0/bias"]
      ((1,), clipjax.SKIP)
      >>> projection = clipjax.max_norm(3.0, axes=axes)
    """
    nodes = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, eqx.Module))
    if not any(isinstance(node, eqx.Module) for node in nodes):
        given = f"the class {model.__name__}" if isinstance(model, type) else bounds.short_repr(model)
        raise TypeError(f"unit_axes: model must be an Equinox module, or a tree of them, got {given}")
    return axes_by_path(_params(model, ()), other)


def _params(layer: Any, at: tuple[Any, ...]) -> Iterator[Param]:
    """Yield the parameters of a module, and of those inside it, whose path is `at`."""

    def is_inside(node: Any) -> bool:
        return isinstance(node, eqx.Module) and node is not layer

    for path, leaf in jax.tree_util.tree_leaves_with_path(layer, is_leaf=is_inside):
        if is_inside(leaf):
            yield from _params(leaf, (*at, *path))
        elif hasattr(leaf, "shape") and hasattr(leaf, "dtype") and trees.is_float(leaf):
            name = trees.path_name(path)
            sizes = _incoming(layer, name)
            axes = units.SKIP if sizes == () else sizes and tuple(range(-len(sizes), 0))
            yield Param(trees.path_name((*at, *path)), leaf.shape, layer, name, axes, sizes or ())


def _incoming(layer: Any, name: str) -> tuple[int, ...] | None:
    """Return the sizes of the axes to reduce, the last ones; () for biases and scales, None if unknown."""
    match layer, name:
        case nn.Linear(), "weight":
            return (1 if layer.in_features == "scalar" else layer.in_features,)
        case ((nn.Conv() | nn.ConvTranspose()), "weight"):
            return (layer.in_channels // layer.groups, *layer.kernel_size)
        case nn.Embedding(), "weight":
            return (layer.embedding_size,)
        case ((nn.GRUCell() | nn.LSTMCell()), ("weight_ih" | "weight_hh")):
            return (layer.input_size if name == "weight_ih" else layer.hidden_size,)
        case ((nn.Linear() | nn.Conv() | nn.ConvTranspose() | nn.GRUCell() | nn.LSTMCell()), "bias"):
            return ()
        case ((nn.LayerNorm() | nn.GroupNorm() | nn.RMSNorm() | nn.BatchNorm()), ("weight" | "bias")):
            return ()
        case ((nn.GRUCell() | nn.WeightNorm()), ("bias_n" | "g")):
            return ()
        case (nn.PReLU(), "negative_slope") | (nn.StateIndex(), _):
            return ()
    return None
