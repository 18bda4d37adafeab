"""Gradients and updates in units of the weights: a clip, and a rescaling."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from clipjax._core.aliases import AutoAxes, Bound, Memory, Number, Step, Tree
from clipjax._core.bounds import check_bound, number
from clipjax._core.clip import clip_by_unit_norms, factor_onto, rescaled
from clipjax._core.door import transformation
from clipjax._core.leaves import Leaves, beside
from clipjax._core.norms import (
    axes_of,
    check_axes,
    fan_in_or_all,
    largest,
    map_units,
    norms_of,
    present,
    whole_matrices,
)

# The smallest norm that is measured; no norm overflows when it is divided by it.
_LEAST = 1e-18


def adaptive_grad_clip(
    clipping: Bound = 0.01,
    *,
    eps: Number = 1e-3,
    axes: AutoAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clip the gradient of each output unit to a fraction of the norm of its weights.

        g * min(1, clipping * max(|w|, eps) / |g|)

    With plain SGD, a step then changes the weights w of an output unit by at most
    `learning_rate * clipping * max(|w|, eps)`. Use it for networks without
    normalization layers that are trained with SGD, as in the paper. The paper does not
    clip the head of a classifier: `axes={"head/*": clipjax.SKIP, "*": "auto"}`.

    Args:
      clipping: the threshold for |g| / |w|, a `Bound`, 0.01 by default. An array
        broadcasts to the output units.
      eps: the smallest norm of weights that counts, 1e-3 by default, so that weights of
        0 can move. A number below 1e-18 counts as 1e-18.
      axes: the axes that are reduced, as `Axes`. "auto", the default, reduces all axes
        but the last for leaves of rank 2 and 4, and all axes for leaves of rank 0 and
        1. Leaves of rank 3, and of rank 5 and more, may be stacks of layers or heads,
        and raise an error.

    Returns:
      A gradient transformation that needs `params` in `update`. Its metrics are those
      of a clip, where `norm` is the largest |g| / max(|w|, eps), the number that is
      compared with `clipping`.

    Raises:
      ValueError: in `init` with `axes="auto"`, the rank of a leaf does not tell its
        axes; in `update`, `params` are missing, or differ from the gradients in
        structure or shape.

    Equals the rule of the paper and of timm. For finite gradients it also equals
    `optax.adaptive_grad_clip`, with three exceptions: Optax takes a kernel for one
    vector if only its last axis is longer than 1, as in (1, out), it reduces only the
    first axis of a leaf of rank 3, and it takes norms of gradients below 1e-6 for 1e-6.

    References:
      Brock et al., 2021, High-performance large-scale image recognition without
      normalization, arXiv:2102.06171.

    See Also:
      :func:`relative_update` gives updates the norm of the weights; :func:`max_norm`
      bounds the weights themselves.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.adaptive_grad_clip(0.01)
      >>> weights = jnp.array([[3.0, 0.0], [4.0, 0.0]])  # norms 5 and 0
      >>> grads = jnp.array([[0.6, 0.0], [0.8, 1.0]])
      >>> clipped, state = tx.update(grads, tx.init(weights), weights)
      >>> print(jnp.linalg.norm(clipped, axis=0).round(6))
      [5.e-02 1.e-05]
    """
    bound = check_bound("clipping", clipping)
    eps = number("eps", eps, "[0, inf)")
    axes = check_axes(axes, auto=fan_in_or_all)

    def act(
        updates: Leaves, params: Tree, step: Step, memory: Memory, /, **_: Any
    ) -> Any:
        weights = beside(updates, params, "params", "adaptive_grad_clip")
        where = axes_of(updates, axes)
        least = jnp.maximum(eps, _LEAST)
        of = map_units(
            lambda norm, weight_norm: norm / jnp.maximum(weight_norm, least),
            norms_of(updates.values, where),
            norms_of(weights, where),
        )
        return *clip_by_unit_norms(updates, of, bound.at(step), bound.name), memory

    return transformation("adaptive_grad_clip", act)


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
