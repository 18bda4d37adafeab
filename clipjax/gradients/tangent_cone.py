"""The gradient without what would push saturated weights further out."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax._core import pairs
from clipjax._core.arguments import explained
from clipjax._core.axes import FAN_IN_OF_MATRICES, Axes, check_axes, resolve_axes
from clipjax._core.bounds import Bound, bound_at
from clipjax._core.members import Acted, Memory, with_stats
from clipjax._core.mesh import AxisName, placed_as
from clipjax._core.norms import (
    in_float64,
    is_wide,
    norm_of,
    only_arrays,
    strong,
    weakly_typed_as,
    wide,
)
from clipjax._core.platforms import inner_product
from clipjax._core.rounding import widened
from clipjax._core.stats import Stats
from clipjax._core.trees import Report, Unit, for_units, measure_units, summary, units_of

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

    For the place **before** an optimizer with moments, beside the projection at its end: a unit on the
    sphere of `radius` cannot follow the radial part of its gradient, which :func:`max_norm` undoes
    at each step, but Adam's moments would fill up with it. The three belong together::

        clipjax.chain(clipjax.tangent_cone(3.0), optax.adam(1e-3), clipjax.max_norm(3.0))
        clipjax.bounded(optax.adam(1e-3), clip=clipjax.tangent_cone(3.0), project=clipjax.max_norm(3.0))

    with the same radius and axes, and with a clip of the norm, if there is one, after `tangent_cone`:
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
      TypeError, ValueError: `radius` is no number, negative or NaN; `axes` are no axes. In `init`: nothing
      is looked at, or the default does not tell the axes. In `update`: no `params`.

    Guarantees: a unit changes if its weights' norm |w| is at least `radius` * (1 - 8 eps), eps that of the
    leaf's dtype (what `max_norm` saturated counts), and the descent step -g points outward,
    <g, w> < 0; all others keep their gradient bit for bit, units of zero weights too, which have no
    direction. With `radius` 0 nothing can move, and every unit's gradient becomes 0. What is left of g has
    |<g', w>| <= eps |g| |w|, and is 0 where it is no more than eps |g|, rounding that Adam would take for
    a direction. At a minimum under the constraint |w| <= radius that is all of it, so the norm of what is
    left tells how far training has come. A unit with an entry, of the gradient or the weights, that is
    not finite becomes NaN.

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
    radius_at, rule = bound_at("radius", radius), check_axes(axes)

    def first(params: Any, stats: Stats) -> Memory:
        del stats
        resolve_axes(rule, only_arrays(params))
        return ()

    @in_float64
    def act(updates: Any, memory: Memory, params: Any, step: Any, **extra_args: Any) -> Acted:
        del extra_args
        treedef: Any
        leaves, treedef = jax.tree.flatten(updates)
        weights, at_step = jax.tree.leaves(params), radius_at(step)
        reports = []
        units = units_of(updates, rule, specs, axis_name)
        norms = [
            measure_units(x)
            for x in ([u._replace(leaf=placed_as(u.leaf, weights[u.position])) for u in units], units)
        ]
        for unit, *sizes in zip(units, *norms, strict=True):
            leaves[unit.position], report = _tangential(unit, weights[unit.position], at_step, *sizes)
            reports.append(report)
        return treedef.unflatten(leaves), summary(reports, [unit.over for unit in units]), memory

    return with_stats(TangentConeState, act, first, needs_params="looks at the weights")


@in_float64
def _tangential(
    unit: Unit, weight: Any, radius: jax.Array, norm: jax.Array, size: jax.Array
) -> tuple[jax.Array, Report]:
    """The gradient of a leaf without the outward parts of its saturated units.

    Args:
      unit: where the units of the gradient are.
      weight: the leaf of the weights.
      radius: the bound.
      norm: the norms of the weights' units.
      size: the norms of the gradient's units.
    """
    grad = strong(unit.leaf)
    weight = placed_as(grad, strong(weight))
    radius = for_units("radius", radius, unit, norm)
    # In units of powers of two near the norms: no product leaves the range of a float32.
    of_weight, of_grad = (_power_of_two(x, grad.dtype) for x in (norm, size))
    relative = jnp.where(norm > 0, norm / of_weight, 1.0)
    axes = tuple(range(grad.ndim)) if unit.reduced is None else unit.reduced
    parts = zip(_real_parts(grad, of_grad), _real_parts(weight, of_weight), strict=True)
    product = functools.reduce(jnp.add, [inner_product(g, w, axes) for g, w in parts]).reshape(norm.shape)
    if unit.names:
        product = lax.psum(product, unit.names)
    radial = product / relative * of_grad

    def left(grad: jax.Array, weight: jax.Array) -> list[jax.Array]:
        parts = zip(_real_parts(grad, of_grad), _real_parts(weight, of_weight), strict=True)
        return [_without(g, w, product / relative**2) for g, w in parts]

    eps = float(jnp.finfo(grad.dtype).eps)
    least = radius * (1 - _SATURATED_WITHIN_EPS * float(jnp.finfo(weight.dtype).eps))
    outward = (norm >= least) & (radial < 0)
    # What is measured is computed for that alone: with two readers it would be stored.
    measured = left(*lax.optimization_barrier(lax.stop_gradient((grad, weight))))
    size_left = norm_of(_complex(measured), unit.reduced, 2.0, unit.names) * of_grad
    # Below the gradient's own rounding nothing is left but noise, which Adam would take for a direction.
    nothing = (size_left <= eps * size) | (radius == 0)
    bad = ~(jnp.isfinite(radial) & jnp.isfinite(norm)) | jnp.isnan(radius)
    changed = outward | bad | (radius == 0)
    scale = jnp.where(bad, jnp.nan, jnp.where(nothing, 0.0, of_grad))
    new = _complex([part * lax.convert_element_type(scale, part.dtype) for part in left(grad, weight)])
    # Not rounded again: what is inside keeps its bits.
    result = jnp.where(changed, lax.convert_element_type(new, grad.dtype), grad)

    radial, size, size_left = lax.stop_gradient((radial, size, size_left))  # the report is no function
    removed = jnp.where(radius > 0, -radial, size)
    removed = jnp.where(changed, jnp.where(bad, jnp.nan, removed), 0.0)
    share = jnp.where(nothing, 0.0, size_left / jnp.where(size > 0, size, 1.0))
    share = jnp.where(changed & (size > 0), share, 1.0)
    report = Report(removed, share, changed & ~(removed == 0), 0 * removed)
    return weakly_typed_as(unit.leaf, result), report


def _power_of_two(norm: jax.Array, dtype: Any) -> jax.Array:
    """A power of two near a norm, in float64: 1 for 0 and what is not finite."""
    norm = lax.stop_gradient(jnp.where((norm > 0) & (norm < jnp.inf), norm, 1.0))
    if is_wide(dtype):
        return lax.reduce_precision(jnp.clip(norm, 2.0**-1000, 2.0**1000), 11, 0)
    near = lax.convert_element_type(jnp.clip(norm, 2.0**-126, 2.0**126), np.float32)
    return wide(lax.reduce_precision(near, 8, 0))


def _real_parts(x: jax.Array, unit: jax.Array) -> list[jax.Array]:
    """The real parts of an array, in units of a power of two, in the dtype to compute in."""
    parts = [widened(part) for part in ((x.real, x.imag) if jnp.iscomplexobj(x) else (x,))]
    return [part * lax.convert_element_type(1 / unit, part.dtype) for part in parts]


def _complex(parts: list[jax.Array]) -> jax.Array:
    return lax.complex(*parts) if len(parts) == 2 else parts[0]


def _without(grad: jax.Array, weight: jax.Array, coefficient: jax.Array) -> jax.Array:
    """Grad - weight * coefficient, rounded twice: the product is exact, as a pair."""
    if grad.dtype == np.float64:
        return grad - weight * coefficient
    high = lax.convert_element_type(coefficient, np.float32)
    low = lax.convert_element_type(coefficient - wide(high), np.float32)
    product, rest = pairs.product(weight, high)
    left = (grad - product) - (rest + weight * low)
    # Where 40 bits cancel, what is left is the rounding of the coefficient.
    return jnp.where(jnp.abs(left) <= 2.0**-40 * jnp.abs(grad), jnp.zeros_like(left), left)
