"""Two parts of Stable-SPAM that follow moving averages of each leaf: a clip and a normalization."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from clipjax._core.arguments import explained
from clipjax._core.bounds import check_number
from clipjax._core.dtypes import strong, weakly_typed_as, wide
from clipjax._core.maxima import max_of, min_of
from clipjax._core.members import Acted, Memory
from clipjax._core.mesh import AxisName
from clipjax._core.norms import norm_of
from clipjax._core.rescale import (
    Precision,
    Scale,
    between,
    factor_of,
    precision_of,
    rescale,
    rescaled,
    rounded_down,
    to_bound,
)
from clipjax._core.rounding import limits_in, round_up, widened
from clipjax._core.stats import Stats, count
from clipjax._core.trees import Report, Unit, measure_units, of_norms, units_of
from clipjax._core.where import Where
from clipjax.gradients.past import check_leaves, leaves_of, no_threshold, remembering


class ClipByMovingMaxState(NamedTuple):
    """State of :func:`clip_by_moving_max`; `norm` is the largest absolute entry."""

    clip_by_moving_max: Stats
    threshold: jax.Array  # float: the smallest bound of the last step
    maxima: jax.Array  # float (leaves,): the bias-corrected moving averages; 0 before the first maximum
    taken: jax.Array  # int32 (leaves,): maxima that the averages include


class NormalizeByMovingNormState(NamedTuple):
    """State of :func:`normalize_by_moving_norm`; `norm` is the largest norm of a leaf."""

    normalize_by_moving_norm: Stats
    means: jax.Array  # float (leaves,): bias-corrected moving averages of the norms; 0 before the first norm
    roots: jax.Array  # float (leaves,): roots of the bias-corrected moving averages of their squares
    taken: jax.Array  # int32 (leaves,): norms that the averages include


@explained
def clip_by_moving_max(
    decay: float = 0.999, *, where: Where = None, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    """Scale down entries above the moving average of the largest absolute entry of their leaf.

    This is AdaClip of Stable-SPAM. With M the largest absolute entry of a leaf, the average is updated first:
    T <- decay * T + (1 - decay) * M. The threshold is T / (1 - decay^t), and each entry g above it becomes g
    / M * threshold: the largest entry becomes the threshold, and smaller ones above it are scaled in
    proportion.

    Args:
      decay: the decay of the moving average, in [0, 1). With 0 nothing is ever clipped.
      where: the leaves to clip, as path patterns, a rule or a tree of bools (see :func:`clipjax.box`). None
        selects all. Other leaves are returned unchanged, are not measured and may hold anything.
      axis_name: the mesh axes that split the leaves, in `pmap` and unchecked `shard_map`. In a checked
        `shard_map`, the types of the leaves contain the axes.

    Returns:
      A transformation. `norm` is the largest absolute entry of all leaves, `threshold` the smallest of their
      thresholds, `scale` the smallest threshold / M. In its state, `maxima` and `taken` have one entry for
      each float or complex leaf of the parameters, in their order.

    Raises:
      TypeError, ValueError: `decay` is not a number, or is out of range. In `update`: the gradients have more
        or fewer leaves than the parameters had.

    Guarantees: measured in float64, no entry is above the threshold of its leaf; entries at or below it are
    unchanged, bit for bit, so nothing changes at the first step, nor while the largest entry stays the same.
    A non-finite entry makes its leaf NaN, and leaves the statistics of all leaves unchanged. Derivatives
    treat the maxima of other steps as constants.

    Equals the clip in the authors' `StableSPAM`, with two differences. Here, a leaf whose gradient is 0 does
    not update its average: otherwise a layer that begins to learn late would be held near 0 for a long time.
    And in `StableSPAM`, the reset of Adam's moments also sets t of the threshold back to 1, but not T, which
    makes the threshold hundreds of times as large at first; here, t counts all updates of the average.

    References:
      Huang et al., 2025, Stable-SPAM: how to train in 4-bit more stably than 16-bit Adam, arXiv:2502.17055.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.clip_by_moving_max(0.5)
      >>> usual = jnp.array([1.0, -0.5, 0.1])
      >>> _, state = tx.update(usual, tx.init(usual))
      >>> clipped, state = tx.update(jnp.array([-10.0, 8.0, 0.1]), state)
      >>> print(state.threshold, [f"{x:.3f}" for x in clipped])  # (1 + 2 * 10) / 3
      7.0 ['-7.000', '5.600', '0.100']
    """
    check_number("decay", decay, 0, 1, below=True)

    def first(params: Any, dtype: Any) -> Memory:
        leaves = leaves_of(params)
        return no_threshold(dtype), jnp.zeros(leaves, dtype), jnp.zeros(leaves, jnp.int32)

    def clip(updates: Any, memory: Memory, step: Any, dtype: Any) -> Acted:
        del step
        _, past, taken = memory
        treedef: Any
        leaves, treedef = jax.tree.flatten(updates)
        units, largest = _measured("clip_by_moving_max", updates, jnp.inf, axis_name, len(past))
        seen, taken = _taken_in(largest, taken)
        average = _average(past, largest, seen, decay, taken)
        thresholds = jnp.where(largest < jnp.inf, average, jnp.nan)
        scales = to_bound(largest, thresholds)
        down = rounded_down(scales, _slack(units))
        limits_of = functools.cache(lambda dtype: limits_in(thresholds, thresholds, dtype)[1])
        for i, unit in enumerate(units):
            if jnp.iscomplexobj(unit.leaf):
                clipped = _clip_complex(unit.leaf, thresholds[i], _at(scales, i))
            else:
                entries = strong(unit.leaf)
                size = jnp.abs(widened(entries))
                inside = size <= limits_of(size.dtype)[i]
                clipped = lax.select(inside, entries, rescale(entries, _at(down, i)))
            leaves[unit.position] = weakly_typed_as(unit.leaf, clipped)
        known = jnp.where((taken == 0) & (largest < jnp.inf), jnp.inf, lax.stop_gradient(thresholds))
        shown = round_up(min_of(known), dtype)
        return treedef.unflatten(leaves), _report(largest, scales), (shown, average, taken)

    return remembering(ClipByMovingMaxState, first, clip, where)


def _clip_complex(leaf: Any, threshold: jax.Array, scale: Scale) -> Any:
    """Scale the entries above the threshold, whose dtype may not represent their absolute values."""
    size = norm_of(leaf, (), 2.0)
    above = jnp.minimum(threshold, size * factor_of(scale))
    return rescaled(leaf, to_bound(size, jnp.where(size <= threshold, jnp.inf, above)))


@explained
def normalize_by_moving_norm(
    b1: float = 0.7, b2: float = 0.9, *, eps: float = 1e-8, where: Where = None, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    """Normalize each leaf to the moving average of its norms, divided by the root of that of their squares.

    This is AdaGN of Stable-SPAM. With n the norm of a leaf, the averages are updated first: m <- b1 * m + (1
    - b1) * n and v <- b2 * v + (1 - b2) * n^2. They are divided by 1 - b1^t and 1 - b2^t. Then the leaf g
    becomes g / n * m / (sqrt(v) + eps).

    This is not a clip: every gradient changes, and small ones grow. Gradients of a steady norm get the norm
    1, whatever it was, and the learning rate must suit that (that of Adam does not depend on it). With the
    default decays, the new norm is at most 1.41 for any past norms; a spike far above all of them gets (1 -
    b1) / sqrt(1 - b2), 0.95, and the gradients after it get less for a while.

    Args:
      b1: the decay of the average of the norms, in [0, 1).
      b2: the decay of the average of their squares, in [0, 1).
      eps: at least 0; norms far below it become small. With 0, the result does not depend on the scale of the
        loss.
      where: the leaves to clip, as path patterns, a rule or a tree of bools (see :func:`clipjax.box`). None
        selects all. Other leaves are returned unchanged, are not measured and may hold anything.
      axis_name: the mesh axes that split the leaves, in `pmap` and unchecked `shard_map`. In a checked
        `shard_map`, the types of the leaves contain the axes.

    Returns:
      A transformation. `norm` is the largest norm of a leaf before normalization, `scale` the smallest
      factor, at most 1; steps at which any leaf changed count as clipped. In its state, `means`, `roots` and
      `taken` have one entry for each float or complex leaf of the parameters, in their order. `means` is m
      after its division, and `roots` the root of v after its division: v itself could leave the range of
      float32.

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range. In `update`: the gradients have
        more or fewer leaves than the parameters had.

    Guarantees: measured in float64, no norm is above its m / (sqrt(v) + eps), and none more than 4 ulp below
    it; directions do not change. A leaf of zeros stays zero and does not update its averages. A non-finite
    entry makes its leaf NaN, and leaves the statistics of all leaves unchanged. Derivatives treat the norms
    of other steps as constants.

    Equals the normalization in the authors' `StableSPAM` without its `total_T`, which lowers b1 along a
    cosine. In `StableSPAM`, a gradient of 0 does update the averages, and the reset of Adam's moments also
    sets t of these averages back to 1.

    References:
      Huang et al., 2025, Stable-SPAM: how to train in 4-bit more stably than 16-bit Adam, arXiv:2502.17055.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.normalize_by_moving_norm()
      >>> grads = jnp.array([0.03, -0.04])
      >>> updates, state = tx.update(grads, tx.init(grads))
      >>> print(updates.round(3))
      [ 0.6 -0.8]
    """
    check_number("b1", b1, 0, 1, below=True)
    check_number("b2", b2, 0, 1, below=True)
    check_number("eps", eps, 0)

    def first(params: Any, dtype: Any) -> Memory:
        leaves = leaves_of(params)
        return jnp.zeros(leaves, dtype), jnp.zeros(leaves, dtype), jnp.zeros(leaves, jnp.int32)

    def normalize(updates: Any, memory: Memory, step: Any, dtype: Any) -> Acted:
        del step, dtype
        past, roots, taken = memory
        treedef: Any
        leaves, treedef = jax.tree.flatten(updates)
        units, norms = _measured("normalize_by_moving_norm", updates, 2.0, axis_name, len(past))
        seen, taken = _taken_in(norms, taken)
        means = _average(past, norms, seen, b1, taken)
        roots = _root_mean_square(roots, norms, seen, b2, taken)
        divisors = roots + wide(eps)
        targets = means / jnp.where(divisors > 0, divisors, 1.0)

        scales = _brought_to(norms, targets, units)
        down = rounded_down(scales, _slack(units))
        for i, unit in enumerate(units):
            leaves[unit.position] = rescale(unit.leaf, _at(down, i))
        return treedef.unflatten(leaves), _report(norms, scales), (means, roots, taken)

    return remembering(NormalizeByMovingNormState, first, normalize, where)


def _measured(
    name: str,
    updates: Any,
    ord: float,  # noqa: A002
    axis_name: AxisName,
    remembered: int,
) -> tuple[list[Unit], jax.Array]:
    """Return the leaves that have a norm, and an array of their norms."""
    units = units_of(updates, None, None, axis_name)
    check_leaves(name, len(units), remembered)
    norms = measure_units(units, ord)
    return units, jnp.stack(norms) if norms else jnp.zeros(0)


def _taken_in(norms: jax.Array, taken: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return which norms enter the averages, and how many have entered with this step."""
    seen = (norms > 0) & (norms < jnp.inf)
    return seen, count(taken, seen)


