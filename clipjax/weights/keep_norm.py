"""The projection onto the norms that weights had before the update."""

import functools
from typing import Any

import jax

from clipjax._core import bounds, clipping, norms, trees, units
from clipjax._core.aliases import Tree
from clipjax.weights import limits
from clipjax.weights.projection import Projection, rescaled_weights, written


def keep_norm(*, rate: bounds.Bound = 1.0, axes: units.AutoAxes = "auto") -> Projection:
    """Rescale each unit to the norm it had before the update: w * |old| / |w|.

    With :func:`relative_update` in front of the learning rate, in place of weight
    decay: AdamH and MuonH.

    Args:
      rate: the share of the way back to the old norm, from 0 to 1: a number, an array
        that broadcasts to the units, or a schedule.
      axes: the axes that are reduced. "auto": a matrix is one unit; vectors and scalars
        are not changed; rank 3 and more may be stacks of matrices, and are an error.

    Returns:
      A :class:`Projection`: the last link of a chain, or a function of the new and the
      old weights, `keep_norm()(params, old)`.

    Raises:
      ValueError: in a call, `old` is missing, or of another structure or shape.

    A unit whose old norm is 0 goes where the update takes it, and what it reaches is
    kept from then on: leave out what starts at 0, by `axes={"out": clipjax.SKIP, "*":
    "auto"}`.

    The old norm is that of the weights, in no state. Over 100,000 steps in float32 it
    moves by less than 1e-3; as a link in bfloat16 by up to 3% over 1,000, of small
    matrices most: keep float32 weights. A call cannot follow such small steps in
    bfloat16 at all.

    References:
      Wen et al., 2026, Fantastic pretraining optimizers and where to find them II:
      Hyperball optimization, arXiv:2606.16899.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> old = jnp.array([[3.0, 0.0], [0.0, 4.0]])  # of norm 5
      >>> print(clipjax.keep_norm()(2 * old, old))
      [[3. 0.]
       [0. 4.]]
    """
    rates = limits.of_rate(rate)
    name = written(keep_norm, rate=rate, axes=axes)
    axes = units.check_axes(axes, auto=units.whole_matrices)
    units_of = functools.partial(units.of_tree, axes=axes)

    def keep(params: Tree, step: Any, old: Tree = None) -> Tree:
        if old is None and jax.tree.leaves(params):
            raise ValueError(
                "old: keep_norm needs the weights before the update, as in "
                "keep_norm()(params, old) and violations(params, keep_norm(), old=old)"
            )
        old = trees.like("old", "keep_norm", params, old, "new weights")
        before, _ = trees.leaves_of(old)
        found = units_of(params)
        shares = rates.at(params, step)
        factors = []
        for each, norm in zip(found, units.norms_of(found), strict=True):
            kept = norms.norm(before[each.place].value, each.axes)
            fitted = bounds.fit_bound("rate", shares[each.place], norm, each.leaf)
            factors.append(clipping.factor_onto(kept, norm, fitted))
        return rescaled_weights(params, found, factors)

    return Projection(
        name,
        keep,
        needs=("old",),
        scheduled=rates.scheduled,
        units_of=units_of,
        # Factors so near to 1 would not change weights of 16 bits.
        unrounded=True,
    )
