"""Projections of weights: a function of the weights, and a link for the end of a chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax._src import core  # no public name for the current trace

from clipjax._axes import FAN_IN, Axes, check_axes, is_measured, path_name
from clipjax._bounds import Bound, bound_at
from clipjax._mesh import AxisName, varying
from clipjax._metrics import Seen, observe, start
from clipjax._norms import as_arrays, in_float64, tree_norm
from clipjax._rescale import neighbour, rounded, weakly_typed_as, widened
from clipjax._trees import Report, clip_units

Constrain = Callable[[Any, Any], tuple[Any, Report]]


class MaxNormState(NamedTuple):
    """State of :func:`max_norm` as a link."""

    seen: Seen


class ProjectState(NamedTuple):
    """State of :func:`project` as a link; `seen.norm` is the distance moved."""

    seen: Seen


class Projection(optax.GradientTransformationExtraArgs):
    """A projection of weights, with two uses.

    Called, it projects: `params = max_norm(3.0)(params)`. As the **last** link of a chain it changes
    the update so that the parameters end up projected: `optax.chain(…, max_norm(3.0))`. To Optax it
    is a gradient transformation of two fields; being a tuple, it can't be given to `jax.jit` as it
    is: compile the step around it, or `jax.jit(projection.__call__)`.
    """

    constrain: Constrain
    name: str

    def __new__(cls, name: str, state: Callable[[Seen], Any], constrain: Constrain) -> Projection:
        """Make a projection of `constrain(params, step) -> (params, report)`."""
        self = super().__new__(cls, *_link(state, constrain))
        self.constrain, self.name = constrain, name
        return self

    def __repr__(self) -> str:
        return self.name

    def __copy__(self) -> Projection:
        return self

    def __deepcopy__(self, memo: Any) -> Projection:
        return self

    def __call__(self, params: Any, step: Any = None) -> Any:
        """Project `params`; `step` is for a bound that is a schedule."""
        return self.constrain(params, step)[0]


def max_norm(
    radius: Bound, *, axes: Axes = FAN_IN, specs: Any = None, axis_name: AxisName = None
) -> Projection:
    """Project each unit's weights onto the ball of norm `radius`: w * min(1, radius / |w|).

    Args:
      radius: a number, an array that broadcasts to the units, or a schedule `step -> radius`.
      axes: the axes that are reduced, as in `clipjax.clip_by_norm`. By default `clipjax.fan_in`:
        the incoming weights of each unit of a Dense or Conv kernel, and biases left alone.
      specs: inside `shard_map`, the `PartitionSpec` tree of the parameters.
      axis_name: the mesh axes that split the units, in `pmap` and unchecked `shard_map`.

    Returns:
      A :class:`Projection`: a function `params -> params`, and a link for the end of a chain, which
      needs `params` in `update`.

    Raises:
      TypeError, ValueError: `radius` is no number, negative or NaN; `axes` are no axes. As a link:
      no `params` in `update`.

    Guarantees: measured in float64, no projected unit's norm is above `radius`, by the call and after
    `optax.apply_updates`, in any dtype; a unit outside ends at most 4 ulp below it (for a link, ulp of
    the larger of its norm before and the radius); a unit inside stays bit for bit, so that projecting
    twice is projecting once; NaN shows. As a link, 16-bit leaves get a float32 update, which
    `optax.apply_updates` rounds once; inside `optax.apply_if_finite`, which does not allow that, the
    update keeps its dtype, and the 4 ulp are those of a 16-bit sum.

    Equals `keras.constraints.MaxNorm` (whose `axis` is `axes`) and TensorFlow 1's assign operations
    after the step.

    References:
      Srebro et al., 2005, Maximum-margin matrix factorization; Srivastava et al., 2014, Dropout.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.array([[3.0, 0.3], [4.0, 0.4]])  # (in, out): a unit is a column
      >>> print(clipjax.max_norm(1.0)(kernel).round(3))
      [[0.6 0.3]
       [0.8 0.4]]
    """
    bound, axes = bound_at("radius", radius), check_axes(axes)

    def constrain(params: Any, step: Any) -> tuple[Any, Report]:
        at_step = bound(step)
        return clip_units(params, lambda _: at_step, axes, 2.0, specs, axis_name)

    return Projection(f"clipjax.max_norm({radius!r})", MaxNormState, constrain)


def project(function: Callable[[Any], Any]) -> Projection:
    """Make a projection of any function of the weights; a projection is returned as it is.

    Args:
      function: `params -> params`, keeping structure, shapes and dtypes, as those of
        `optax.projections`.

    Returns:
      A :class:`Projection`. As a link its metric `norm` is the distance by which it moved the
      weights at the last step. After `optax.apply_updates` every entry is what `function` returned,
      to the rounding of that sum, and on the inner side of it.

    Raises:
      TypeError: `function` cannot be called, or does not keep structure, shapes and dtypes.

    Example:
      >>> import clipjax, optax, jax.numpy as jnp
      >>> simplex = clipjax.project(optax.projections.projection_simplex)
      >>> print(simplex(jnp.array([2.0, 0.0])))
      [1. 0.]
    """
    if isinstance(function, Projection):
        return function
    if not callable(function):
        raise TypeError(f"function must be a function of the weights, got {function!r}")

    def constrain(params: Any, step: Any) -> tuple[Any, Report]:
        del step
        params = as_arrays(params)
        projected = as_arrays(function(params))
        given: Any
        given, returned = jax.tree.structure(params), jax.tree.structure(projected)
        if returned != given:
            raise TypeError(
                f"function must keep the structure of the weights, {given}, but returned {returned}"
            )
        jax.tree_util.tree_map_with_path(_check_kept, params, projected)
        moved = tree_norm(_difference(projected, params), 2.0, varying)
        return projected, Report(moved, jnp.ones(()), in_float64(lambda: moved > 0)())

    return Projection(f"clipjax.project({function!r})", ProjectState, constrain)


def _check_kept(path: Any, given: Any, returned: Any) -> None:
    if (given.shape, given.dtype) != (returned.shape, returned.dtype):
        raise TypeError(
            f"function must keep shapes and dtypes, but made {returned.dtype}{list(returned.shape)} of "
            f"{path_name(path)!r}, which is {given.dtype}{list(given.shape)}"
        )


def _difference(a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: x - y if is_measured(x) else None, a, b)


def _link(state: Callable[[Seen], Any], constrain: Constrain) -> optax.GradientTransformationExtraArgs:
    def init(params: Any) -> Any:
        return state(start(params))

    def update(updates: Any, state_: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        del extra_args
        if params is None:
            raise ValueError(
                "a projection bounds the parameters after the update: pass them, as in "
                "tx.update(grads, state, params)"
            )
        treedef: Any
        leaves, treedef = jax.tree.flatten(as_arrays(updates))
        before = treedef.flatten_up_to(as_arrays(params))
        after = [_applied(p, u) for p, u in zip(before, leaves, strict=True)]
        wanted, report = constrain(treedef.unflatten(after), state_.seen.steps)
        leaves = [
            _step_to(p, u, v, t) if is_measured(p) else u
            for p, u, v, t in zip(before, leaves, after, treedef.flatten_up_to(wanted), strict=True)
        ]
        return treedef.unflatten(leaves), state(observe(state_.seen, report))

    return optax.GradientTransformationExtraArgs(init, update)


def _applied(before: Any, update: Any) -> Any:
    """What `optax.apply_updates` makes of a parameter, to the last bit."""
    if not is_measured(before):
        return before
    if jnp.iscomplexobj(before) or before.dtype in (np.float32, np.float64):
        return (before + update).astype(before.dtype)
    return rounded(widened(before) + widened(update), before.dtype).astype(before.dtype)


def _step_to(before: Any, update: Any, after: jax.Array, wanted: Any) -> jax.Array:
    """The update that takes `before` to `wanted`, where it is not where `update` ends anyway."""
    before, update, wanted = jnp.asarray(before), jnp.asarray(update), jnp.asarray(wanted)
    if not jnp.iscomplexobj(before):
        return _real_step_to(before, update, after, wanted)
    parts = (
        _real_step_to(part(before), part(update), part(after), part(wanted)) for part in (jnp.real, jnp.imag)
    )
    return lax.complex(*parts)


def _real_step_to(before: jax.Array, update: jax.Array, after: jax.Array, wanted: jax.Array) -> jax.Array:
    """For real leaves. The sum `before + step` is rounded, once in the step and once in the sum.

    An entry that would end beyond `wanted`, seen from `after`, is held back by one unit of its step's
    last place: short of the bound, never over it.
    """
    dtype = _step_dtype(before, update)
    step = rounded(widened(wanted) - widened(before), dtype).astype(dtype)
    end = widened(_applied(before, step))
    down = after > wanted
    beyond = jnp.where(down, end > widened(wanted), end < widened(wanted))
    held_back = neighbour(step, (step < 0) == down)
    step = jnp.where(wanted == after, update.astype(dtype), jnp.where(beyond, held_back, step))
    return weakly_typed_as(update, step) if step.dtype == update.dtype else step


def _step_dtype(before: jax.Array, update: jax.Array) -> Any:
    """The dtype of an update that moves a parameter exactly enough: at least float32.

    From a weight of 16000 no bfloat16 update leads to 1: it ends at 0.
    """
    if _in_apply_if_finite():
        return update.dtype
    wide = np.float64 in (before.dtype, update.dtype)
    return np.dtype(np.float64 if wide else np.float32)


def _in_apply_if_finite() -> bool:
    """Whether `optax.apply_if_finite` is tracing us, whose other branch has the updates' own dtypes."""
    trace = getattr(core.trace_ctx, "trace", None)
    while trace is not None:
        if hasattr(trace, "frame"):
            source = trace.frame.debug_info.func_src_info or ""
            if source.startswith("do_update at ") and "optax" in source:
                return True
        trace = getattr(trace, "parent_trace", None)
    return False
