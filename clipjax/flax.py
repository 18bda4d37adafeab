"""Find from the layers of a Flax model which weights form an output unit.

This module needs Flax, `pip install "clipjax[flax]"`, and `import clipjax` does not
load it: `from clipjax.flax import unit_axes`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import DictKey

from clipjax._core.aliases import SKIP, Path, Skip
from clipjax._core.leaves import flatten, path_name, short_repr
from clipjax._extra import extra
from clipjax._layers import Param, axes_by_path

with extra("flax"):
    import flax.linen as nn
    from flax import nnx
    from flax.core import DenyList

__all__ = ["unit_axes"]


def unit_axes(
    model: Any,
    *args: Any,
    other: Mapping[str, Any] | None = None,
    wrt: Any = nnx.Param,
    **kwargs: Any,
) -> dict[str, Any]:
    """Return the axes to reduce in each parameter of a Flax model, by its layer.

    Use it as `axes=` of :func:`clipjax.max_norm` and others, for a model with
    convolutions, attention, or stacked layers. An output unit is the weights that
    compute one output: a column of a Dense kernel, a filter of a convolution, one
    component of the query, key or value of one head, or a gate of a cell. In an
    embedding it is a row. Where `scan` or `vmap` stacks layers, each layer has its own
    output units. Biases and the scales of norms are skipped.

    Args:
      model: a Linen module; or an NNX module, which holds its parameters.
      *args: for Linen, the arguments of `model.init`: a key and example inputs, or
        `jax.ShapeDtypeStruct`s in place of inputs, since nothing is computed. None for
        NNX.
      other: a mapping from path patterns to `Axes`, for parameters of layers that are
        not known, and for parameters that need other axes than their layer gives.
        `other` takes precedence over the axes of known layers. None by default.
      wrt: for NNX, the filter that chooses parameters, as `nnx.Optimizer` gets it;
        `nnx.Param` by default.
      **kwargs: for Linen, the keyword arguments of `model.init`.

    Returns:
      A dict from the path of each parameter to its axes or :data:`clipjax.SKIP`. It
      also fits trees with an outer `"params"`. To change some axes, name them in
      `other`: `{"head/*": clipjax.SKIP}`.

    Raises:
      TypeError: `model` is not a Flax module; arguments are given for NNX; `other` is
        not a mapping to axes.
      ValueError: a pattern in `other` matches nothing; parameters belong to layers that
        are not known, or their sizes do not tell which axis is a stack, as for a stack
        of 4 layers with parameters (4, out). The error lists all of these parameters,
        so that you can add them to `other`.

    See Also:
      :func:`clipjax.fan_in` suits Dense and convolutions;
      :func:`clipjax.equinox.unit_axes` is for Equinox.

    Example:
      >>> import clipjax, jax, flax.linen as nn, jax.numpy as jnp
      >>> from clipjax.flax import unit_axes
      >>> model = nn.MultiHeadDotProductAttention(num_heads=2)
      >>> axes = unit_axes(model, jax.random.key(0), jnp.ones((1, 5, 8)))
      >>> axes["query/kernel"], axes["query/bias"], axes["out/kernel"]
      ((0,), clipjax.SKIP, (0, 1))
      >>> projection = clipjax.max_norm(3.0, axes=axes)
    """
    if isinstance(model, nnx.Module):
        if args or kwargs:
            raise TypeError(
                "unit_axes: an NNX model holds its parameters, and takes no further "
                "arguments but other= and wrt="
            )
        return axes_by_path(_nnx_params(model, wrt), other)
    if isinstance(model, nn.Module):
        return axes_by_path(_linen_params(model, args, kwargs), other)
    raise TypeError(
        "unit_axes: model must be a Flax module, of Linen or of NNX, got "
        f"{short_repr(model)}"
    )


def _linen_params(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[Param]:
    """Yield the parameters that `model.init(*args, **kwargs)` makes, by tracing it."""
    # The layer of each parameter, its name and its shape there: within a stack, that
    # of one layer.
    owners: dict[Path, tuple[nn.Module, str, tuple[int, ...]]] = {}

    def watch(
        call: Any,
        call_args: Any,
        call_kwargs: Any,
        context: nn.module.InterceptorContext,
    ) -> Any:
        layer, scope = context.module, context.module.scope
        result = call(*call_args, **call_kwargs)
        # Flax also calls methods to try out `setup`, in another scope.
        if scope is not None and context.method_name != "<lambda>":
            own = scope.variables().get("params", {})
            for path, leaf in flatten(own).each:
                # A layer returns before the layers around it.
                at = (*scope.path, *_names(path))
                owners.setdefault(at, (layer, path_name(path), leaf.shape))
        return result

    leaves, treedef = jax.tree.flatten((args, kwargs))
    kinds = jax.Array | np.ndarray | jax.ShapeDtypeStruct
    arrays = {i: x for i, x in enumerate(leaves) if isinstance(x, kinds)}
    # A new name each time, since modules under nn.jit that JAX has traced before are
    # not called again.
    mutable = DenyList(("intermediates", f"unit_axes_{uuid.uuid4()}"))

    def init(arrays: dict[int, Any]) -> Any:
        each = [arrays.get(i, x) for i, x in enumerate(leaves)]
        init_args, init_kwargs = jax.tree.unflatten(treedef, each)
        variables = model.init(*init_args, **({"mutable": mutable} | init_kwargs))
        return variables.get("params", {})

    with nn.intercept_methods(watch):
        params = jax.eval_shape(init, arrays)
    for path, leaf in flatten(params).each:
        layer, name, own_shape = owners[_names(path)]
        axes = _axes(layer, name)
        yield Param(path_name(path), leaf.shape, layer, name, axes, own_shape)


def _names(path: Sequence[Any]) -> Path:
    """Return the keys of a path, without the `value` of a box."""
    return tuple(key.key for key in path if isinstance(key, DictKey))


def _nnx_params(model: nnx.Module, wrt: Any) -> Iterator[Param]:
    """Yield the parameters of `model` that the filter `wrt` chooses."""
    modules = dict(nnx.iter_modules(model))
    params = nnx.to_pure_dict(nnx.state(model, wrt))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        names = _names(path)
        depth = max(i for i in range(len(names)) if names[:i] in modules)
        layer, name = modules[names[:depth]], path_name(path[depth:])
        own_shape = _own_shape(layer, name, leaf.shape)
        axes = _axes(layer, name)
        yield Param(path_name(path), leaf.shape, layer, name, axes, own_shape)


def _own_shape(layer: Any, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a layer's kernel before layers are stacked.

    For layers that are not known it is the given shape.
    """
    match layer:
        case nnx.Linear():
            return (layer.in_features, layer.out_features)
        case nnx.LinearGeneral():
            return (*layer.batch_axis.values(), *layer.in_features, *layer.out_features)
        case nnx.Conv() | nnx.ConvTranspose() | nnx.Einsum():
            return tuple(layer.kernel_shape)
        case nnx.Embed():
            return (layer.num_embeddings, layer.features)
        case nnx.LoRA():
            if name == "lora_a":
                return (layer.in_features, *shape[-1:])
            return (*shape[-2:-1], layer.out_features)
    return shape


