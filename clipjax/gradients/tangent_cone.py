"""The gradient without the part that would push weights out of a ball."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from clipjax._core.aliases import AutoAxes, Bound, Memory, Reduced, Skip, Step, Tree
from clipjax._core.bounds import check_bound
from clipjax._core.clip import least_inside, weak_like
from clipjax._core.door import transformation
from clipjax._core.leaves import Leaves, beside
from clipjax._core.norms import (
    axes_of,
    check_axes,
    fan_in_of_matrices,
    largest,
    norm_of,
    over_devices,
    sum_dtype,
)


def tangent_cone(
    bound: Bound, *, axes: AutoAxes = "auto"
) -> optax.GradientTransformationExtraArgs:
    """Remove the part of a gradient that would push an output unit out of its ball.

        g - w * ⟨g, w⟩ / |w|²   where |w| >= bound and ⟨g, w⟩ < 0

    A norm also counts as at the bound if it is just below, where :func:`max_norm`
    leaves weights: by up to 4e-6 of the bound in float32, 0.2% in float16, and 1.6% in
    bfloat16. Use it together with :func:`max_norm` and an optimizer that has moments:
    :func:`max_norm` undoes the outward part of a step, but cannot remove that part from
    the moments. Give both functions the same bound and axes:
    `clipjax.bounded(optax.adam(1e-3), clip=clipjax.tangent_cone(3.0),
    project=clipjax.max_norm(3.0))`. If you also clip the norm, place that clip after
    `tangent_cone`. :func:`max_norm` is still needed: Adam divides each element by a
    different number, so its steps may point outward even if the gradients do not.

    Args:
      bound: the bound on the norm of the weights, the same as for :func:`max_norm`: a
        `Bound`. An array broadcasts to the output units.
      axes: the axes that are reduced, as `Axes`. "auto", the default, means the same as
        for :func:`max_norm`.

    Returns:
      A gradient transformation that needs `params` in `update`. Its metric `norm` is
      the norm of the largest part that it removed at the last step, and
      `removed_fraction` is the fraction of the steps at which it removed a finite part.

    Raises:
      ValueError: in `init` with `axes="auto"`, a leaf has rank 3 or more, or no leaf
        has rank 2; in `update`, `params` are missing, or differ from the gradients in
        structure or shape.

    Because of rounding, about 1e-7 of a float32 gradient that points straight outward
    remains.

    References:
      Calamai and Moré, 1987, Projected gradient methods for linearly constrained
      problems, Mathematical Programming 39.

    See Also:
      :func:`max_norm` is the projection that keeps the weights in the ball;
      :func:`bounded` puts both transformations into one optimizer, in the right order.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> weights = jnp.array([[3.0, 0.3], [4.0, 0.4]])  # norms 5 and 0.5
      >>> grads = jnp.array([[-1.0, -1.0], [0.0, 0.0]])
      >>> tx = clipjax.tangent_cone(5.0)
      >>> print(tx.update(grads, tx.init(weights), weights)[0].round(2))
      [[-0.64 -1.  ]
       [ 0.48  0.  ]]
    """
    checked = check_bound("bound", bound)
    axes = check_axes(axes, auto=fan_in_of_matrices)

    def act(
        updates: Leaves, params: Tree, step: Step, memory: Memory, /, **_: Any
    ) -> Any:
        weights = beside(updates, params, "params", "tangent_cone")
        most = checked.at(step)
        values, removed = list(updates.values), []
        rows = zip(updates.each, weights, axes_of(updates, axes), strict=True)
        for i, (leaf, weight, reduced) in enumerate(rows):
            if not isinstance(reduced, Skip):
                weight_norm = norm_of(weight, reduced)
                fitted = checked.fit(most, weight_norm, leaf)
                values[i], part = _without_outward_part(
                    leaf.value, weight, weight_norm, fitted, reduced
                )
                removed.append(part)
        most_removed = largest(removed)
        removes = (most_removed > 0) & (most_removed < jnp.inf)
        metrics = {"norm": most_removed, "removed": removes}
        return updates.rebuild(values), metrics, memory

    return transformation("tangent_cone", act)


def _without_outward_part(
    x: jax.Array, weight: jax.Array, weight_norm: jax.Array, bound: Any, axes: Reduced
) -> tuple[jax.Array, jax.Array]:
    """Return a leaf without its outward parts, and their norms, one for each unit."""
    dtype = x.dtype if jnp.iscomplexobj(x) else sum_dtype(x.dtype)
    g = x.astype(dtype)
    w = weight.astype(dtype)
    along = (g * jnp.conj(w)).real
    product = jnp.sum(along, axis=axes, keepdims=axes is not None)
    if axes is None:
        product = over_devices(lax.psum, product)
    near = least_inside(jnp.asarray(bound, weight_norm.dtype), weight.dtype)
    outward = ~(weight_norm < near) & ~(product >= 0)  # NaN counts as outward
    # `part` is one number for each unit. To measure what is left of the gradient would
    # keep all of it in memory.
    square = jnp.where(outward & (weight_norm > 0), weight_norm * weight_norm, 1)
    part = jnp.where(outward, product, 0) / square
    new = (g - w * part.astype(dtype)).astype(x.dtype)
    return weak_like(x, jnp.where(part == 0, x, new)), -part * weight_norm
