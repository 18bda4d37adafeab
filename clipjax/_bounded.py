"""An optimizer with its gradients clipped before it and its weights projected after it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

from clipjax._chain import as_projections, chain, check_transformation, knowing, links_of, projections_of
from clipjax.gradients.fixed import zero_nonfinite
from clipjax._core.mesh import AxisName, names_of_leaf, varying
from clipjax.monitoring.metrics import count
from clipjax._core.norms import as_arrays, in_float64, tree_norm, weakly_typed_as
from clipjax.weights.projections import Projection

Nonfinite = Literal["propagate", "zero", "skip"]


class SkipNonfiniteState(NamedTuple):
    """State of :func:`skip_nonfinite`."""

    steps: jax.Array  # int32: steps so far
    skipped: jax.Array  # int32: steps skipped so far
    skipped_in_a_row: jax.Array  # int32: steps skipped since the last good one
    inner: Any


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
        good = _all_finite(updates, axis_name)

        def step() -> tuple[Any, Any]:
            return inner.update(updates, state.inner, params, **extra_args)

        new_updates, new_inner = step_if(good, step, updates, state.inner)
        return new_updates, SkipNonfiniteState(
            steps=count(state.steps, jnp.ones((), bool)),
            skipped=count(state.skipped, ~good),
            skipped_in_a_row=jnp.where(good, 0, count(state.skipped_in_a_row, ~good)),
            inner=new_inner,
        )

    return knowing(optax.GradientTransformationExtraArgs(init, update), *links_of(optimizer))


def step_if(good: jax.Array, step: Callable[[], tuple[Any, Any]], updates: Any, old: Any) -> tuple[Any, Any]:
    """Return what `step` returns if `good`, else zero updates and the old state."""
    split = any(varying(x) for x in jax.tree.leaves((updates, old)))  # branches would differ in type
    if jax.default_backend() == "cpu" and not split:
        # Selecting keeps the old state beside the new one, and takes half as long again as a branch.
        shapes, _ = jax.eval_shape(step)

        def skip() -> tuple[Any, Any]:
            return jax.tree.map(lambda u: weakly_typed_as(u, jnp.zeros(u.shape, u.dtype)), shapes), old

        return lax.cond(good, step, skip)
    # An accelerator would wait for the host to choose a branch. (0 * NaN would be NaN.)
    new_updates, new = step()
    return (
        jax.tree.map(lambda u: jnp.where(good, u, jnp.zeros_like(u)), new_updates),
        jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old),
    )


@in_float64
def _all_finite(tree: Any, axis_name: AxisName) -> jax.Array:
    return jnp.isfinite(tree_norm(as_arrays(tree), math.inf, lambda leaf: names_of_leaf(leaf, axis_name)))


def bounded(
    optimizer: optax.GradientTransformation,
    *,
    clip: optax.GradientTransformation | None = None,
    project: Callable[[Any], Any] | Sequence[Callable[[Any], Any]] | None = None,
    nonfinite: Nonfinite = "propagate",
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Put bounds around an optimizer, in the order that is right: clip, optimize, project.

    Args:
      optimizer: any gradient transformation, as `optax.adam(1e-3)`.
      clip: a gradient transformation that goes before it, as `clipjax.clip_by_global_norm(1.0)`.
      project: a projection that goes after it, as `clipjax.max_norm(3.0)`, or any function of the
        weights; or several in a sequence, applied in its order (the last one's bound is sure to hold,
        the others' where it does not move the weights out of them).
      nonfinite: what NaN and infinite gradient entries do. `"propagate"`: show, as NaN; `"zero"`:
        become 0 and are counted (:func:`clipjax.zero_nonfinite`); `"skip"`: leave out the step and
        freeze the whole state (:func:`skip_nonfinite`).
      axis_name: the mesh axes whose devices do so together, in `pmap` and unchecked `shard_map`.

    Returns:
      A transformation; `clipjax.metrics` reads what all of its parts did.

    Raises:
      TypeError, ValueError: an argument is of the wrong kind, or in the wrong place: a projection as
        `optimizer` or `clip`, or `optax.MultiSteps` as `optimizer`.

    Gradients are accumulated outside, so that their mean is clipped, once:
    `optax.MultiSteps(bounded(…), every_k_schedule=4)`. A NaN would stay in its sum for ever: keep it
    out with `should_skip_update_fn=optax.skip_not_finite`, or with :func:`skip_nonfinite` around it all.

    Example:
      >>> import clipjax, optax
      >>> tx = clipjax.bounded(
      ...     optax.adam(1e-3),
      ...     clip=clipjax.clip_by_global_norm(1.0),
      ...     project=clipjax.max_norm(3.0),
      ...     nonfinite="skip",
      ... )
    """
    if nonfinite not in get_args(Nonfinite):
        raise ValueError(f"nonfinite must be one of {get_args(Nonfinite)}, got {nonfinite!r}")
    links = [_check_before("optimizer", optimizer)]
    if clip is not None:
        links.insert(0, _check_before("clip", clip))
    if nonfinite == "zero":
        links.insert(0, zero_nonfinite(axis_name=axis_name))
    if project is not None:
        links.extend(as_projections("project", project))
    tx = chain(*links)
    return skip_nonfinite(tx, axis_name=axis_name) if nonfinite == "skip" else tx


def check_optimizer(name: str, value: Any) -> optax.GradientTransformation:
    """Return `value` if it transforms gradients and is no mere projection."""
    if isinstance(value, Projection):
        raise ValueError(
            f"{name}: {value!r} projects weights: it goes last in a chain, and into bounded as project="
        )
    return check_transformation(name, value)


def _check_before(name: str, value: Any) -> optax.GradientTransformation:
    """Return `value` if it may stand before the projections in `bounded`."""
    update = getattr(value, "update", None)
    if isinstance(getattr(update, "__self__", None), optax.MultiSteps):  # the object, or its transformation
        raise ValueError(
            f"{name}: inside bounded, optax.MultiSteps would add up gradients that are clipped already: "
            f"put it around, as in optax.MultiSteps(clipjax.bounded(…), every_k_schedule=k)"
        )
    for projection in projections_of(check_optimizer(name, value)):
        raise ValueError(f"{name}: a chain that ends in {projection!r}: give that to bounded as project=")
    return value
