"""The clip relative to the weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from clipjax import _core
from clipjax._core import FAN_IN_OR_ALL, Axes

# Below this no norm is measured, and divided by it none overflows.
_LEAST = 1e-18


def adaptive_grad_clip(
    clipping: optax.ScalarOrSchedule = 0.01, eps: optax.ScalarOrSchedule = 1e-3, *, axes: Axes = FAN_IN_OR_ALL
) -> optax.GradientTransformationExtraArgs:
    """Clip the gradient of each unit to a share of the norm of its weights: |g| <= clipping * max(|w|, eps).

    The paper does not clip the classifier's head: `axes={"head/*": clipjax.SKIP, "*": clipjax.fan_in_or_all}`.

    Args:
      clipping: the share: a number, an array that broadcasts to the units, or a schedule.
      eps: the smallest norm of weights that counts, so that weights of 0 can move; in the same forms.
      axes: the axes that are reduced. By default :func:`clipjax.fan_in_or_all`.

    Returns:
      A transformation that needs `params` in `update`. Its metric `norm` is the largest |g| / max(|w|, eps), the
      number that is compared with `clipping`.

    Raises:
      TypeError, ValueError: an argument is negative, NaN or not a number; `axes` is invalid. In `update`: the
        parameters are missing, or do not match the updates.

    Equals the rule of the paper, of timm and of `optax.adaptive_grad_clip`, except that kernels of rank 3 are
    reduced over all axes but the last, and that Optax takes a kernel (1, out) for one vector.

    References:
      Brock et al., 2021, High-performance large-scale image recognition without normalization, arXiv:2102.06171.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.adaptive_grad_clip(0.01)
      >>> weights = jnp.array([[3.0, 0.0], [4.0, 0.0]])  # norms 5 and 0
      >>> grads = jnp.array([[0.6, 0.0], [0.8, 1.0]])
      >>> clipped, state = tx.update(grads, tx.init(weights), weights)
      >>> print(jnp.linalg.norm(clipped, axis=0).round(6))
      [5.e-02 1.e-05]
    """
    share, least = _core.as_schedule("clipping", clipping), _core.as_schedule("eps", eps)
    axes = _core.check_axes(axes)

    def act(updates: Any, params: Any, step: Any, memory: Any) -> Any:
        weights, floor = _core.leaves_of(_core.params_for("adaptive_grad_clip", updates, params))[0], least(step)

        def size_of(units: _core.Units) -> jax.Array:
            size = _core.norm(weights[units.place].value, units.axes)
            return jnp.maximum(jnp.maximum(size, _core.broadcastable("eps", floor, size, units.leaf)), _LEAST)

        return *_core.clip_units(updates, axes, share(step), name="clipping", size_of=size_of), memory

    return _core.with_metrics("adaptive_grad_clip", act)
