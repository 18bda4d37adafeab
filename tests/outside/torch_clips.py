"""torch's clips of gradients, replaced by ours: tensors become arrays, which are copied back."""

from __future__ import annotations

import importlib
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clipjax import functional
from tests.outside.swap import counted, replace


def swap() -> None:
    """Replace them in torch, for the CPU. JAX needs its 64 bits for tensors of float64."""
    torch: Any = importlib.import_module("torch")

    def as_list(tensors: Any) -> list[Any]:
        found = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not found and isinstance(tensors, types.GeneratorType):
            message = "`parameters` is an empty generator, no gradient clipping will occur."
            warnings.warn(message, stacklevel=4)
        return found

    def gradients(parameters: list[Any]) -> list[Any]:
        return [p.grad for p in parameters if p.grad is not None]

    def arrays(tensors: list[Any]) -> list[jax.Array]:
        return [jnp.asarray(x.detach().numpy()) for x in tensors]

    def copy_back(clipped: list[jax.Array], tensors: list[Any]) -> None:
        with torch.no_grad():
            for array, tensor in zip(clipped, tensors, strict=True):
                tensor.copy_(torch.from_numpy(np.array(array)))

    def checked(norm: Any, order: Any, error_if_nonfinite: bool) -> Any:
        if error_if_nonfinite and not np.isfinite(norm):
            raise RuntimeError(f"The total norm of order {float(order)} for gradients is non-finite")
        return torch.from_numpy(np.array(norm))

    def get_total_norm(
        tensors: Any, norm_type: Any = 2.0, error_if_nonfinite: bool = False, foreach: Any = None
    ) -> Any:
        norm = functional.global_norm(arrays(as_list(tensors)), float(norm_type))
        return checked(norm, norm_type, error_if_nonfinite)

    def clip_grads_with_norm_(parameters: Any, max_norm: Any, total_norm: Any, foreach: Any = None) -> None:
        grads = gradients(as_list(parameters))
        norm = jnp.asarray(total_norm.numpy())
        copy_back(functional.clip_by_global_norm(arrays(grads), max_norm, norm=norm)[0], grads)

    def clip_grad_norm_(
        parameters: Any,
        max_norm: Any,
        norm_type: Any = 2.0,
        error_if_nonfinite: bool = False,
        foreach: Any = None,
    ) -> Any:
        grads = gradients(as_list(parameters))
        clipped, norm = functional.clip_by_global_norm(arrays(grads), max_norm, float(norm_type))
        total = checked(norm, norm_type, error_if_nonfinite)
        copy_back(clipped, grads)
        return total

    def clip_grad_value_(parameters: Any, clip_value: Any, foreach: Any = None) -> None:
        grads = gradients(as_list(parameters))
        copy_back(functional.clip_by_value(arrays(grads), -clip_value, clip_value), grads)

    for ours in (get_total_norm, clip_grads_with_norm_, clip_grad_norm_, clip_grad_value_):
        replace("torch", getattr(torch.nn.utils, ours.__name__), counted(ours))
