"""A projection: Optax's pair of functions, and `apply`, the function of the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax._core.aliases import Scalar, State, Step, Tree
from clipjax._core.bounds import is_real
from clipjax._core.clip import rescaled
from clipjax._core.leaves import (
    Leaves,
    beside,
    flatten,
    is_inexact,
    shapes_of,
    short_repr,
)
from clipjax._core.norms import sum_dtype, warn_if_local
from clipjax._core.states import check_state


class ProjectionState(NamedTuple):
    """The state of a projection whose bound is a schedule.

    Other projections have no state. None has metrics: to log the largest norm, for
    example, all new weights would have to stay in memory.
    """

    step: Scalar  # int32: the number of updates


class Projection(optax.GradientTransformationExtraArgs):
    """A projection of weights: an Optax transformation with a function `apply`.

    `params = max_norm(3.0).apply(params)` projects the weights. As the last
    transformation of a chain, a projection changes the update so that the weights end
    where `apply` would bring them: `optax.chain(optax.adam(1e-3), max_norm(3.0))`. A
    transformation after it would move the weights again; :func:`violations` finds out
    whether one did.
    """

    # apply(params, *, step=None): the projected weights. `step` is needed if a bound is
    # a schedule; `keep_norm` and `qk_clip` need more.
    apply: Callable[..., Tree]
    # The names of what `apply` takes besides the weights and the step.
    needs: frozenset[str] = frozenset()
    # A function that returns for each leaf the axes of its units, or SKIP; None if the
    # projection rescales no units.
    axes_of: Callable[[Leaves], Sequence[Any]] | None = None
    text: str = "a projection"  # its name

    def __repr__(self) -> str:
        return self.text


def projection(
    text: str,
    function: Callable[..., list[Any]],
    *,
    scheduled: bool = False,
    axes_of: Callable[[Leaves], Sequence[Any]] | None = None,
    needs: Sequence[str] = (),
    unrounded: bool = False,
    check: Callable[[Leaves], Any] | None = None,
) -> Projection:
    """Make a projection from a function of leaves that returns one value for each.

    Args:
      text: the name of the function that makes it.
      function: `function(weights: Leaves, step, **needs) -> values`.
      scheduled: whether the function depends on the step.
      axes_of: returns the axes of the units that the function rescales.
      needs: the names of what the function takes besides: arguments of `update`, or
        `old`, the weights before the update.
      unrounded: whether `update` gives the function sums that are not rounded to 16
        bits yet.
      check: raises the errors of `init`, where the arguments of `update` are not known.

    Returns:
      The projection.
    """

    def apply(params: Tree, *args: Any, step: Step = None, **kwargs: Any) -> Tree:
        warn_if_local()
        if step is not None and not (is_real(step) and np.ndim(step) == 0):
            raise TypeError(f"step must be a number, got {short_repr(step)}")
        if len(args) > len(needs) or not {*kwargs} <= {*needs[len(args) :]}:
            names = ", ".join(("params", *needs))
            raise TypeError(f"{text}.apply takes {names}, and step= by name")
        weights = flatten(params)
        return weights.rebuild(function(weights, step, *args, **kwargs))

    def init(params: Tree) -> Any:
        first = jnp.zeros((), np.int32)

        def trace(weights: Leaves) -> Any:
            old = {"old": weights} if "old" in needs else {}
            return function(weights, first, **old)

        weights = flatten(params)
        if check is None:
            shapes_of(trace, weights)  # raises its errors
        else:
            check(weights)
        return ProjectionState(first) if scheduled else optax.EmptyState()

    def update(
        updates: Tree, state: State, params: Tree = None, **extra: Any
    ) -> tuple[Tree, Any]:
        warn_if_local()
        if scheduled:
            check_state(text, state, ProjectionState)
        step = state.step if scheduled else None
        changes = flatten(updates)
        before = beside(changes, params, "params", text)
        added = _sum if unrounded else applied
        summed = list(map(added, before, changes.values))
        if axes_of is not None:
            # New weights of 16 bits are compared with the projected ones. Without the
            # barrier, a step on an H100 moves 19.0 times the bytes of the parameters
            # instead of 16.0 (JAX 0.12).
            summed = [
                lax.optimization_barrier(x) if _is_narrow(x) else x for x in summed
            ]
        known = {**extra, "old": changes._replace(values=before)}
        given = {key: known[key] for key in needs if key in known}
        wanted = function(changes._replace(values=summed), step, **given)
        steps = list(map(_step_to, wanted, summed, before, changes.values))
        if scheduled:
            state = ProjectionState(optax.safe_increment(step))
        return changes.rebuild(steps), state

    apply.__qualname__ = f"{text}.apply"  # as errors of Python show it
    made = Projection(init, update)
    made.apply, made.needs = apply, frozenset(needs)
    made.axes_of, made.text = axes_of, text
    return made


def rescaled_weights(values: Sequence[Any], factors: Sequence[Any]) -> list[Any]:
    """Return weights times their factors, with a barrier around weights with a norm.

    Without the barrier, XLA would compute new weights twice, from both moments of Adam,
    rather than keep them in memory while it measures them: with a clip, a step in a
    chain moves 11.0 times the bytes of the parameters on a TPU v5e instead of 9.0. A
    barrier in front of the measurement would cost a pass over leaves that are larger
    than the chip's own memory (JAX 0.12).
    """
    kept = [
        x if factor is None else lax.optimization_barrier(x)
        for x, factor in zip(values, factors, strict=True)
    ]
    return rescaled(kept, factors)


def applied(param: Any, update: Any) -> Any:
    """Return what `optax.apply_updates` makes of a parameter."""
    if not is_inexact(param):
        return param
    return _rounded(_sum(param, update), param.dtype).astype(param.dtype)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Return float32 numbers rounded to a dtype of 16 bits, as float32.

    Inside a program XLA may leave out the rounding of a cast, but not a
    `reduce_precision`. That operation makes subnormal numbers 0, which are numbers up
    to 6e-5 in float16, so they are kept apart.
    """
    info = jnp.finfo(dtype)
    if info.bits != 16:
        return x
    rounded = lax.reduce_precision(x, info.nexp, info.nmant)
    if info.nexp < 8:
        is_subnormal = jnp.abs(x) < float(info.smallest_normal)
        rounded = jnp.where(is_subnormal, x, rounded)
    return rounded


