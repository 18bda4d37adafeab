"""Skipping a step: the common code of :func:`skip_nonfinite` and :func:`skip_spikes`.

Each of them says which steps are fine, with a function `judge(updates, loss, state) -> (fine, fields)`.
:func:`skipping` makes the transformation: it handles the loss, the decision, the counters and the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax._core.arguments import shown
from clipjax._core.bounds import check_count
from clipjax._core.devices import on_single_device
from clipjax._core.dtypes import as_arrays, in_float64, is_number, is_wide, weakly_typed_as
from clipjax._core.links import check_optimizer, knowing, links_of
from clipjax._core.members import check_state
from clipjax._core.mesh import AxisName, as_names, placed_as, varying
from clipjax._core.stats import count, name_of

Judge: TypeAlias = Callable[[Any, jax.Array | None, Any], tuple[jax.Array, dict[str, jax.Array]]]


def skipping(
    kind: type[Any],
    optimizer: optax.GradientTransformation,
    first: Callable[[Any], dict[str, jax.Array]],
    judge: Judge,
    max_consecutive: int | None,
    axis_name: AxisName,
) -> optax.GradientTransformationExtraArgs:
    """Make a transformation that takes those steps of an optimizer that are fine, and skips the others.

    Args:
      kind: the class of the state: the counters that :func:`_decided` returns, further fields, and `inner`.
      optimizer: the inner transformation.
      first: makes the further fields before the first step, apart from int32 counters.
      judge: returns whether a step is fine, and the new values of further fields. It gets the mean loss of
        all devices, or None.
      max_consecutive: after this many skipped steps in a row, steps are taken until one is fine.
      axis_name: the mesh axes whose devices skip together.
    """
    inner = optax.with_extra_args_support(check_optimizer("optimizer", optimizer))
    if max_consecutive is not None:
        check_count("max_consecutive", max_consecutive, 1)

    def init(params: Any) -> Any:
        fields = {**first(params), "inner": inner.init(params)}
        counters = [field for field in kind._fields if field not in fields]
        zeros = {field: jnp.zeros((), jnp.int32) for field in counters}  # separate buffers, to be donated
        return kind(**fields, **zeros)

    def update(
        updates: Any, state: Any, params: Any = None, *, loss: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        check_state(name_of(kind), kind, state)
        if loss is not None:
            extra_args["loss"] = loss  # the inner transformation may use it, too
            loss = _loss_of_devices(loss, axis_name)
        fine, fields = judge(as_arrays(updates), loss, state)
        good, counters = _decided(state, fine, max_consecutive)

        def step(updates: Any, inner_state: Any) -> tuple[Any, Any]:
            return inner.update(updates, inner_state, params, **extra_args)

        new_updates, new_inner = _step_if(good, step, updates, state.inner)
        return new_updates, state._replace(**fields, **counters, inner=new_inner)

    return knowing(optax.GradientTransformationExtraArgs(init, update), *links_of(optimizer))


def _loss_of_devices(loss: Any, axis_name: AxisName) -> jax.Array:
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


def _decided(state: Any, fine: jax.Array, max_consecutive: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
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


def _step_if(
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
