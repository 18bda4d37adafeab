"""The clip relative to the weights."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from clipjax._core.aliases import (
    AutoAxes,
    Bound,
    Memory,
    Number,
    Path,
    Reduced,
    Step,
    Tree,
)
from clipjax._core.bounds import limit
from clipjax._core.checks import check_number
from clipjax._core.clip import clip_by_unit_norms
from clipjax._core.door import transformation
from clipjax._core.leaves import Leaves, beside
from clipjax._core.units import axes_of, check_axes, map_units, norms_of, unclear_error

# Below this no norm is measured, and divided by it none overflows.
_LEAST = 1e-18


def adaptive_grad_clip(
    clipping: Bound = 0.01,
    *,
    eps: Number = 1e-3,
    axes: AutoAxes = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clip each unit's gradient to a share of its weights: |g| <= clipping * |w|.

    The paper does not clip the classifier's head: `axes={"head/*": clipjax.SKIP, "*":
    "auto"}`.

    Args:
      clipping: the share: a number, an array that broadcasts to the units, or a
        schedule.
      eps: the smallest norm of weights that counts, so that weights of 0 can move: a
        number; 1e-18 if it is less.
      axes: the axes that are reduced. "auto": all but the last for ranks 2 and 4, all
        for less; rank 3, and 5 and more, may be stacks of layers or heads, and are an
        error.

    Returns:
      A transformation that needs `params` in `update`. Its metric `norm` is the largest
      |g| / max(|w|, eps), the number that is compared with `clipping`.

    Equals the rule of the paper, of timm and of `optax.adaptive_grad_clip`, except that
    Optax takes a kernel (1, out) for one vector, and reduces the first axis of rank 3.

    References:
      Brock et al., 2021, High-performance large-scale image recognition without
      normalization, arXiv:2102.06171.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.adaptive_grad_clip(0.01)
      >>> weights = jnp.array([[3.0, 0.0], [4.0, 0.0]])  # norms 5 and 0
      >>> grads = jnp.array([[0.6, 0.0], [0.8, 1.0]])
      >>> clipped, state = tx.update(grads, tx.init(weights), weights)
      >>> print(jnp.linalg.norm(clipped, axis=0).round(6))
      [5.e-02 1.e-05]
    """
    bound = limit("clipping", clipping)
    eps = check_number("eps", eps, "[0, inf)")
    axes = check_axes(axes, auto=_fan_in_or_all)

    def act(updates: Leaves, params: Tree, step: Step, memory: Memory, **_: Any) -> Any:
        weights = beside(updates, params, "params", "adaptive_grad_clip")
        where = axes_of(updates, axes)
        least = jnp.maximum(eps, _LEAST)
        of = map_units(
            lambda norm, weight_norm: norm / jnp.maximum(weight_norm, least),
            norms_of(updates.values, where),
            norms_of(weights, where),
        )
        return *clip_by_unit_norms(updates, of, bound.at(step), bound.fit), memory

    return transformation("adaptive_grad_clip", act)


def _fan_in_or_all(path: Path, leaf: Any) -> Reduced:
    """Reduce as `fan_in`, and over all of a bias; other ranks may be stacks."""
    if len(leaf.shape) not in (0, 1, 2, 4):
        raise unclear_error(path, leaf)
    return tuple(range(len(leaf.shape) - 1)) or None