def _is_narrow(x: Any) -> bool:
    """Return whether x is an array of floats with fewer than 32 bits."""
    return is_inexact(x) and jnp.finfo(x.dtype).bits < 32


def _sum(param: Any, update: Any) -> Any:
    """Return param + update, in float32 if the parameter has 16 bits."""
    if not is_inexact(param):
        return param
    if not _is_narrow(param):
        return (param + update).astype(param.dtype)
    wide = sum_dtype(param.dtype)
    added = update.astype(wide)
    if _is_narrow(update):
        added = _rounded(added, update.dtype)
    return param.astype(wide) + added


def _step_to(wanted: Any, summed: Any, param: Any, update: Any) -> Any:
    """Return the update that takes a parameter to `wanted`, in float32 at least.

    An update of 16 bits would lose the direction of weights that start far outside the
    bound. p + ((p + u) - p) is p + u, so that a weight within the bound ends where it
    would have ended without the projection. There, an update of 16 bits is returned as
    it is, since (p + u) - p often differs from it.
    """
    if wanted is summed or not is_inexact(param):
        return update
    wide = np.result_type(sum_dtype(param.dtype), sum_dtype(update.dtype))
    dtype = param.dtype if jnp.iscomplexobj(param) else wide
    step = wanted.astype(dtype) - param.astype(dtype)
    if not _is_narrow(update):
        return step
    itself = _rounded(update.astype(dtype), update.dtype)
    return jnp.where(wanted == summed, itself, step)


def project(function: Projection | Callable[[Any], Any]) -> Projection:
    """Make a projection from any function of the whole tree of weights.

    Use it for the functions in `optax.projections`, and for constraints of your own
    that no projection of clipjax covers. A projection is returned as it is.

    Args:
      function: `params -> params`, which keeps structure, shapes and dtypes.

    Returns:
      A :class:`Projection`, which you apply directly, or put at the end of a chain.

    Raises:
      TypeError: `function` is not a function of weights; in `init` or `apply`, it does
        not keep structure, shapes and dtypes.

    See Also:
      :func:`bounded` takes such a function as `project=`; :func:`with_metrics` makes a
      clip of your own.

    Example:
      >>> import clipjax, optax, jax.numpy as jnp
      >>> simplex = clipjax.project(optax.projections.projection_simplex)
      >>> print(simplex.apply(jnp.array([2.0, 0.0])))
      [1. 0.]
    """
    return as_projection("function", function)


def as_projection(name: str, function: Any) -> Projection:
    """Return a projection, or make one from a function; errors name the argument."""
    if isinstance(function, Projection):
        return function
    if isinstance(function, optax.GradientTransformation):
        raise TypeError(
            f"{name} must be a projection or a function of the weights, got "
            f"{short_repr(function)}, a gradient transformation. Pass the projection "
            "alone, which is the last one of a chain; a clip is no projection, and "
            "goes before the optimizer; in place of a mask, write axes= or where="
        )
    if not callable(function):
        raise TypeError(
            f"{name} must be a projection or a function of the weights, got "
            f"{short_repr(function)}"
        )

    def project_tree(weights: Leaves, step: Step) -> list[Any]:
        params = weights.rebuild(weights.values)
        hint = (
            "The function gets the whole tree of weights; for each leaf, use "
            "jax.tree.map in it. A projection is called first: clipjax.max_norm(3.0)."
        )
        try:
            projected = function(params)
        except TypeError as error:
            error.add_note(hint)
            raise
        wanted: Any = jax.tree.structure(params)
        returned: Any = jax.tree.structure(projected)
        if returned != wanted:
            raise TypeError(
                f"{name} must keep the structure of the weights, {wanted}, but "
                f"returned {returned}. {hint}"
            )
        after = flatten(projected)
        for old, new in zip(weights.each, after.values, strict=True):
            was, now = (f"{x.dtype}{list(x.shape)}" for x in (old.value, new))
            if was != now:
                raise TypeError(
                    f"{name} must keep shapes and dtypes, but made {now} of {old}, "
                    f"which is {was}"
                )
        rows = zip(weights.values, after.values, strict=True)
        return [new if is_inexact(old) else old for old, new in rows]

    return projection("clipjax.project", project_tree)
