"""The gradient without the part that would push weights out of the ball."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from clipjax._core.aliases import AutoAxes, Bound, Memory, Reduced, Skip, Step, Tree
from clipjax._core.bounds import limit
from clipjax._core.clip import least_inside, weak_like
from clipjax._core.door import transformation
from clipjax._core.leaves import Leaves, beside
from clipjax._core.norms import largest, norm, over_devices, sum_dtype
from clipjax._core.units import axes_of, check_axes, fan_in_of_matrices


def tangent_cone(
    radius: Bound, *, axes: AutoAxes = "auto"
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
    bound = limit("radius", radius)
    axes = check_axes(axes, auto=fan_in_of_matrices)

    def act(updates: Leaves, params: Tree, step: Step, memory: Memory, **_: Any) -> Any:
        weights = beside(updates, params, "params", "tangent_cone")
        most = bound.at(step)
        values, removed = list(updates.values), []
        rows = zip(updates.each, weights, axes_of(updates, axes), strict=True)
        for i, (leaf, weight, reduced) in enumerate(rows):
            if not isinstance(reduced, Skip):
                weight_norm = norm(weight, reduced)
                fitted = bound.fit(most, weight_norm, leaf)
                values[i], part = _without_outward_part(
                    leaf.value, weight, weight_norm, fitted, reduced
                )
                removed.append(part)
        most_removed = largest(removed)
        metrics = {"norm": most_removed, "removed": most_removed > 0}
        return values, metrics, memory

    return transformation("tangent_cone", act)


def _without_outward_part(
    x: jax.Array, weight: jax.Array, weight_norm: jax.Array, bound: Any, axes: Reduced
) -> tuple[jax.Array, jax.Array]:
    """Return a leaf without its outward parts, and how long these are, by unit."""
    dtype = x.dtype if jnp.iscomplexobj(x) else sum_dtype(x.dtype)
    g = x.astype(dtype)
    w = weight.astype(dtype)
    along = (g * jnp.conj(w)).real
    product = jnp.sum(along, axis=axes, keepdims=axes is not None)
    if axes is None:
        product = over_devices(lax.psum, product)
    near = least_inside(jnp.asarray(bound, weight_norm.dtype), weight.dtype)
    outward = ~(weight_norm < near) & ~(product >= 0)  # NaN counts as outward
    # One number for each unit. Measuring what is left would keep the whole gradient in
    # memory.
    square = jnp.where(outward & (weight_norm > 0), weight_norm * weight_norm, 1)
    part = jnp.where(outward, product, 0) / square
    new = (g - w * part.astype(dtype)).astype(x.dtype)
    return weak_like(x, jnp.where(part == 0, x, new)), -part * weight_norm
