"""Removing the part of a gradient that points along its weights: the common code of the tangent clips."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core import pairs
from clipjax._core.axes import Axes
from clipjax._core.dtypes import in_float64, is_wide, strong, weakly_typed_as, wide
from clipjax._core.mesh import AxisName, placed_as
from clipjax._core.norms import norm_of, norms_of
from clipjax._core.platforms import inner_product, once
from clipjax._core.rounding import widened
from clipjax._core.trees import Report, Unit, measure_units, summary, units_of


class Choice(NamedTuple):
    """What happens to the units of a leaf; a unit for which no field is true keeps its gradient."""

    tangential: Any  # bool: only the tangential part is kept
    nothing: Any  # bool: the gradient becomes 0
    unknown: Any  # bool: the gradient becomes NaN


# (units of the gradient, their weights, the norms of the weights, the gradient's radial parts) -> the choice
Choose: TypeAlias = Callable[[Unit, jax.Array, jax.Array, jax.Array], Choice]


@in_float64
def take_out_radial(
    updates: Any,
    params: Any,
    axes: Axes,
    specs: Any,
    axis_name: AxisName,
    choose: Choose,
    *,
    keep_norm: bool = False,
) -> tuple[Any, Report]:
    """Return the gradients without the radial parts of the units that `choose` selects, and a report.

    The report has the largest part taken out, and the smallest share of a norm that is tangential.
    """
    treedef: Any
    leaves, treedef = jax.tree.flatten(updates)
    weights = jax.tree.leaves(params)
    reports = []
    units = units_of(updates, axes, specs, axis_name)
    norms = [
        measure_units(x)
        for x in ([u._replace(leaf=placed_as(u.leaf, weights[u.position])) for u in units], units)
    ]
    for unit, norm, size in zip(units, *norms, strict=True):
        weight = weights[unit.position]
        leaves[unit.position], report = _of_leaf(unit, weight, norm, size, choose, keep_norm=keep_norm)
        reports.append(report)
    return treedef.unflatten(leaves), summary(reports, [unit.over for unit in units])


@in_float64
def _of_leaf(
    unit: Unit, weight: Any, norm: jax.Array, size: jax.Array, choose: Choose, *, keep_norm: bool
) -> tuple[jax.Array, Report]:
    """Return the gradient of a leaf without the radial parts of the selected units, and a report.

    Args:
      unit: where the units of the gradient are.
      weight: the leaf of the weights.
      norm: the norms of the weights' units.
      size: the norms of the gradient's units.
      choose: decides what happens to each unit.
      keep_norm: whether the remaining gradient is rescaled to the norm of the original one.
    """
    grad = strong(unit.leaf)
    weight = placed_as(grad, strong(weight))
    # Divided by powers of two near the norms, so that no product leaves the range of float32.
    of_weight, of_grad = (_power_of_two(x, grad.dtype) for x in (norm, size))
    relative = jnp.where(norm > 0, norm / of_weight, 1.0)
    axes = tuple(range(grad.ndim)) if unit.reduced is None else unit.reduced
    products = [
        inner_product(g, w, of_grad, of_weight, axes)
        for g, w in zip(_real_parts(grad), _real_parts(weight), strict=True)
    ]
    product = functools.reduce(jnp.add, products).reshape(norm.shape)
    if unit.names:
        product = lax.psum(product, unit.names)
    radial = product / relative * of_grad

    def rows(*numbers: jax.Array) -> list[jax.Array]:
        """Convert numbers of the units to the dtype to compute in; on a CPU, once for all entries."""
        kept = (1,) * grad.ndim if unit.reduced is None else norm.shape
        dtype = widened(grad.real).dtype
        stacked = jnp.stack([lax.convert_element_type(x, dtype) for x in numbers])
        return [x.reshape(kept) for x in once(stacked, grad)]

    multiple = product / relative**2
    low = multiple - wide(lax.convert_element_type(multiple, np.float32))
    scaled = rows(1 / of_grad, 1 / of_weight, multiple, low)

    def left(grad: jax.Array, weight: jax.Array) -> list[jax.Array]:
        return [_left(g, w, *scaled) for g, w in zip(_real_parts(grad), _real_parts(weight), strict=True)]

    chosen = choose(unit, weight, norm, radial)
    eps = float(jnp.finfo(grad.dtype).eps)
    # The remaining gradient is computed separately for its norm: shared with the result, XLA would store it.
    both = lax.optimization_barrier((grad, weight) if keep_norm else lax.stop_gradient((grad, weight)))
    if jnp.iscomplexobj(grad):
        size_left = norm_of(_complex(left(*both)), unit.reduced, 2.0, unit.names)
    else:
        size_left = norms_of([(*both, *scaled)], [unit.reduced], 2.0, [unit.names], _left)[0]
    size_left = size_left * of_grad
    # A remainder below the gradient's own rounding is noise, which Adam would take for a direction.
    nothing = (size_left <= eps * size) | chosen.nothing
    bad = ~(jnp.isfinite(radial) & jnp.isfinite(norm)) | chosen.unknown
    changed = chosen.tangential | chosen.nothing | bad
    share = jnp.where(nothing, 0.0, size_left / jnp.where(size > 0, size, 1.0))
    factor = 1 / jnp.where(share > 0, share, 1.0) if keep_norm else 1.0
    factor = jnp.where(bad, jnp.nan, jnp.where(nothing, 0.0, factor))

    # The two factors are apart, as their product may leave the range of float32.
    first, second, is_new = rows(factor, of_grad, changed)
    new = _complex([part * first * second for part in left(grad, weight)])
    # Units that do not change are not rounded again, so they keep their bits.
    result = jnp.where(is_new != 0, lax.convert_element_type(new, grad.dtype), grad)

    radial, size, share = lax.stop_gradient((radial, size, share))  # reports are not differentiated
    removed = jnp.where(chosen.nothing, size, jnp.abs(radial))
    removed = jnp.where(changed, jnp.where(bad, jnp.nan, removed), 0.0)
    share = jnp.where(changed & (size > 0), share, 1.0)
    report = Report(removed, share, changed & ~(removed == 0), 0 * removed)
    return weakly_typed_as(unit.leaf, result), report


def _power_of_two(norm: jax.Array, dtype: Any) -> jax.Array:
    """Return a power of two near a norm, in float64; 1 if the norm is 0 or not finite."""
    norm = lax.stop_gradient(jnp.where((norm > 0) & (norm < jnp.inf), norm, 1.0))
    if is_wide(dtype):
        return lax.reduce_precision(jnp.clip(norm, 2.0**-1000, 2.0**1000), 11, 0)
    near = lax.convert_element_type(jnp.clip(norm, 2.0**-126, 2.0**126), np.float32)
    return wide(lax.reduce_precision(near, 8, 0))


def _real_parts(x: jax.Array) -> list[jax.Array]:
    """Return the real parts of an array, in the dtype to compute in."""
    return [widened(part) for part in ((x.real, x.imag) if jnp.iscomplexobj(x) else (x,))]


def _complex(parts: list[jax.Array]) -> jax.Array:
    return lax.complex(*parts) if len(parts) == 2 else parts[0]


def _left(
    grad: jax.Array,
    weight: jax.Array,
    by_grad: jax.Array,
    by_weight: jax.Array,
    high: jax.Array,
    low: jax.Array,
) -> jax.Array:
    """Return grad * by_grad - weight * by_weight * (high + low) with two roundings: the product is a pair."""
    grad, weight = widened(grad) * by_grad, widened(weight) * by_weight
    if grad.dtype == np.float64:
        return grad - weight * high
    product, rest = pairs.product(weight, high)
    left = (grad - product) - (rest + weight * low)
    # Where 40 bits cancel, only the rounding error of the multiple is left.
    return jnp.where(jnp.abs(left) <= 2.0**-40 * jnp.abs(grad), jnp.zeros_like(left), left)
