"""The gradient without the part that would push weights out of the ball."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from clipjax._core import bounds, clipping, norms, transformation, trees, units
from clipjax._core.aliases import Scalar, Tree


def tangent_cone(
    radius: bounds.Bound, *, axes: units.AutoAxes = "auto"
) -> optax.GradientTransformationExtraArgs:
    """Remove what would push a unit on the sphere further out: g - w ⟨g, w⟩ / |w|².

    This happens where |w| >= radius and ⟨g, w⟩ < 0.

    :func:`clipjax.max_norm` undoes that part at each step, but it would stay in the
    moments of an optimizer. Use both, with the same radius and axes:
    `clipjax.bounded(optax.adam(1e-3), clip=clipjax.tangent_cone(3.0),
    project=clipjax.max_norm(3.0))`. A clip of the norm comes after it. Steps of Adam
    may point outward all the same, since it divides each entry by a number of its own:
    :func:`max_norm` has to stay.

    Args:
      radius: that of :func:`max_norm`: a number, an array that broadcasts to the units,
        or a schedule.
      axes: the axes that are reduced, as in :func:`max_norm`.

    Returns:
      A transformation that needs `params` in `update`. Its metric `norm` is the largest
      radial part that it removed, and `removed_fraction` the share of the steps at
      which there was one.

    What is left of a gradient that points straight outward is rounding, some 1e-7 of
    it.

    References:
      Calamai and Moré, 1987, Projected gradient methods for linearly constrained
      problems.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> weights = jnp.array([[3.0, 0.3], [4.0, 0.4]])  # norms 5 and 0.5
      >>> grads = jnp.array([[-1.0, -1.0], [0.0, 0.0]])
      >>> tx = clipjax.tangent_cone(5.0)
      >>> print(tx.update(grads, tx.init(weights), weights)[0].round(2))
      [[-0.64 -1.  ]
       [ 0.48  0.  ]]
    """
    radius_at = bounds.as_schedule("radius", radius)
    axes = units.check_axes(axes, auto=units.fan_in_of_matrices)

    def act(updates: Tree, params: Tree, step: Scalar | None, memory: Any) -> Any:
        weights, _ = trees.leaves_of(trees.params_for("tangent_cone", updates, params))
        leaves, rebuild = trees.leaves_of(updates)
        values = [leaf.value for leaf in leaves]
        bound = radius_at(step)
        removed = []
        for each in units.of_tree(updates, axes):
            weight = weights[each.place].value
            values[each.place], part = _without_outward_part(each, weight, bound)
            removed.append(part)
        largest = norms.largest(removed)
        return rebuild(values), {"norm": largest, "removed": largest > 0}, memory

    return transformation.with_metrics("tangent_cone", act)


def _without_outward_part(
    each: units.LeafUnits, weight: jax.Array, radius: Any
) -> tuple[jax.Array, jax.Array]:
    """Return a leaf without its outward parts, and how long these are, by unit."""
    x = each.leaf.value
    dtype = x.dtype if jnp.iscomplexobj(x) else norms.sum_dtype(x.dtype)
    g = x.astype(dtype)
    w = weight.astype(dtype)
    weight_norm = norms.norm(w, each.axes)
    along = (g * jnp.conj(w)).real
    product = jnp.sum(along, axis=each.axes, keepdims=each.axes is not None)
    if each.axes is None:
        product = norms.over_devices(lax.psum, product)
    fitted = bounds.fit_bound("radius", radius, weight_norm, each.leaf)
    bound = jnp.asarray(fitted, weight_norm.dtype)
    near = clipping.least_inside(bound, weight.dtype)
    outward = ~(weight_norm < near) & ~(product >= 0)  # NaN counts as outward
    # One number for each unit. Measuring what is left would keep the whole gradient in
    # memory.
    square = jnp.where(outward & (weight_norm > 0), weight_norm * weight_norm, 1)
    part = jnp.where(outward, product, 0) / square
    new = (g - w * part.astype(dtype)).astype(x.dtype)
    return clipping.weak_like(x, jnp.where(part == 0, x, new)), -part * weight_norm
