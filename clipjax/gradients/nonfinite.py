"""Gradients that are not finite: entries that are zeroed, steps that are skipped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax._core.arguments import explained
from clipjax._core.axes import is_measured
from clipjax._core.links import Clip, check_optimizer, knowing, links_of
from clipjax._core.members import check_state
from clipjax._core.mesh import AxisName, names_of_leaves, placed_as
from clipjax._core.norms import as_arrays, in_float64, tree_norm, weakly_typed_as
from clipjax._core.stats import count
from clipjax._core.xla_cpu import on_single_device


class ZeroNonfiniteState(NamedTuple):
    """State of :func:`zero_nonfinite`."""

    steps: jax.Array  # int32: steps so far
    nonfinite_count: jax.Array  # int32: entries zeroed so far
    nonfinite_steps: jax.Array  # int32: steps at which there were any


class SkipNonfiniteState(NamedTuple):
    """State of :func:`skip_nonfinite`."""

    steps: jax.Array  # int32: steps so far
    skipped: jax.Array  # int32: steps skipped so far
    skipped_in_a_row: jax.Array  # int32: steps skipped since the last good one
    inner: Any


@explained
def zero_nonfinite(*, axis_name: AxisName = None) -> optax.GradientTransformationExtraArgs:
    """Replace NaN and infinite entries by 0, and count them.

    In front of a clip it keeps one bad entry from making the rest NaN. To leave out the whole step
    instead, see `clipjax.skip_nonfinite`.

    Args:
      axis_name: the mesh axes to count over, in `pmap` and unchecked `shard_map`.

    Returns:
      A transformation whose state counts `steps`, `nonfinite_count` (entries zeroed so far) and
      `nonfinite_steps`, as int32 scalars that stop at their largest value.

    Equals `optax.zero_nans`, with infinities too.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.zero_nonfinite()
      >>> grads = jnp.array([1.0, jnp.nan, -jnp.inf])
      >>> clean, state = tx.update(grads, tx.init(grads))
      >>> print(clean, state.nonfinite_count)
      [1. 0. 0.] 2
    """

    def init(params: Any) -> ZeroNonfiniteState:
        del params
        return ZeroNonfiniteState(*(jnp.zeros((), jnp.int32) for _ in range(3)))

    def update(
        updates: Any, state: ZeroNonfiniteState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, ZeroNonfiniteState]:
        del params, extra_args
        stateless = state is None or isinstance(state, optax.EmptyState)
        if not stateless:
            check_state("zero_nonfinite", ZeroNonfiniteState, state)
        bad = jnp.zeros((), jnp.int32)
        treedef: Any
        leaves, treedef = jax.tree.flatten(as_arrays(updates))
        for i, (leaf, names) in enumerate(zip(leaves, names_of_leaves(updates, axis_name), strict=True)):
            if is_measured(leaf):
                finite = jnp.isfinite(leaf)
                found = jnp.sum(~finite, dtype=np.int32)
                bad = count(bad, lax.psum(found, names) if names else found)
                leaves[i] = jnp.where(finite, leaf, jnp.zeros_like(leaf))
        if stateless:
            return treedef.unflatten(leaves), state
        one = jnp.ones((), bool)
        return treedef.unflatten(leaves), ZeroNonfiniteState(
            count(state.steps, one), count(state.nonfinite_count, bad), count(state.nonfinite_steps, bad > 0)
        )

    return Clip(init, update)


@explained
def skip_nonfinite(
    optimizer: optax.GradientTransformation, *, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    """Skip every step whose gradients have a NaN or an infinite entry.

    Such a step returns zero updates and leaves the inner state as it was: moments, schedules and
    statistics do not see it.

    Args:
      optimizer: a gradient transformation, as a whole chain.
      axis_name: the mesh axes whose devices skip together, in `pmap` and unchecked `shard_map`.

    Returns:
      A transformation whose state counts `steps`, `skipped` and `skipped_in_a_row` as int32 scalars.

    Raises:
      TypeError: `optimizer` is no gradient transformation.

    Differs from `optax.apply_if_finite` in never giving in after a number of bad steps (watch
    `skipped_in_a_row`), and in running without a branch on accelerators, which would wait for it.

    Example:
      >>> import clipjax, optax, jax.numpy as jnp
      >>> tx = clipjax.skip_nonfinite(optax.sgd(0.1, momentum=0.9))
      >>> w = jnp.array([1.0, 2.0])
      >>> updates, state = tx.update(jnp.array([jnp.nan, 1.0]), tx.init(w), w)
      >>> print(updates, state.skipped)
      [0. 0.] 1
    """
    inner = optax.with_extra_args_support(check_optimizer("optimizer", optimizer))

    def init(params: Any) -> SkipNonfiniteState:
        zero = functools.partial(jnp.zeros, (), jnp.int32)  # a buffer each, to be donated
        return SkipNonfiniteState(zero(), zero(), zero(), inner.init(params))

    def update(
        updates: Any, state: SkipNonfiniteState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, SkipNonfiniteState]:
        check_state("skip_nonfinite", SkipNonfiniteState, state)
        good = _all_finite(updates, axis_name)

        def step(updates: Any, inner_state: Any) -> tuple[Any, Any]:
            return inner.update(updates, inner_state, params, **extra_args)

        new_updates, new_inner = step_if(good, step, updates, state.inner)
        return new_updates, SkipNonfiniteState(
            steps=count(state.steps, jnp.ones((), bool)),
            skipped=count(state.skipped, ~good),
            skipped_in_a_row=jnp.where(good, 0, count(state.skipped_in_a_row, ~good)),
            inner=new_inner,
        )

    return knowing(optax.GradientTransformationExtraArgs(init, update), *links_of(optimizer))


def step_if(
    good: jax.Array, step: Callable[[Any, Any], tuple[Any, Any]], updates: Any, old: Any
) -> tuple[Any, Any]:
    """Return what `step(updates, old)` returns if `good`, else zero updates and the old state.

    The parameters are in the closure of `step`: there may be functions among them, which no branch takes.
    """

    def selected(updates: Any, old: Any) -> tuple[Any, Any]:
        new_updates, new = as_arrays(step(updates, old))
        return (  # 0 * NaN would be NaN
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
    if not isinstance(good, jax.core.Tracer):  # without jit a branch would be compiled anew at every step
        return step(updates, old) if good else skip(updates, old)
    if jax.sharding.get_abstract_mesh().manual_axes:  # in shard_map branches would differ in type
        return selected(updates, old)

    # On a CPU selecting keeps the old state beside the new one, and takes half as long again as a branch.
    # An accelerator would wait for the host to choose one.
    # So would several devices: what a branch measures XLA cannot share with what chose it.
    def on_cpu(updates: Any, old: Any) -> tuple[Any, Any]:
        return lax.cond(on_single_device(), branched, selected, updates, old)

    return lax.platform_dependent(updates, old, cpu=on_cpu, default=selected)


@in_float64
def _typed_as(like: Any, x: Any) -> jax.Array:
    """Give x the dtype, the weak type and the sharding of `like`.

    What a step returns can differ from what it got: in another mode of `jax_enable_x64` than the state was
    made in, with an optimizer that changes a dtype, on explicit mesh axes.
    """
    x = jnp.asarray(x)
    x = x if x.dtype == like.dtype else lax.convert_element_type(x, like.dtype)
    return weakly_typed_as(like, placed_as(like, x))


@in_float64
def _all_finite(tree: Any, axis_name: AxisName) -> jax.Array:
    # The norm that most clips measure, too: XLA computes it once for both.
    return jnp.isfinite(tree_norm(as_arrays(tree), 2.0, axis_name))
