"""Updates of the size of the weights."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from clipjax._core.aliases import AutoAxes, Memory, Step, Tree
from clipjax._core.clip import factor_onto, rescaled
from clipjax._core.door import transformation
from clipjax._core.leaves import Leaves, beside
from clipjax._core.norms import largest
from clipjax._core.units import (
    axes_of,
    check_axes,
    map_units,
    norms_of,
    present,
    whole_matrices,
)


def relative_update(
    *, axes: AutoAxes = "auto"
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
    axes = check_axes(axes, auto=whole_matrices)

    def act(updates: Leaves, params: Tree, step: Step, memory: Memory, **_: Any) -> Any:
        weights = beside(updates, params, "params", "relative_update")
        where = axes_of(updates, axes)
        of = norms_of(updates.values, where)
        wanted = norms_of(weights, where)
        values = rescaled(updates.values, map_units(factor_onto, wanted, of))
        ratios = present(map_units(_ratio, of, wanted))
        return values, {"norm": largest(ratios)}, memory

    return transformation("relative_update", act)


def _ratio(norm: jnp.ndarray, weight_norm: jnp.ndarray) -> jnp.ndarray:
    """Return |u| / |w|: 0 for a weight of 0, and NaN for one that is not finite."""
    whole = jnp.where(weight_norm > 0, weight_norm, jnp.inf)
    return norm / whole + 0 * weight_norm
