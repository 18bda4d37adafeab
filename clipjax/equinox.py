"""Find from the layers of an Equinox model which weights form an output unit.

This module needs Equinox, `pip install "clipjax[equinox]"`, and `import clipjax` does
not load it: `from clipjax.equinox import unit_axes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from clipjax._core.aliases import SKIP
from clipjax._core.leaves import is_inexact, path_name, short_repr
from clipjax._extra import extra
from clipjax._layers import Param, axes_by_path

with extra("equinox"):
    import equinox as eqx
    from equinox import nn

__all__ = ["unit_axes"]


def unit_axes(model: Any, *, other: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the axes to reduce in each parameter of an Equinox model, by its layer.

    Use it as `axes=` of :func:`clipjax.max_norm` and others: the weights of Equinox are
    `(out, in)`, which the default axes would take for `(in, out)`. An output unit is
    the weights that compute one output: a row of a Linear weight, a filter of a
    convolution, one component of the query, key or value of one head, or a gate of a
    cell. In an embedding it is a row. Where `filter_vmap` stacks layers, each layer has
    its own output units. Biases and scales of norms are skipped.

    Args:
      model: an Equinox module, or a tree of them. Only its arrays of floats count.
      other: a mapping from path patterns to `Axes`, for parameters of layers that are
        not known, and for parameters that need other axes than their layer gives.
        `other` takes precedence over the axes of known layers. None by default.

    Returns:
      A dict from the path of each parameter to its axes or :data:`clipjax.SKIP`. To
      change some axes, name them in `other`: `{"layers/1/*": clipjax.SKIP}`.

    Raises:
      TypeError: `model` contains no Equinox module; `other` is not a mapping to axes.
      ValueError: a pattern in `other` matches nothing; parameters belong to layers that
        are not known, or their sizes do not tell which axis is a stack, as for a stack
        of 4 layers with parameters (4, 4). The error lists all of these parameters, so
        that you can add them to `other`.

    See Also:
      :func:`clipjax.fan_in` reduces all axes but the last;
      :func:`clipjax.flax.unit_axes` is for Flax.

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
        raise TypeError(
            "unit_axes: model must be an Equinox module, or a tree of them, got "
            f"{short_repr(model)}"
        )
    return axes_by_path(_params(model, ()), other)


def _params(layer: Any, at: tuple[Any, ...]) -> Iterator[Param]:
    """Yield the parameters of a module at the path `at`, and of the modules in it."""

    def is_inside(node: Any) -> bool:
        return isinstance(node, eqx.Module) and node is not layer

    for path, leaf in jax.tree_util.tree_leaves_with_path(layer, is_leaf=is_inside):
        if is_inside(leaf):
            yield from _params(leaf, (*at, *path))
        elif hasattr(leaf, "dtype") and is_inexact(leaf):
            name = path_name(path)
            own = _own_shape(layer, name)
            axes = None if own is None else tuple(range(1, len(own))) or SKIP
            full = path_name((*at, *path))
            yield Param(full, leaf.shape, layer, name, axes, own or ())


def _own_shape(layer: Any, name: str) -> tuple[int, ...] | None:
    """Return the shape of a layer's weight, whose first axis is that of its units.

    It is () for biases and scales, and None if it is not known.
    """
    match layer, name:
        case nn.Linear(), "weight":
            sizes = layer.out_features, layer.in_features
            return tuple(1 if size == "scalar" else size for size in sizes)
        case ((nn.Conv() | nn.ConvTranspose()), "weight"):
            channels = layer.in_channels // layer.groups
            return (layer.out_channels, channels, *layer.kernel_size)
        case nn.Embedding(), "weight":
            return (layer.num_embeddings, layer.embedding_size)
        case ((nn.GRUCell() | nn.LSTMCell()), ("weight_ih" | "weight_hh")):
            gates = 3 if isinstance(layer, nn.GRUCell) else 4
            inputs = layer.input_size if name == "weight_ih" else layer.hidden_size
            return (gates * layer.hidden_size, inputs)
        case (
            ((nn.Linear() | nn.Conv() | nn.ConvTranspose()), "bias")
            | ((nn.GRUCell() | nn.LSTMCell()), ("bias" | "bias_n"))
            | ((nn.LayerNorm() | nn.GroupNorm()), ("weight" | "bias"))
            | ((nn.RMSNorm() | nn.BatchNorm()), ("weight" | "bias"))
            | (nn.WeightNorm(), "g")
            | (nn.PReLU(), "negative_slope")
            | (nn.StateIndex(), _)
        ):
            return ()
    return None
