"""The clip relative to the weights."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import optax

from clipjax import _checks
from clipjax._core import bounds, norms, transformation, trees, units
from clipjax._core.clipping import clip_units  # `clipping` is a parameter, as in Optax

# Below this no norm is measured, and divided by it none overflows.
_LEAST = 1e-18


def adaptive_grad_clip(
    clipping: bounds.Bound = 0.01,
    *,
    eps: bounds.Number = 1e-3,
    axes: units.Axes | Literal["auto"] = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Clip the gradient of each unit to a share of the norm of its weights: |g| <= clipping * max(|w|, eps).

    The paper does not clip the classifier's head: `axes={"head/*": clipjax.SKIP, "*":
    clipjax.fan_in_or_all}`.

    Args:
      clipping: the share: a number, an array that broadcasts to the units, or a
        schedule.
      eps: the smallest norm of weights that counts, so that weights of 0 can move: a
        number; 1e-18 if it is less.
      axes: the axes that are reduced. "auto": those of :func:`clipjax.fan_in_or_all`
        for ranks 2 and 4, and all for less; rank 3, and 5 and more, may be stacks of
        layers or heads, and are an error.

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
    share = bounds.as_schedule("clipping", clipping)
    eps = _checks.check_number("eps", eps, "[0, inf)")
    axes = units.check_axes(axes, auto=_fan_in_or_all_by_rank)

    def act(updates: Any, params: Any, step: Any, memory: Any) -> Any:
        weights = trees.leaves_of(
            _checks.params_for("adaptive_grad_clip", updates, params)
        )[0]
        found, least = units.of_tree(updates, axes), jnp.maximum(eps, _LEAST)
        sizes = [
            jnp.maximum(norms.norm(weights[each.place].value, each.axes), least)
            for each in found
        ]
        relative = [
            norm / size for norm, size in zip(units.norms_of(found), sizes, strict=True)
        ]
        return *clip_units(updates, found, relative, share(step), "clipping"), memory

    return transformation.with_metrics("adaptive_grad_clip", act)


def _fan_in_or_all_by_rank(path: Any, leaf: Any) -> tuple[int, ...] | None:
    """Return `fan_in_or_all` for the ranks of the paper; kernels of others may be stacks or heads."""
    if len(leaf.shape) in (0, 1, 2, 4):
        return units.fan_in_or_all(path, leaf)
    raise units.unclear(path, leaf)
