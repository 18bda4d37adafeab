"""The axes to reduce in the parameters of each known Flax layer, of Linen and of NNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import flax.linen as nn
from flax import nnx

from clipjax._core.axes import SKIP, Skip
from clipjax._unit_axes import Known, unknown

Rule: TypeAlias = Callable[[Any, int], tuple[int, ...] | Skip | None]  # (layer, its parameter's rank) -> axes


def _left_alone(_: Any, __: int) -> Skip:
    return SKIP


def _all_but_last(_: Any, rank: int) -> tuple[int, ...]:
    return tuple(range(rank - 1))


def _all_but_first(_: Any, rank: int) -> tuple[int, ...]:
    return tuple(range(1, rank))


def _general(layer: Any, _: int) -> tuple[int, ...]:
    batch = layer.batch_axis if isinstance(layer, nnx.LinearGeneral) else _as_tuple(layer.batch_dims)
    return tuple(range(len(batch), len(batch) + len(_as_tuple(layer.axis))))


def _local(_: Any, rank: int) -> tuple[int, ...]:
    return (rank - 2,)  # the window and its channels are one axis, after the axes of positions


def _transposed(layer: Any, rank: int) -> tuple[int, ...]:
    out = rank - 2 if layer.transpose_kernel else rank - 1
    return tuple(axis for axis in range(rank) if axis != out)


def _einsum(layer: Any, rank: int) -> tuple[int, ...] | None:
    """Return the axes of the kernel that are not in the output."""
    operands, _, output = (layer.einsum_str or "").replace(" ", "").partition("->")
    kernel = operands.split(",")[-1]
    if len(set(kernel)) != rank or not kernel.isalpha():  # an ellipsis, or an equation given only in the call
        return None
    return tuple(axis for axis, label in enumerate(kernel) if label not in output)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _named(*names: str) -> tuple[type, ...]:
    """Return the Linen and NNX layers of these names, if this version of Flax has them."""
    return tuple(getattr(of, name) for of in (nn, nnx) for name in names if hasattr(of, name))


_BIAS = {"bias": _left_alone}
_NORMS = _named("BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm")

# The rules of each layer's own parameters, by name.
_LAYERS: tuple[tuple[tuple[type, ...], dict[str, Rule]], ...] = (
    ((*_named("Dense", "Linear", "Conv"), nn.recurrent.DenseParams), {"kernel": _all_but_last, **_BIAS}),
    (_named("DenseGeneral", "LinearGeneral"), {"kernel": _general, **_BIAS}),
    (_named("ConvLocal"), {"kernel": _local, **_BIAS}),
    (_named("ConvTranspose"), {"kernel": _transposed, **_BIAS}),
    (_named("Einsum"), {"kernel": _einsum, **_BIAS}),
    (_named("Embed"), {"embedding": _all_but_first}),
    (_named("LoRA"), {"lora_a": _all_but_last, "lora_b": _all_but_last}),
    (_NORMS, {"scale": _left_alone, **_BIAS}),
    (_named("PReLU"), {"negative_slope": _left_alone}),
)


def own_axes(layer: Any, name: str, rank: int) -> Known:
    """Return the axes to reduce in a layer's own parameter."""
    if isinstance(layer, nn.WeightNorm | nn.SpectralNorm):
        return SKIP  # scales, named after the parameters of the layer inside
    rules = next((rules for types, rules in _LAYERS if isinstance(layer, types)), None)
    if rules is None:
        return unknown(layer, name)
    axes = rules[name](layer, rank) if name in rules else None
    return f"{name!r} of {type(layer).__name__}" if axes is None else axes
