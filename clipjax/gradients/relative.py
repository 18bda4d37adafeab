"""Bounds relative to the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from clipjax._core.arguments import explained, shown
from clipjax._core.axes import Axes, Default, Path, Skip, check_axes, fan_in, resolve_axes
from clipjax._core.bounds import Bound, bound_at
from clipjax._core.dtypes import in_float64, only_arrays
from clipjax._core.maxima import larger
from clipjax._core.members import Acted, Memory, with_stats
from clipjax._core.mesh import AxisName, placed_as
from clipjax._core.rescale import to_bound
from clipjax._core.rounding import round_up
from clipjax._core.side_by_side import side_by_side
from clipjax._core.stats import Stats
from clipjax._core.trees import Decision, Unit, for_units, least_of, measure_units, rescale_units
from clipjax._core.where import Where


class AdaptiveGradClipState(NamedTuple):
    """State of :func:`adaptive_grad_clip`."""

    adaptive_grad_clip: Stats
    threshold: jax.Array  # float: the smallest bound of the last step


def fan_in_or_whole(path: Path, leaf: Any) -> tuple[int, ...] | None:
    """Reduce over the incoming weights of each unit, and over all of a bias or a scale.

    Like `clipjax.fan_in`, except that a leaf of rank 0 or 1 is one unit instead of being left alone.

    Args:
      path: the leaf's key path, which this rule does not use.
      leaf: anything with a `shape`.

    Returns:
      The reduced axes, or None for the whole leaf.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> clipjax.fan_in_or_whole((), jnp.ones((3, 3, 16, 32)))
      (0, 1, 2)
      >>> clipjax.fan_in_or_whole((), jnp.ones(32))  # None: the whole leaf
    """
    axes = fan_in(path, leaf)
    return None if isinstance(axes, Skip) else axes


FAN_IN_OR_WHOLE: Final = Default(fan_in_or_whole, "fan_in_or_whole")


@explained
def adaptive_grad_clip(
    clipping: Bound = 0.01,
    eps: Bound = 1e-3,
    *,
    axes: Axes = FAN_IN_OR_WHOLE,
    specs: Any = None,
    where: Where = None,
    axis_name: AxisName = None,
    axis: int | Sequence[int] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip the gradient of each unit to `clipping` times the norm of its weights (AGC).

    The bound of a unit is clipping * max(|w|, eps). The paper does not clip the classifier's head: use
    `axes={"head/*": clipjax.SKIP, "*": clipjax.fan_in_or_whole}`.

    Args:
      clipping: a number, an array that broadcasts to the norms, or a schedule.
      eps: the smallest weight norm used in a bound, so that weights of 0 can move: a number, an array or a
        schedule.
      axes: the axes that are reduced, as in :func:`clip_by_norm`. The default is `clipjax.fan_in_or_whole`:
        the incoming weights of each unit of a Dense or Conv kernel, and all of a bias or a scale. It accepts
        leaves of any rank, as the published rule does. In attention heads, stacked layers and the layers of
        Equinox, units lie along other axes; the default then changes how much is clipped, but breaks no
        guarantee, because this clip promises no bound on the weights.
      specs: inside `shard_map`, the `PartitionSpec` tree of the updates.
      where: the leaves to clip, as path patterns, a rule or a tree of bools (see :func:`clipjax.box`). None
        selects all. Other leaves are returned unchanged, are not measured and may hold anything.
      axis_name: the mesh axes that split the units, in `pmap` and unchecked `shard_map`.
      axis: Optax's name for `axes`.

    Returns:
      A transformation that needs `params` in `update`. `norm` is the largest norm of the gradient's units,
      `threshold` the smallest bound.

    Raises:
      TypeError, ValueError: as for :func:`clip_by_norm`. In `update`: `params` are missing, or do not match
        the updates.

    Guarantees: measured in float64, no unit's clipped norm is above its bound; a unit within its bound is
    unchanged, bit for bit; a non-finite entry of the gradient, or a NaN in the weights, makes its unit NaN;
    infinite weights give an infinite bound. After SGD with learning rate r, no unit has moved by more than r
    * clipping * max(|w|, eps).

    Equals the rule of the paper, of timm and of `optax.adaptive_grad_clip`, except for the 1e-6 that they use
    as the smallest divisor. Optax also reduces axis 0 of a leaf of rank 3, and all of a kernel whose axes but
    one have length 1.

    References:
      Brock et al., 2021, High-performance large-scale image recognition without normalization,
      arXiv:2102.06171.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.adaptive_grad_clip(0.01)
      >>> weights = jnp.array([[3.0, 0.0], [4.0, 0.0]])  # (in, out): the norms are 5 and 0
      >>> grads = jnp.array([[0.6, 0.0], [0.8, 1.0]])
      >>> clipped, state = tx.update(grads, tx.init(weights), weights)
      >>> print(jnp.linalg.norm(clipped, axis=0).round(6))  # 0.01 * 5 and 0.01 * 1e-3
      [5.e-02 1.e-05]
    """
    ratio, least = bound_at("clipping", clipping), bound_at("eps", eps)
    if axis is not None:
        if not isinstance(axes, Default):
            raise TypeError(f"axis is another name for axes: got axis={shown(axis)} and axes={shown(axes)}")
        axes = axis
    rule = check_axes(axes)

    def first(params: Any, stats: Stats) -> Memory:
        resolve_axes(rule, only_arrays(params))
        return (jnp.full((), jnp.inf, stats.norm.dtype),)

    @in_float64
    def clip(updates: Any, memory: Memory, params: Any, step: Any, **extra_args: Any) -> Acted:
        del extra_args
        at_step, at_least = ratio(step), least(step)
        weights = jax.tree.leaves(params)
        used: list[jax.Array] = []
        over: list[tuple[str, ...]] = []

        def relative(units: Sequence[Unit], norms: Sequence[jax.Array]) -> Decision:
            of_weights = [unit._replace(leaf=placed_as(unit.leaf, weights[unit.position])) for unit in units]
            sizes = measure_units(of_weights)
            bounds = {"clipping": at_step, "eps": at_least}
            pairs = list(zip(units, norms, strict=True))
            columns = [[for_units(*bound, *pair) for pair in pairs] for bound in bounds.items()]
            used.extend(_bounds(sizes, *columns))
            over.extend(unit.over for unit in units)
            return to_bound, [used]

        clipped, report = rescale_units(updates, relative, rule, 2.0, specs, axis_name)
        threshold = least_of(lax.stop_gradient(used), tuple(over))
        return clipped, report, (round_up(threshold, memory[0].dtype),)

    return with_stats(AdaptiveGradClipState, clip, first, where=where, needs_params="measures the weights")


@jax.jit
def _bounds(norms: list[jax.Array], ratios: list[jax.Array], least: list[jax.Array]) -> list[jax.Array]:
    """Return the bounds of all units from the norms of their weights."""

    def bound_of(norm: jax.Array, ratio: jax.Array, least: jax.Array) -> jax.Array:
        return jnp.where(ratio < jnp.inf, ratio * larger(norm, least), ratio)

    return side_by_side(bound_of, norms, ratios, least)
