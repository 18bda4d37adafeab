"""The axes of a Flax model: which weights go into one unit, told from its layers.

Needs Flax, which `import clipjax` does not import: `from clipjax.flax import unit_axes`.
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
    """Tell the axes of every parameter of a Flax model, from the layer that owns it.

    A unit is what computes one output: a column of a Dense kernel; a filter of a convolution (grouped and
    transposed too; of a local one, the filter of one place); one component of one head's query, key or
    value; a gate of a cell. Of an embedding it is a row. Each of the layers that `scan` or `vmap` stacks has
    units of its own. Biases and the scales of normalisation layers are left alone.

    Args:
      model: a Linen module; or an NNX module, which holds its parameters.
      *args: for Linen, those of `model.init`: a key and example inputs, or `jax.ShapeDtypeStruct`s in
        their place, as nothing is computed. For NNX none.
      other: axes for parameters whose layer is not known, by path pattern as in `axes`. They win over
        what is known.
      wrt: for NNX, which parameters: the filter that `nnx.Optimizer` gets.
      **kwargs: for Linen, those of `model.init`.

    Returns:
      A dict from each parameter's path to the axes to reduce, or :data:`clipjax.SKIP`: for the `axes` of
      any transformation, on parameters with or without the outer `"params"`. To change some, put them
      first: `{"head/*": clipjax.SKIP} | unit_axes(model)`.

    Raises:
      TypeError: `model` is no Flax module, or there are no arguments for a Linen one, or some for NNX.
      ValueError: some parameters are of no layer that is known (as `self.param` and `nnx.Param` in a module
        of your own), or it cannot be told which of their axes is a stack: all are listed, for `other`. Or a
        pattern in `other` matches nothing.

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
