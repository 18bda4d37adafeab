"""The gradient without what would only make the weights longer or shorter."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

from clipjax._core.arguments import explained, shown
from clipjax._core.axes import Axes, check_axes
from clipjax._core.members import Acted, Memory, check_units, with_stats
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
    """Take out the part of the gradient along the weights, always: g - w <g, w> / |w|².

    For the place **before** an optimizer. Once a classifier fits its training data, its loss still falls
    as the logits grow, and the gradient comes to point along the weights: they only get longer, until the
    softmax rounds to 0 and 1. Without that part of the gradient the model has to change what it predicts.
    Where weights may be up to a radius long, :func:`tangent_cone` takes it out of those alone that are.

    Args:
      axes: the axes that are reduced, as in :func:`clipjax.clip_by_norm`. None: each leaf is one vector.
      keep_norm: whether what is left is made as long as the gradient was.
      specs: inside `shard_map`, the `PartitionSpec` tree of the updates.
      axis_name: the mesh axes that split the units, in `pmap` and unchecked `shard_map`.

    Returns:
      A transformation that needs `params` in `update`. Its metric `norm` is the largest radial part that was
      taken out, `scale` the smallest share of a gradient's norm that was tangential: near 0, the loss falls
      by longer weights alone.

    Raises:
      TypeError, ValueError: `axes` are no axes; `keep_norm` is no bool. In `init`: nothing is looked at. In
      `update`: no `params`.

    Guarantees: what is left has |<g', w>| <= eps |g| |w|, eps that of the leaf's dtype. With `keep_norm`,
    |g'| is |g| to two eps, and a tangential part t that is small beside g brings what was rounded with it:
    |<g', w>| <= (eps + 2⁻³⁰ |g| / |t|) |g| |w|. Where |t| <= eps |g|, no more than the rounding of g, nothing
    is left: 0, and no noise that is as long as the gradient was. So the gradient of a unit of one entry, as
    of a scalar, becomes 0: leave scalars out, as in `axes={"*kernel": None}`. Units of zero weights, which
    have no direction, and gradients at right angles to the weights come back bit for bit. A unit with an
    entry, of the gradient or the weights, that is not finite becomes NaN.

    Equals the authors' `OrthoGrad` on each parameter, where both denominators are far above the 1e-30 that it
    adds, and but for gradients along the weights: of these it keeps the rounding, as long as they were.

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

    return with_stats(TangentSpaceState, act, check_units(axes), needs_params="looks at the weights")
