"""The gradient without the part that would push saturated weights further out."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from clipjax._core.arguments import explained
from clipjax._core.axes import FAN_IN_OF_MATRICES, Axes, check_axes
from clipjax._core.bounds import Bound, bound_at
from clipjax._core.members import Acted, Memory, with_stats, without_memory
from clipjax._core.mesh import AxisName
from clipjax._core.stats import Stats
from clipjax._core.trees import Unit, for_units
from clipjax.gradients.radial import Choice, take_out_radial

# `max_norm` leaves a unit at most 4 ulp below the radius, 16-bit links a little more.
_SATURATED_WITHIN_EPS = 8


class TangentConeState(NamedTuple):
    """State of :func:`tangent_cone`; `norm` is the largest radial part that was taken out."""

    tangent_cone: Stats


@explained
def tangent_cone(
    radius: Bound, *, axes: Axes = FAN_IN_OF_MATRICES, specs: Any = None, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    """Take out what would push a saturated unit further out: g - w <g, w> / |w|².

    Use this **before** an optimizer with moments, together with the projection at its end. A unit on the
    sphere of `radius` cannot follow the radial part of its gradient, because :func:`max_norm` undoes it at
    each step, but this part would accumulate in Adam's moments. Use the three together::

        clipjax.chain(clipjax.tangent_cone(3.0), optax.adam(1e-3), clipjax.max_norm(3.0))
        clipjax.bounded(optax.adam(1e-3), clip=clipjax.tangent_cone(3.0), project=clipjax.max_norm(3.0))

    with the same radius and axes. A clip of the norm, if there is one, goes after `tangent_cone`:
    `clip=optax.chain(clipjax.tangent_cone(3.0), clipjax.clip_by_global_norm(1.0))`.

    Args:
      radius: that of :func:`max_norm`: a number, an array that broadcasts to the units, or a schedule
        `step -> radius`.
      axes: the axes that are reduced, as in :func:`max_norm`.
      specs: inside `shard_map`, the `PartitionSpec` tree of the updates.
      axis_name: the mesh axes that split the units, in `pmap` and unchecked `shard_map`.

    Returns:
      A transformation that needs `params` in `update`. Its metric `norm` is the largest radial part that was
      taken out, `scale` the smallest share of a gradient's norm that was left.

    Raises:
      TypeError, ValueError: `radius` is negative, NaN or not a number; `axes` has an invalid form. In `init`:
        all leaves are left alone, or the default cannot choose the axes. In `update`: `params` are missing.

    Guarantees: a unit changes if two conditions hold. The norm of its weights, |w|, is at least `radius` * (1
    - 8 eps), where eps is that of the leaf's dtype (what `max_norm` saturated counts). And the descent step
    -g points outward: <g, w> < 0. All other units keep their gradient bit for bit, also units of zero
    weights, which have no direction. With `radius` 0 nothing can move, and the gradient of every unit becomes
    0. What is left of g has |<g', w>| <= eps |g| |w|, and is set to 0 where it is at most eps |g|, rounding
    that Adam would take for a direction. At a minimum under the constraint |w| <= radius nothing is left, so
    the norm of what is left measures the progress of training. A unit with a non-finite entry in its gradient
    or its weights becomes NaN.

    References:
      Calamai and Moré, 1987, Projected gradient methods for linearly constrained problems (the projected
      gradient as the measure of stationarity).

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> weights = jnp.array([[3.0, 0.3], [4.0, 0.4]])  # (in, out): the norms are 5 and 0.5
      >>> grads = jnp.array([[-1.0, -1.0], [0.0, 0.0]])
      >>> tx = clipjax.tangent_cone(5.0)
      >>> print(tx.update(grads, tx.init(weights), weights)[0].round(2))
      [[-0.64 -1.  ]
       [ 0.48  0.  ]]
    """
    radius_at, axes = bound_at("radius", radius), check_axes(axes)

    def act(updates: Any, memory: Memory, params: Any, step: Any, **extra_args: Any) -> Acted:
        del extra_args
        at_step = radius_at(step)

        def choose(unit: Unit, weight: jax.Array, norm: jax.Array, radial: jax.Array) -> Choice:
            bound = for_units("radius", at_step, unit, norm)
            least = bound * (1 - _SATURATED_WITHIN_EPS * float(jnp.finfo(weight.dtype).eps))
            outward = (norm >= least) & (radial < 0)
            return Choice(outward, bound == 0, jnp.isnan(bound))

        return *take_out_radial(updates, params, axes, specs, axis_name, choose), memory

    return with_stats(TangentConeState, act, without_memory(axes), needs_params="uses the weights")