def _average(past: jax.Array, new: jax.Array, seen: jax.Array, decay: Any, taken: jax.Array) -> jax.Array:
    """Update the bias-corrected moving average; the last of t numbers has weight (1 - decay) / (1 - decay^t).

    The corrected average lies between the numbers, so it stays in their range; the average of equal numbers
    is that number, bit for bit.
    """
    decay, times = wide(decay), wide(jnp.maximum(taken, 1))
    share = jnp.where(taken <= 1, 1.0, (1 - decay) / (1 - decay**times))
    return past + share * jnp.where(seen, new - past, 0.0)


def _root_mean_square(
    past: jax.Array, new: jax.Array, seen: jax.Array, decay: Any, taken: jax.Array
) -> jax.Array:
    """Update the root of the average of squares; only numbers up to 1 are squared."""
    largest = jnp.maximum(lax.stop_gradient(past), lax.stop_gradient(new))
    largest = jnp.where((largest > 0) & (largest < jnp.inf), largest, 1.0)
    square = _average((past / largest) ** 2, (new / largest) ** 2, seen, decay, taken)
    return largest * jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)


def _slack(units: Sequence[Unit]) -> np.ndarray:
    """Return how much the scale of each leaf is rounded down."""
    return np.array([precision_of(unit.leaf.dtype).slack for unit in units], np.float64)


def _brought_to(norms: jax.Array, targets: jax.Array, units: Sequence[Unit]) -> Scale:
    """Return the scales of leaves, which may grow or shrink.

    Unlike in a clip, no leaf keeps its norm because 16 bits are too coarse to tell it from the target.
    """
    each = [precision_of(unit.leaf.dtype) for unit in units]
    smallest, largest = (
        np.array([getattr(precision, name) for precision in each], np.float64)
        for name in ("smallest", "largest")
    )
    slack = _slack(units)
    return between(norms, targets, targets, wide(1), Precision(slack, 2 * slack, wide(0), smallest, largest))


def _at(scales: Scale, i: int) -> Scale:
    """Return the scale of one leaf."""
    return Scale(*(column[i] for column in scales))


def _report(norms: jax.Array, scales: Scale) -> Report:
    norms, scales = lax.stop_gradient((norms, scales))
    each = of_norms(norms, scales)
    return Report(max_of(norms), min_of(each.scale, 1), jnp.any(each.clipped), max_of(each.after))
