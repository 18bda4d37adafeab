"""Updates of the size of the weights."""

from typing import Any

import jax.numpy as jnp
import optax

from clipjax._core import clipping, norms, transformation, trees, units
from clipjax._core.aliases import Scalar, Tree


def relative_update(
    *, axes: units.AutoAxes = "auto"
) -> optax.GradientTransformationExtraArgs:
    """Give each unit's update the norm of its weights: u * |w| / |u|.

    In front of the learning rate, which is then the share by which weights change. With
    :func:`keep_norm` as the last link this is AdamH: `clipjax.chain(
    optax.scale_by_adam(), clipjax.relative_update(),
    optax.scale_by_learning_rate(1e-2), clipjax.keep_norm())`.

    Args:
      axes: the axes that are reduced, as in :func:`keep_norm`. "auto": a matrix is one
        unit; vectors and scalars are not changed; rank 3 and more is an error.

    Returns:
      A transformation that needs `params` in `update`. Its metric `norm` is the largest
      |u| / |w|, before it.

    Where one of the norms is 0 the update stays as it is. Entries that are not finite
    make all of their unit NaN.

    Equals `optax.scale_by_trust_ratio()` where each leaf is one unit, `axes=None`.

    References:
      You et al., 2017, Large batch training of convolutional networks,
      arXiv:1708.03888 (LARS); You et al., 2020, Large batch optimization for deep
      learning, arXiv:1904.00962 (LAMB).

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.relative_update()
      >>> weights = jnp.array([[3.0, 0.0], [0.0, 4.0]])  # of norm 5
      >>> update = jnp.array([[0.0, 0.6], [0.8, 0.0]])  # of norm 1
      >>> print(tx.update(update, tx.init(weights), weights)[0])
      [[0. 3.]
       [4. 0.]]
    """
    axes = units.check_axes(axes, auto=units.whole_matrices)

    def act(updates: Tree, params: Tree, step: Scalar | None, memory: Any) -> Any:
        weights, _ = trees.leaves_of(
            trees.params_for("relative_update", updates, params)
        )
        found = units.of_tree(updates, axes)
        factors = []
        shares = []
        for each, norm in zip(found, units.norms_of(found), strict=True):
            weight_norm = norms.norm(weights[each.place].value, each.axes)
            factors.append(clipping.factor_onto(weight_norm, norm))
            # Weights that are not finite make NaN, which is counted.
            whole = jnp.where(weight_norm > 0, weight_norm, jnp.inf)
            shares.append(norm / whole + 0 * weight_norm)
        scaled = clipping.rescaled(updates, found, factors)
        return scaled, {"norm": norms.largest(shares)}, memory

    return transformation.with_metrics("relative_update", act)