_LINEAR = (nn.Dense, nn.recurrent.DenseParams, nn.ConvLocal, nnx.Linear)
_GENERAL = (nn.DenseGeneral, nnx.LinearGeneral)
_CONV = (nn.Conv, nn.ConvTranspose, nnx.Conv, nnx.ConvTranspose)
_EINSUM = (nn.Einsum, nnx.Einsum)
_KINDS = ("BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm")
_NORMS = tuple(getattr(of, kind) for of in (nn, nnx) for kind in _KINDS)
# Layers whose scales are named after the parameters that they scale.
_REPARAMETRIZED = (nn.WeightNorm, nn.SpectralNorm, nnx.WeightNorm, nnx.SpectralNorm)
_SKIPPED = {
    "bias": (*_LINEAR, *_GENERAL, *_CONV, *_EINSUM, *_NORMS),
    "scale": _NORMS,
    "negative_slope": (nn.PReLU, nnx.PReLU),
}


def _axes(layer: Any, name: str) -> tuple[int, ...] | Skip | None:
    """Return the axes to reduce in a parameter, from the right; None: not known."""
    if name == "kernel":
        return _kernel_axes(layer)
    if name == "embedding" and isinstance(layer, nn.Embed | nnx.Embed):
        return (-1,)
    if name in ("lora_a", "lora_b") and isinstance(layer, nnx.LoRA):
        return (-2,)
    skipped = (*_REPARAMETRIZED, *_SKIPPED.get(name, ()))
    return SKIP if isinstance(layer, skipped) else None


def _kernel_axes(layer: Any) -> tuple[int, ...] | None:
    if isinstance(layer, _LINEAR):
        return (-2,)  # for a local convolution, the window and its channels
    if isinstance(layer, _GENERAL):
        features = (
            layer.features if isinstance(layer, nn.DenseGeneral) else layer.out_features
        )
        return tuple(
            range(-np.size(layer.axis) - np.size(features), -np.size(features))
        )
    if isinstance(layer, _CONV):
        of_input = -1 if getattr(layer, "transpose_kernel", False) else -2
        return (*range(-np.size(layer.kernel_size) - 2, -2), of_input)
    if isinstance(layer, _EINSUM):
        operands, _, output = (layer.einsum_str or "").replace(" ", "").partition("->")
        kernel = operands.split(",")[-1]
        # The string has no ellipsis, and was not given in the call alone.
        if kernel.isalpha() and len(set(kernel)) == len(kernel):
            size = len(kernel)
            return tuple(i - size for i, x in enumerate(kernel) if x not in output)
    return None
