"""Whether a program is compiled for one device, which is known when it is lowered, not while it is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir


def _lower_single_device(context: mlir.LoweringRuleContext) -> Any:
    axes = context.module_context.axis_context
    # Inside shard_map over all axes of a mesh, each device works on its own data alone.
    manual, mesh = getattr(axes, "manual_axes", ()), getattr(axes, "mesh", None)
    alone = set(manual) == set(mesh.axis_names) if manual and mesh else False
    single = alone or getattr(axes, "num_devices", None) == 1
    return mlir.lower_fun(lambda: jnp.asarray(single), multiple_results=False)(context)


def _single_device_now() -> Any:
    with jax.disable_jit(False):
        return jax.jit(_single_device_p.bind)()


_single_device_p = type(lax.add_p)("clipjax_single_device")
_single_device_p.def_impl(_single_device_now)
_single_device_p.def_abstract_eval(lambda: jax.core.ShapedArray((), np.dtype(bool)))
mlir.register_lowering(_single_device_p, _lower_single_device)


def on_single_device() -> jax.Array:
    """Return whether the program is compiled for one device: a constant, known at lowering."""
    return _single_device_p.bind()
