"""The gradient without the part that would only make the weights longer or shorter."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

from clipjax._core.arguments import explained, shown
from clipjax._core.axes import Axes, check_axes
from clipjax._core.members import Acted, Memory, with_stats, without_memory
from clipjax._core.mesh import AxisName
from clipjax._core.stats import Stats
from clipjax._core.trees import Unit
from clipjax.gradients.radial import Choice, take_out_radial


class TangentSpaceState(NamedTuple):
    """State of :func:`tangent_space`; `norm` is the largest radial part that was taken out."""

    tangent_space: Stats


@explained
def tangent_space(
    *, axes: Axes = None, keep_norm: bool = True, specs: Any = None, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    """Take out the part of the gradient along the weights, for all weights: g - w <g, w> / |w|².

    Use this **before** an optimizer. Once a classifier fits its training data, its loss still falls as the
    logits grow, and the gradient turns toward the weights, which then only get longer, until the softmax
    rounds to 0 and 1. Without that part of the gradient the model has to change its predictions. If the
    weights have a largest radius, :func:`tangent_cone` takes out that part only for the weights that have
    reached it.

    Args:
      axes: the axes that are reduced, as in :func:`clipjax.clip_by_norm`. With None each leaf is one vector.
      keep_norm: whether what is left is rescaled to the norm of the original gradient.
      specs: inside `shard_map`, the `PartitionSpec` tree of the updates.
      axis_name: the mesh axes that split the units, in `pmap` and unchecked `shard_map`.

    Returns:
      A transformation that needs `params` in `update`. Its metric `norm` is the largest radial part that was
      taken out, `scale` the smallest share of a gradient's norm that was tangential: if it is near 0, the
      loss falls only because the weights get longer.

    Raises:
      TypeError, ValueError: `axes` has an invalid form; `keep_norm` is not a bool. In `init`: all leaves are
        left alone. In `update`: `params` are missing.

    Guarantees: what is left has |<g', w>| <= eps |g| |w|, where eps is that of the leaf's dtype. With
    `keep_norm`, |g'| equals |g| up to two eps, and if the tangential part t is small compared with g, its
    rounding error is scaled up with it: |<g', w>| <= (eps + 2⁻³⁰ |g| / |t|) |g| |w|. Where |t| <= eps |g|,
    which is only the rounding of g, the result is 0, not noise as long as the gradient was. So the gradient
    of a unit with a single entry, such as a scalar, becomes 0: leave scalars out, as in
    `axes={"*kernel": None}`. Units of zero weights, which have no direction, and gradients at right angles to
    the weights are unchanged, bit for bit. A unit with a non-finite entry in its gradient or its weights
    becomes NaN.

    Equals the authors' `OrthoGrad` on each parameter if both denominators are far above the 1e-30 that it
    adds, except for gradients along the weights: `OrthoGrad` keeps their rounding, rescaled to the length of
    the gradient.

    References:
      Prieto et al., 2025, Grokking at the edge of numerical stability, arXiv:2501.04697.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> weights, grads = jnp.array([3.0, 4.0]), jnp.array([-5.0, 0.0])
      >>> for tx in (clipjax.tangent_space(), clipjax.tangent_space(keep_norm=False)):
      ...     print(tx.update(grads, tx.init(weights), weights)[0].round(1))
      [-4.  3.]
      [-3.2  2.4]
    """
    axes = check_axes(axes)
    if not isinstance(keep_norm, bool):
        raise TypeError(f"keep_norm must be True or False, got {shown(keep_norm)}")

    def choose(unit: Unit, weight: jax.Array, norm: jax.Array, radial: jax.Array) -> Choice:
        del unit, weight, norm
        return Choice(tangential=radial != 0, nothing=False, unknown=False)

    def act(updates: Any, memory: Memory, params: Any, step: Any, **extra_args: Any) -> Acted:
        del step, extra_args
        done = take_out_radial(updates, params, axes, specs, axis_name, choose, keep_norm=keep_norm)
        return *done, memory

    return with_stats(TangentSpaceState, act, without_memory(axes), needs_params="uses the weights")
