"""Projections of the norms of weights: onto bounds, and onto what they were before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.aliases import AutoAxes, Bound, Bounds, DType, Skip, Step
from clipjax._core.bounds import (
    CheckedBound,
    are_given,
    check_bound,
    check_bounds,
    check_order,
    check_order_by_path,
)
from clipjax._core.clip import (
    factor_onto,
    factor_to,
    least_inside,
    margin,
    quotient_or_1,
)
from clipjax._core.leaves import Leaves, beside
from clipjax._core.norms import (
    axes_of,
    check_axes,
    fan_in_of_matrices,
    map_units,
    norms_of,
    whole_matrices,
)
from clipjax.weights.projection import (
    Projection,
    projection,
    rescaled_weights,
)


def max_norm(bound: Bounds, *, axes: AutoAxes = "auto") -> Projection:
    """Project the weights of each output unit onto a ball.

        w * min(1, bound / |w|)

    Use it to bound how large the weights of an output unit become, for example when you
    train with dropout or with large learning rates. Weight decay pulls all weights
    toward 0; this projection changes only the output units whose norm is above the
    bound.

    Args:
      bound: the bound on each norm, a `Bound`, or a mapping from path patterns to such
        bounds. The first pattern that matches a leaf counts, and a leaf that no pattern
        matches is not changed. An array broadcasts to the output units.
      axes: the axes that are reduced, as `Axes`. "auto", the default, is
        `clipjax.fan_in` for kernels (in, out) of rank 2, and raises an error for higher
        ranks; biases are not changed.

    Returns:
      A :class:`Projection`. `.apply(params)` returns the projected weights. As the last
      transformation of a chain, the projection changes the updates, so that the weights
      are the projected ones after the update.

    Raises:
      ValueError: in `init` or `apply` with `axes="auto"`, a leaf has rank 3 or more, or
        no leaf has rank 2.

    Equals `keras.constraints.MaxNorm`, whose `axis` is `axes`, except that Keras
    divides by norm + 1e-7, which also shrinks weights within the bound, by 1e-7 / norm
    of themselves.

    References:
      Srebro et al., 2005, Maximum-margin matrix factorization; Srivastava et al., 2014,
      Dropout: a simple way to prevent neural networks from overfitting.

    See Also:
      :func:`min_max_norm` has a smallest norm, too; :func:`tangent_cone` removes the
      part of a gradient that this projection would undo; :func:`violations` lists the
      weights that a projection would change.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.array([[3.0, 0.3], [4.0, 0.4]])  # (in, out)
      >>> print(clipjax.max_norm(1.0).apply(kernel).round(3))
      [[0.6 0.3]
       [0.8 0.4]]
    """
    return _rescaling(
        "clipjax.max_norm",
        axes,
        [check_bounds("bound", bound)],
        lambda norm, dtype, bound: factor_to(bound, norm, dtype),
    )


def min_max_norm(
    low: Bounds,
    high: Bounds,
    *,
    rate: Bound = 1.0,
    axes: AutoAxes = "auto",
) -> Projection:
    """Bring the norm of each output unit between two bounds.

        w * (rate * clip(|w|, low, high) / |w| + 1 - rate)

    Use it when the weights of an output unit must neither grow too large nor vanish.
    Weights whose norm is below `low` are scaled up, and weights whose norm is above
    `high` are scaled down.

    Args:
      low: the smallest norm, a finite `Bound`, or a mapping from path patterns to such
        bounds. It is 0 for a leaf that no pattern matches.
      high: the largest norm, in the same forms. It is infinity for a leaf that no
        pattern matches.
      rate: the fraction of the way to the bound that an output unit moves at each call,
        a `Bound` from 0 to 1. 1, the default, projects.
      axes: the axes that are reduced, as `Axes`. "auto", the default, means the same as
        for :func:`max_norm`.

    Returns:
      A :class:`Projection`, which you apply directly, or put at the end of a chain.

    Raises:
      ValueError: `low` is above `high` or infinite; `rate` is above 1; in `init` or
        `apply` with `axes="auto"`, a leaf has rank 3 or more, or no leaf has rank 2.

    An output unit of norm 0 stays 0, since it has no direction to grow in.

    Equals `keras.constraints.MinMaxNorm`, whose `axis` is `axes`, except that Keras
    divides by norm + 1e-7, which also shrinks weights within the bounds, by 1e-7 / norm
    of themselves.

    See Also:
      :func:`max_norm` has no smallest norm; :func:`unit_norm` has one norm for all;
      :func:`keep_norm` keeps the norm that weights had before the update.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.array([[3.0, 0.3], [4.0, 0.4]])  # norms 5 and 0.5
      >>> print(clipjax.min_max_norm(1.0, 2.0).apply(kernel).round(3))
      [[1.2 0.6]
       [1.6 0.8]]
    """
    rates = check_bound("rate", rate, "[0, 1]")
    lows = check_bounds("low", low, "[0, inf)", other=0.0)
    highs = check_bounds("high", high, other=np.inf)
    check_order(low, high)

    return _rescaling(
        "clipjax.min_max_norm", axes, [lows, highs], _factor_between, [rates]
    )


def unit_norm(*, axes: AutoAxes = "auto") -> Projection:
    """Bring the norm of each output unit to 1.

        w / |w|

    Use it when only the direction of weights has a meaning, as for prototypes and
    embeddings that are compared by their cosine.

    Args:
      axes: the axes that are reduced, as `Axes`. "auto", the default, means the same as
        for :func:`max_norm`.

    Returns:
      A :class:`Projection`, which you apply directly, or put at the end of a chain.

    Raises:
      ValueError: in `init` or `apply` with `axes="auto"`, a leaf has rank 3 or more, or
        no leaf has rank 2.

    An output unit of norm 0 stays 0.

    Equals `keras.constraints.UnitNorm`, whose `axis` is `axes`, except that Keras
    divides by norm + 1e-7.

    See Also:
      :func:`keep_norm` keeps norms other than 1; :func:`min_max_norm` has two bounds.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel = jnp.array([[3.0, 0.3, 0.0], [4.0, 0.4, 0.0]])  # (in, out)
      >>> print(clipjax.unit_norm().apply(kernel).round(3))
      [[0.6 0.6 0. ]
       [0.8 0.8 0. ]]
    """
    both = [check_bounds("low", 1), check_bounds("high", 1)]
    return _rescaling(
        "clipjax.unit_norm", axes, both, functools.partial(_factor_between, rate=1)
    )


def keep_norm(*, rate: Bound = 1.0, axes: AutoAxes = "auto") -> Projection:
    """Rescale each unit to the norm that it had before the update.

        w * (rate * |old| / |w| + 1 - rate)

    Use it in place of weight decay for fixed-norm ("hyperball") training, with
    :func:`relative_update` in front of the learning rate. The optimizers AdamH and
    MuonH are made in this way.

    Args:
      rate: the fraction of the way back to the old norm, a `Bound` from 0 to 1; 1 by
        default. An array broadcasts to the units.
      axes: the axes that are reduced, as `Axes`. "auto", the default, takes a matrix as
        one unit and does not change vectors and scalars. Leaves of rank 3 and more may
        be stacks of matrices, and raise an error.

    Returns:
      A :class:`Projection`, which you put at the end of a chain, or apply directly to
      the new and the old weights: `keep_norm().apply(params, old)`.

    Raises:
      ValueError: `rate` is above 1; in `init` or `apply` with `axes="auto"`, a leaf has
        rank 3 or more, or no leaf has rank 2; in `apply`, `old` is missing, or has no
        leaf of the same shape for one of the new weights.

    A unit whose old norm is 0 goes where the update takes it, and the norm that it
    reaches is kept from then on. To leave out weights that start at 0, write
    `axes={"out": clipjax.SKIP, "*": "auto"}`.

    The old norm is not stored in a state, but measured from the weights at each step.
    With float32 weights, the norm drifts by a fraction of less than 2e-3 over 100,000
    steps. In a chain with bfloat16 weights, it may drift by ten percent over 1,000
    steps. A direct `apply` to bfloat16 weights cannot follow such small steps at all,
    so keep the weights in float32.

    References:
      Wen et al., 2026, Fantastic pretraining optimizers and where to find them II:
      Hyperball optimization, arXiv:2606.16899.

    See Also:
      :func:`relative_update` gives updates the norm of the weights; :func:`unit_norm`
      keeps the norm at 1.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> old = jnp.array([[3.0, 0.0], [0.0, 4.0]])  # of norm 5
      >>> print(clipjax.keep_norm().apply(2 * old, old))
      [[3. 0.]
       [0. 4.]]
    """
    rates = check_bound("rate", rate, "[0, 1]")
    axes = check_axes(axes, auto=whole_matrices)

    def keep(weights: Leaves, step: Step, old: Any = None) -> list[Any]:
        if old is None and weights.values:
            raise ValueError(
                "old: keep_norm needs the weights before the update, as in "
                "keep_norm().apply(params, old) and violations(params, keep_norm(), "
                "old=old)"
            )
        before = beside(weights, old, "old", "keep_norm", "new weights")
        where = axes_of(weights, axes)
        of = norms_of(weights.values, where)
        share = rates.at(step)
        factors = map_units(
            lambda norm, old_norm, leaf: factor_onto(
                old_norm, norm, rates.fit(share, norm, leaf)
            ),
            of,
            norms_of(before, where),
            weights.each,
        )
        return rescaled_weights(weights.values, factors)

    return projection(
        "clipjax.keep_norm",
        keep,
        scheduled=rates.scheduled,
        axes_of=lambda weights: axes_of(weights, axes),
        needs=("old",),
        # Factors near to 1 would not change weights that are rounded to 16 bits.
        unrounded=True,
    )


def _rescaling(
    name: str,
    axes: Any,
    limits: Sequence[CheckedBound],
    factor: Callable[..., jax.Array],
    rates: Sequence[CheckedBound] = (),
) -> Projection:
    """Make the projection that multiplies units by `factor(norms, dtype, *limits)`.

    The rates come last among the arguments of `factor`. A rate is the same for all
    leaves, so it chooses none, as a mapping of limits does.
    """
    axes = check_axes(axes, auto=fan_in_of_matrices)
    arguments = [*limits, *rates]

    def where_in(weights: Leaves) -> list[Any]:
        return axes_of(weights, axes, are_given(limits, weights))

    def rescale_units(weights: Leaves, step: Step) -> list[Any]:
        where = where_in(weights)
        if len(limits) == 2:
            low, high = limits
            changed = [not isinstance(reduced, Skip) for reduced in where]
            check_order_by_path(low, high, weights, changed)

        def factor_of(norm: jax.Array, leaf: Any, *now: Any) -> jax.Array:
            pairs = zip(arguments, now, strict=True)
            fitted = [each.fit(value, norm, leaf) for each, value in pairs]
            return factor(norm, leaf.value.dtype, *fitted)

        of = norms_of(weights.values, where)
        now = [each.of(weights, step) for each in arguments]
        factors = map_units(factor_of, of, weights.each, *now)
        return rescaled_weights(weights.values, factors)

    scheduled = any(each.scheduled for each in arguments)
    return projection(name, rescale_units, scheduled=scheduled, axes_of=where_in)


@functools.partial(jax.jit, static_argnames="dtype")
def _factor_between(
    norm: jax.Array, dtype: DType, low: Any, high: Any, rate: Any
) -> jax.Array:
    """Return 1 between two bounds, else what takes a norm `rate` of the way to them.

    A unit that was brought up to `low` ends a margin or two below it. It stays as it
    is, but has the derivative of what brings it there: of two equal bounds, all units
    are at `low`. A norm of 0 has no direction to grow in.
    """
    high = jnp.asarray(high, norm.dtype)
    low = jnp.minimum(jnp.asarray(low, norm.dtype), high)
    rate = jnp.minimum(jnp.asarray(rate, norm.dtype), 1)
    is_at_low = (norm >= least_inside(low, dtype)) & (norm <= low) & (norm > 0)
    is_between = ((norm > low) & (norm <= high)) | (norm == 0)
    # Not jnp.clip, whose derivative at equal numbers is a mean of theirs.
    nearest = (1 - margin(dtype)) * jnp.where(norm > high, high, low)
    target = rate * nearest + (1 - rate) * norm
    factor = quotient_or_1(is_between, target, norm)
    return jnp.where(is_at_low, 1 + (factor - lax.stop_gradient(factor)), factor)
