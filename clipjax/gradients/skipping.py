"""Skipping a step: the common code of :func:`skip_nonfinite` and :func:`skip_spikes`.

It handles the loss that they are given, the decision to take a step, their counters, and the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.arguments import shown
from clipjax._core.devices import on_single_device
from clipjax._core.dtypes import as_arrays, in_float64, is_number, is_wide, weakly_typed_as
from clipjax._core.mesh import AxisName, as_names, placed_as, varying
from clipjax._core.stats import count


def loss_of_devices(loss: Any, axis_name: AxisName) -> jax.Array:
    """Return the mean of a loss over devices, in float32 or float64, or raise if it is not a real scalar."""
    wanted = "loss must be a real number, or a scalar array of one"
    if isinstance(loss, bool) or not is_number(loss):
        raise TypeError(f"{wanted}, got {shown(loss)}")
    value = as_arrays(loss)
    value = value if hasattr(value, "shape") else jnp.asarray(value)
    if jnp.shape(value) != ():
        raise ValueError(f"{wanted}, as the mean over the batch; got shape {jnp.shape(value)}")
    if not (jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)):
        raise TypeError(f"{wanted}, got {shown(loss)}")
    value = lax.convert_element_type(value, value.dtype if is_wide(value.dtype) else np.float32)
    each = axis_name.values() if isinstance(axis_name, Mapping) else [axis_name]
    names = {name for names in each for name in as_names(names)} | set(varying(value))
    # The decision to take a step is not differentiated.
    value = lax.stop_gradient(value)
    return lax.pmean(value, tuple(sorted(names))) if names else value


def with_loss(extra_args: dict[str, Any], loss: Any) -> dict[str, Any]:
    """Return the extra arguments for the inner transformation, which may use the loss, too."""
    return extra_args if loss is None else {**extra_args, "loss": loss}


def decided(state: Any, fine: jax.Array, max_consecutive: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return whether a step is taken, and the counters after it.

    A step is taken if it is fine, or after `max_consecutive` skipped steps in a row.
    """
    good = fine
    if max_consecutive is not None:
        good = fine | (state.skipped_in_a_row >= lax.convert_element_type(max_consecutive, np.int32))
    return good, {
        "steps": count(state.steps, jnp.ones((), bool)),
        "skipped": count(state.skipped, ~good),
        "skipped_last": lax.convert_element_type(~good, np.int32),
        # Stays unchanged while bad steps are taken, so that all are taken until one is fine.
        "skipped_in_a_row": jnp.where(fine, 0, count(state.skipped_in_a_row, ~good)),
    }


def step_if(
    good: jax.Array, step: Callable[[Any, Any], tuple[Any, Any]], updates: Any, old: Any
) -> tuple[Any, Any]:
    """Return what `step(updates, old)` returns if `good`, else zero updates and the old state.

    The parameters are in the closure of `step`, because they may contain functions, which `lax.cond` rejects.
    """

    def selected(updates: Any, old: Any) -> tuple[Any, Any]:
        new_updates, new = as_arrays(step(updates, old))
        return (  # not multiplied by 0, because 0 * NaN is NaN
            jax.tree.map(lambda u: jnp.where(good, u, jnp.zeros_like(u)), new_updates),
            jax.tree.map(lambda n, o: jnp.where(good, n, _typed_as(n, o)), new, old),
        )

    def branched(updates: Any, old: Any) -> tuple[Any, Any]:
        return lax.cond(good, step, skip, updates, old)

    def skip(updates: Any, old: Any) -> tuple[Any, Any]:
        like, state = jax.eval_shape(step, updates, old)
        zeros = jax.tree.map(lambda n, u: _typed_as(n, jnp.zeros_like(u)), like, updates)
        return zeros, jax.tree.map(_typed_as, state, old)

    updates = as_arrays(updates)
    if not isinstance(good, jax.core.Tracer):  # without jit, every step would compile the branch again
        return step(updates, old) if good else skip(updates, old)
    if jax.sharding.get_abstract_mesh().manual_axes:  # in shard_map the branches would differ in type
        return selected(updates, old)

    # On a CPU, selecting keeps the old state beside the new one, and takes 1.5 times as long as a branch.
    # An accelerator would wait for the host to choose the branch.
    # On several devices a branch is slower, too: XLA cannot share the norms inside it with the decision.
    def on_cpu(updates: Any, old: Any) -> tuple[Any, Any]:
        return lax.cond(on_single_device(), branched, selected, updates, old)

    return lax.platform_dependent(updates, old, cpu=on_cpu, default=selected)


@in_float64
def _typed_as(like: Any, x: Any) -> jax.Array:
    """Give x the dtype, the weak type and the sharding of `like`.

    What a step returns can differ in these from what it got: if the state was made in another mode of
    `jax_enable_x64`, if the optimizer changes a dtype, or on explicit mesh axes.
    """
    x = jnp.asarray(x)
    x = x if x.dtype == like.dtype else lax.convert_element_type(x, like.dtype)
    return weakly_typed_as(like, placed_as(like, x))
