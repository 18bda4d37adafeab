"""Bounds on each leaf that follow the norms of its own past."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

from clipjax._core.arguments import explained, shown
from clipjax._core.axes import is_measured
from clipjax._core.bounds import Bound, bound_at
from clipjax._core.maxima import min_of
from clipjax._core.members import Memory
from clipjax._core.mesh import AxisName, names_of_leaves
from clipjax._core.norms import as_arrays, norm_of, norms_of, wide
from clipjax._core.rescale import Scale, factor_of, rescaled, to_bound
from clipjax._core.stats import Stats
from clipjax._core.trees import Report
from clipjax._core.where import Where
from clipjax.gradients.past import (
    Clipped,
    check_count,
    check_number,
    no_norms,
    one_more,
    remembering,
    round_up,
)

WarmupNorms = Literal["before", "after"]


class AdagcState(NamedTuple):
    """State of :func:`adagc`."""

    adagc: Stats
    threshold: jax.Array  # float: the least bound used at the last step
    gammas: jax.Array  # float (leaves,): the norm that each leaf is used to; infinite while unknown
    taken: jax.Array  # int32: steps taken in so far


@explained
def adagc(
    relative_bound: Bound = 1.04,
    *,
    decay: float = 0.99,
    warmup_steps: int = 100,
    max_norm: Bound = 1.0,
    warmup_norms: WarmupNorms = "before",
    where: Where = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of each leaf to a little more than the moving average of its own clipped norms.

    In the warm-up, the norm of the whole tree is clipped to `max_norm`, and gamma of a leaf is the least
    norm that it had. From then on each leaf is clipped to relative_bound * gamma, and then
    gamma <- decay * gamma + (1 - decay) * its norm after clipping.

    Args:
      relative_bound: how many times gamma a norm may be: a number, a scalar array or a schedule.
      decay: of the moving average, in [0, 1).
      warmup_steps: at least 0. Without a warm-up the first norm of a leaf is its first gamma.
      max_norm: the bound in the warm-up: a number, a scalar array or a schedule.
      warmup_norms: whether gamma takes the least of the norms "before" or "after" the clip of the
        warm-up.
      where: which leaves are clipped, and count: path patterns, a rule or a tree of bools, as in
        :func:`clipjax.box`; the others may hold anything, and pass as they are. None: all.
      axis_name: the mesh axes that split the leaves, in `pmap` and unchecked `shard_map`. Inside a
        checked `shard_map` each leaf's type tells.

    Returns:
      A transformation. `norm` is that of the whole tree; `threshold` is `max_norm` in the warm-up, then
      the least of the leaves' bounds. `gammas` in its state has one entry for each float or complex leaf of
      the parameters, in their order.

    Raises:
      TypeError, ValueError: an argument is no number, or out of range. In `update`: the gradients have
        more or fewer leaves than the parameters had.

    Guarantees: measured in float64, no clipped norm is above its bound; what is inside comes back bit
    for bit. A non-finite entry makes its leaf NaN, in the warm-up the whole tree; it leaves all
    statistics as they are, and is no step of the warm-up. In derivatives, the norms of other steps are
    constants.

    Equals the authors' code: for PaddlePaddle with "before", which has one step of warm-up more, for
    Megatron with "after"; and `pytorch_optimizer.AdaGC` with "after", which has one less. There a leaf
    whose gradient is 0 once in the warm-up, or for long later on, stays 0 for ever, because its gamma
    is 0; here a norm of 0 is not taken into gamma.

    References:
      Wang et al., 2025, AdaGC: enhancing LLM pretraining stability via adaptive gradient clipping,
      arXiv:2502.11034.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.adagc(warmup_steps=1)
      >>> grads = {"a": jnp.array([0.3, 0.4]), "b": jnp.array([0.5])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> clipped, state = tx.update({"a": grads["a"], "b": jnp.array([5.0])}, state)
      >>> print(clipped["a"], f"{clipped['b'][0]:.3f}")
      [0.3 0.4] 0.520
    """
    ratio_of, cap_of = bound_at("relative_bound", relative_bound), bound_at("max_norm", max_norm)
    check_number("decay", decay, 0, 1, below=True)
    check_count("warmup_steps", warmup_steps, 0)
    if warmup_norms not in get_args(WarmupNorms):
        raise ValueError(f"warmup_norms must be one of {get_args(WarmupNorms)}, got {shown(warmup_norms)}")

    def first(params: Any, dtype: Any) -> Memory:
        leaves = sum(is_measured(leaf) for leaf in jax.tree.leaves(as_arrays(params)))
        return jnp.full(leaves, jnp.inf, dtype), no_norms()

    def clip(updates: Any, memory: Memory, step: jax.Array, dtype: Any) -> Clipped:
        gamma, taken = memory
        treedef: Any
        leaves, treedef = jax.tree.flatten(updates)
        places = [i for i, leaf in enumerate(leaves) if is_measured(leaf)]
        if len(places) != len(gamma):
            raise ValueError(
                f"adagc: the updates have {len(places)} float leaves, and the parameters given to init had "
                f"{len(gamma)}"
            )
        names = names_of_leaves(updates, axis_name)
        each = norms_of([(leaves[i],) for i in places], [None] * len(places), 2.0, [names[i] for i in places])
        norms = jnp.stack(each) if each else jnp.zeros(0)
        total = norm_of(norms, None, 2.0)
        warming, cap, at_step = taken < warmup_steps, cap_of(step), ratio_of(step)

        together = to_bound(total, cap)
        for i, (place, norm) in enumerate(zip(places, each, strict=True)):
            alone = to_bound(norm, at_step * jnp.where(gamma[i] < jnp.inf, gamma[i], norm))
            scale = (jnp.where(warming, a, b) for a, b in zip(together, alone, strict=True))
            leaves[place] = rescaled(leaves[place], Scale(*scale))

        # All leaves side by side: hundreds of scalars take long to compile one by one.
        norms, together, at_step = lax.stop_gradient((norms, together, at_step))
        measured = wide(round_up(norms, dtype))
        known = jnp.where(gamma < jnp.inf, gamma, measured)
        bounds = jnp.where(warming, jnp.inf, at_step * known)
        scales = jnp.where(warming, factor_of(together), factor_of(to_bound(norms, bounds)))
        least = jnp.minimum(gamma, measured if warmup_norms == "before" else measured * scales)
        average = wide(decay) * known + (1 - wide(decay)) * jnp.minimum(measured, bounds)
        return Clipped(
            treedef.unflatten(leaves),
            Report(total, min_of(scales, 1), ~jnp.all(scales == 1), norm_of(norms * scales, None, 2.0)),
            jnp.where(warming, cap, min_of(bounds)),
            (jnp.where(measured > 0, jnp.where(warming, least, average), gamma), one_more(taken)),
        )

    return remembering(AdagcState, first, clip, where)
