"""Two halves of Stable-SPAM: bounds on entries, and norms, that follow moving averages of each leaf."""

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
from clipjax._core.maxima import max_of, min_of
from clipjax._core.members import Memory
from clipjax._core.mesh import AxisName
from clipjax._core.norms import norm_of, strong, weakly_typed_as, wide
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
from clipjax._core.rounding import limits_in, widened
from clipjax._core.stats import Stats, count
from clipjax._core.trees import Report, Unit, measure_units, of_norms, units_of
from clipjax._core.where import Where
from clipjax.gradients.past import (
    Clipped,
    check_leaves,
    check_number,
    leaves_of,
    no_threshold,
    remembering,
    round_up,
)


class ClipByMovingMaxState(NamedTuple):
    """State of :func:`clip_by_moving_max`; `norm` is the largest absolute entry."""

    clip_by_moving_max: Stats
    threshold: jax.Array  # float: the least bound used at the last step
    maxima: jax.Array  # float (leaves,): the moving averages, corrected; 0 before the first
    taken: jax.Array  # int32 (leaves,): maxima taken in so far


class NormalizeByMovingNormState(NamedTuple):
    """State of :func:`normalize_by_moving_norm`; `norm` is the largest norm of a leaf."""

    normalize_by_moving_norm: Stats
    means: jax.Array  # float (leaves,): the moving averages of the norms, corrected; 0 before the first
    roots: jax.Array  # float (leaves,): the roots of those of their squares
    taken: jax.Array  # int32 (leaves,): norms taken in so far


