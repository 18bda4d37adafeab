"""The axes of a Flax model, derived from its layers: which weights form one unit.

This module needs Flax, and `import clipjax` does not load it: `from clipjax.flax import unit_axes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
from flax import nnx

from clipjax._flax_linen import linen_params
from clipjax._flax_nnx import nnx_params
from clipjax._unit_axes import axes_by_path, checked

__all__ = ["unit_axes"]


def unit_axes(
    model: Any, *args: Any, other: Mapping[str, Any] | None = None, wrt: Any = nnx.Param, **kwargs: Any
) -> dict[str, Any]:
    """Return the axes to reduce for every parameter of a Flax model, by the layer that owns it.

    A unit is the weights that compute one output: a column of a Dense kernel; a filter of a convolution
    (grouped and transposed too; in a local one, the filter of one position); one component of one head's
    query, key or value; a gate of a cell. In an embedding it is a row. If `scan` or `vmap` stacks layers,
    each layer has its own units. Biases and the scales of normalization layers are left alone.

    Args:
      model: a Linen module; or an NNX module, which holds its parameters.
      *args: for Linen, the arguments of `model.init`: a key and example inputs, or `jax.ShapeDtypeStruct`s
        instead, as nothing is computed. None for NNX.
      other: axes for parameters of unknown layers, by path pattern as in `axes`. They take precedence over
        the axes of known layers.
      wrt: for NNX, which parameters to include: the filter that `nnx.Optimizer` gets.
      **kwargs: for Linen, the keyword arguments of `model.init`.

    Returns:
      A dict from each parameter's path to the axes to reduce, or :data:`clipjax.SKIP`. Pass it as the `axes`
      of any transformation, for parameters with or without the outer `"params"`. To change some axes, put
      them first: `{"head/*": clipjax.SKIP} | unit_axes(model)`.

    Raises:
      TypeError: `model` is not a Flax module; arguments are missing for Linen, or given for NNX.
      ValueError: some parameters do not belong to a known layer (such as `self.param` and `nnx.Param` in your
        own modules), or it is ambiguous which of their axes are a stack: the error lists them all, for
        `other`. Or a pattern in `other` matches nothing.

    Example:
      >>> import clipjax, jax, jax.numpy as jnp
      >>> import flax.linen as nn
      >>> from clipjax.flax import unit_axes
      >>> model = nn.MultiHeadDotProductAttention(num_heads=2)
      >>> axes = unit_axes(model, jax.random.key(0), jnp.ones((1, 5, 8)))
      >>> axes["query/kernel"], axes["query/bias"], axes["out/kernel"]
      ((0,), clipjax.SKIP, (0, 1))
      >>> projection = clipjax.max_norm(3.0, axes=axes)
    """
    other = checked(other)
    if isinstance(model, nnx.Module):
        if args or kwargs:
            raise TypeError("unit_axes: an NNX model holds its parameters and takes no further arguments")
        params = nnx_params(model, wrt)
    elif isinstance(model, nn.Module):
        if not (args or kwargs):
            raise TypeError("unit_axes: a Linen model takes the arguments of its init too: a key and inputs")
        params = linen_params(model, args, kwargs)
    else:
        given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(
            f"unit_axes: model must be a Flax module, of Linen or of NNX, got {given}. "
            "For axes=, call it: axes=unit_axes(model)"
        )
    return axes_by_path(params, other)
