"""The projection onto the norms that weights had before the update."""

from __future__ import annotations

from typing import Any

from clipjax._core.aliases import AutoAxes, Bound, Step
from clipjax._core.bounds import check_bound
from clipjax._core.clip import factor_onto
from clipjax._core.leaves import Leaves, beside
from clipjax._core.norms import axes_of, check_axes, map_units, norms_of, whole_matrices
from clipjax.weights.projection import (
    Projection,
    projection,
    rescaled_weights,
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
    steps. In a chain with bfloat16 weights, it may drift by tens of percent over 1,000
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
