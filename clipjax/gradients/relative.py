"""A clip whose threshold is relative to the weights."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from clipjax._core.aliases import (
    AutoAxes,
    Bound,
    Memory,
    Number,
    Step,
    Tree,
)
from clipjax._core.bounds import check_bound, number
from clipjax._core.clip import clip_by_unit_norms
from clipjax._core.door import transformation
from clipjax._core.leaves import Leaves, beside
from clipjax._core.norms import axes_of, check_axes, fan_in_or_all, map_units, norms_of

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

    Equals the rule of the paper and of timm and, for finite gradients,
    `optax.adaptive_grad_clip` with two exceptions: Optax takes a kernel of which only
    the last axis is longer than 1, as in (1, out), for one vector, and reduces only the
    first axis of rank 3.

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