@explained
def clip_by_moving_max(
    decay: float = 0.999, *, where: Where = None, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    """Scale down entries above the moving average of the largest absolute entry of their leaf.

    AdaClip of Stable-SPAM. With M the largest absolute entry of a leaf, T <- decay * T + (1 - decay) * M
    takes it in first. The threshold is T / (1 - decay^t), and each entry g above it becomes
    g / M * threshold: the largest becomes the threshold, and others above it less, in proportion.

    Args:
      decay: of the moving average, in [0, 1). With 0 nothing is ever clipped.
      where: which leaves are clipped, and count: path patterns, a rule or a tree of bools, as in
        :func:`clipjax.box`; the others may hold anything, and pass as they are. None: all.
      axis_name: the mesh axes that split the leaves, in `pmap` and unchecked `shard_map`. Inside a
        checked `shard_map` each leaf's type tells.

    Returns:
      A transformation. `norm` is the largest absolute entry of all leaves, `threshold` the least of their
      thresholds, `scale` the least of threshold / M. `maxima` and `taken` in its state have one entry for
      each float or complex leaf of the parameters, in their order.

    Raises:
      TypeError, ValueError: `decay` is no number, or out of range. In `update`: the gradients have more or
        fewer leaves than the parameters had.

    Guarantees: measured in float64, no entry is above the threshold of its leaf; entries at or below it come
    back bit for bit, so that nothing changes at the first step, nor while the largest entry stays the same.
    A non-finite entry makes its leaf NaN, and leaves the statistics of all leaves as they are. In
    derivatives, the maxima of other steps are constants.

    Equals the clip in the authors' `StableSPAM`, but for two things. A leaf whose gradient is 0 does not take
    that in: a layer that begins to learn late would be held near 0 for long. And there the reset of Adam's
    moments sets t back to 1 for the threshold, too, but not T, which makes it hundreds of times as large at
    first; here t counts all that was taken in.

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

    def clip(updates: Any, memory: Memory, step: Any, dtype: Any) -> Clipped:
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
        return Clipped(treedef.unflatten(leaves), _report(largest, scales), (shown, average, taken))

    return remembering(ClipByMovingMaxState, first, clip, where)


def _clip_complex(leaf: Any, threshold: jax.Array, scale: Scale) -> Any:
    """Scale the entries above the threshold; their sizes are no numbers of the leaf's dtype."""
    size = norm_of(leaf, (), 2.0)
    above = jnp.minimum(threshold, size * factor_of(scale))
    return rescaled(leaf, to_bound(size, jnp.where(size <= threshold, jnp.inf, above)))


@explained
def normalize_by_moving_norm(
    b1: float = 0.7, b2: float = 0.9, *, eps: float = 1e-8, where: Where = None, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    """Normalize each leaf to the moving average of its norms, over the root of that of their squares.

    AdaGN of Stable-SPAM. With n the norm of a leaf, m <- b1 * m + (1 - b1) * n and
    v <- b2 * v + (1 - b2) * n^2 take it in first, and are divided by 1 - b1^t and 1 - b2^t. Then the leaf g
    becomes g / n * m / (sqrt(v) + eps).

    This is no clip: every gradient changes, and small ones grow. Gradients of a steady norm get the norm 1,
    whatever it was, and the learning rate has to suit that (Adam's does not depend on it). With these decays
    no norms of the past make it more than 1.41; a spike far above all of them gets (1 - b1) / sqrt(1 - b2),
    0.95, and what follows it less for a while.

    Args:
      b1: the decay of the average of norms, in [0, 1).
      b2: the decay of the average of their squares, in [0, 1).
      eps: at least 0; norms far below it become small. With 0 the result does not depend on the scale of the
        loss.
      where: which leaves are normalized, and count: path patterns, a rule or a tree of bools, as in
        :func:`clipjax.box`; the others may hold anything, and pass as they are. None: all.
      axis_name: the mesh axes that split the leaves, in `pmap` and unchecked `shard_map`. Inside a
        checked `shard_map` each leaf's type tells.

    Returns:
      A transformation. `norm` is the largest norm of a leaf before, `scale` the least factor, at most 1;
      steps at which any leaf changed count as clipped. `means`, `roots` and `taken` in its state have one
      entry for each float or complex leaf of the parameters, in their order. Means and roots are kept as they
      are after the division, and the root rather than v, whose squares would leave the range of a float32.

    Raises:
      TypeError, ValueError: an argument is no number, or out of range. In `update`: the gradients have more
        or fewer leaves than the parameters had.

    Guarantees: measured in float64, no norm is above its m / (sqrt(v) + eps), and none more than 4 ulp below
    it; directions stay. A leaf of zeros stays so, and takes nothing in. A non-finite entry makes its leaf
    NaN, and leaves the statistics of all leaves as they are. In derivatives, the norms of other steps are
    constants.

    Equals the normalization in the authors' `StableSPAM` without its `total_T`, which lets b1 fall by a
    cosine. There a gradient of 0 is taken in, and the reset of Adam's moments sets t back to 1 for these
    averages, too.

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

    def normalize(updates: Any, memory: Memory, step: Any, dtype: Any) -> Clipped:
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
        return Clipped(treedef.unflatten(leaves), _report(norms, scales), (means, roots, taken))

    return remembering(NormalizeByMovingNormState, first, normalize, where)


def _measured(
    name: str,
    updates: Any,
    ord: float,  # noqa: A002
    axis_name: AxisName,
    remembered: int,
) -> tuple[list[Unit], jax.Array]:
    """The leaves that have a norm, and the norms of all side by side."""
    units = units_of(updates, None, None, axis_name)
    check_leaves(name, len(units), remembered)
    norms = measure_units(units, ord)
    return units, jnp.stack(norms) if norms else jnp.zeros(0)


def _taken_in(norms: jax.Array, taken: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which norms enter the averages, and how many have by then."""
    seen = (norms > 0) & (norms < jnp.inf)
    return seen, count(taken, seen)


def _average(past: jax.Array, new: jax.Array, seen: jax.Array, decay: Any, taken: jax.Array) -> jax.Array:
    """The corrected moving average, of which the last of t numbers has the share (1 - decay) / (1 - decay^t).

    Kept corrected, it is between the numbers, so it has their range, and equal ones are it, bit for bit.
    """
    decay, times = wide(decay), wide(jnp.maximum(taken, 1))
    share = jnp.where(taken <= 1, 1.0, (1 - decay) / (1 - decay**times))
    return past + share * jnp.where(seen, new - past, 0.0)


def _root_mean_square(
    past: jax.Array, new: jax.Array, seen: jax.Array, decay: Any, taken: jax.Array
) -> jax.Array:
    """The root of the average of squares, from the root before; the squares are of numbers up to 1."""
    largest = jnp.maximum(lax.stop_gradient(past), lax.stop_gradient(new))
    largest = jnp.where((largest > 0) & (largest < jnp.inf), largest, 1.0)
    square = _average((past / largest) ** 2, (new / largest) ** 2, seen, decay, taken)
    return largest * jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)


def _slack(units: Sequence[Unit]) -> np.ndarray:
    """By how much the scale of each leaf is rounded down."""
    return np.array([precision_of(unit.leaf.dtype).slack for unit in units], np.float64)


def _brought_to(norms: jax.Array, targets: jax.Array, units: Sequence[Unit]) -> Scale:
    """The scales of leaves, which grow or shrink; none is left alone for what 16 bits might have lost."""
    each = [precision_of(unit.leaf.dtype) for unit in units]
    smallest, largest = (
        np.array([getattr(precision, name) for precision in each], np.float64)
        for name in ("smallest", "largest")
    )
    slack = _slack(units)
    return between(norms, targets, targets, wide(1), Precision(slack, 2 * slack, wide(0), smallest, largest))


def _at(scales: Scale, i: int) -> Scale:
    """The scale of one leaf."""
    return Scale(*(column[i] for column in scales))


def _report(norms: jax.Array, scales: Scale) -> Report:
    norms, scales = lax.stop_gradient((norms, scales))
    each = of_norms(norms, scales)
    return Report(max_of(norms), min_of(each.scale, 1), jnp.any(each.clipped), max_of(each.after))
