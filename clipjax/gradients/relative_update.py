"""Updates with the norm of the weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from clipjax._core.aliases import AutoAxes, Memory, Step, Tree
from clipjax._core.clip import factor_onto, rescaled
from clipjax._core.door import transformation
from clipjax._core.leaves import Leaves, beside
from clipjax._core.norms import (
    axes_of,
    check_axes,
    largest,
    map_units,
    norms_of,
    present,
    whole_matrices,
)


def relative_update(
    *, axes: AutoAxes = "auto"
) -> optax.GradientTransformationExtraArgs:
    """Give the update of each unit the norm of its weights.

        u * |w| / |u|

    Use it in front of the learning rate. Each step then changes a unit by the learning
    rate times the norm of its weights. With :func:`keep_norm` at the end of the chain,
    Adam becomes AdamH, an optimizer for fixed-norm ("hyperball") training:
    `optax.chain(optax.scale_by_adam(), clipjax.relative_update(),
    optax.scale_by_learning_rate(1e-2), clipjax.keep_norm())`.

    Args:
      axes: the axes that are reduced, as `Axes`. "auto", the default, takes a matrix as
        one unit, does not change vectors and scalars, and raises an error for rank 3
        and more, as in :func:`keep_norm`.

    Returns:
      A gradient transformation that needs `params` in `update`. Its metric `norm` is
      the largest |u| / |w| before the update is rescaled.

    Raises:
      ValueError: in `init` with `axes="auto"`, a leaf has rank 3 or more, or no leaf
        has rank 2; in `update`, `params` are missing, or differ from the updates in
        structure or shape.

    If |u| or |w| is 0, and the other one is finite, the update of the unit stays as it
    is. If |u| or |w| is not finite, the update becomes NaN.

    With `axes=None`, which makes each leaf one unit, it equals
    `optax.scale_by_trust_ratio()` if the norms of updates and weights are finite. If an
    element of the update is infinite, Optax makes this element NaN and the others of
    the leaf 0, and this function makes the whole leaf NaN.

    References:
      You et al., 2017, Large batch training of convolutional networks, arXiv:1708.03888
      (LARS); You et al., 2020, Large batch optimization for deep learning,
      arXiv:1904.00962 (LAMB).

    See Also:
      :func:`keep_norm` keeps the norm of the weights; :func:`adaptive_grad_clip` limits
      the gradient to a fraction of the norm of the weights, and never enlarges it.

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

    def act(
        updates: Leaves, params: Tree, step: Step, memory: Memory, /, **_: Any
    ) -> Any:
        weights = beside(updates, params, "params", "relative_update")
        where = axes_of(updates, axes)
        of = norms_of(updates.values, where)
        wanted = norms_of(weights, where)
        values = rescaled(updates.values, map_units(factor_onto, wanted, of))
        ratios = present(map_units(_ratio, of, wanted))
        return updates.rebuild(values), {"norm": largest(ratios)}, memory

    return transformation("relative_update", act)


def _ratio(norm: jax.Array, weight_norm: jax.Array) -> jax.Array:
    """Return |u| / |w|: 0 if the weights are 0, and NaN if they are not finite."""
    whole = jnp.where(weight_norm > 0, weight_norm, jnp.inf)
    return norm / whole + 0 * weight_norm
