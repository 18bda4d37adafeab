"""A clip of each leaf, or unit, whose threshold follows its own past norms."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, SupportsIndex, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clipjax._core.aliases import Axes, Bound, DType, Number, Scalar, Step, Tree
from clipjax._core.bounds import check_bound, check_count, check_word, number
from clipjax._core.clip import factor_to, metrics_of, rescaled, smallest_scale
from clipjax._core.door import transformation
from clipjax._core.leaves import Leaves, unboxed
from clipjax._core.norms import (
    axes_of,
    check_axes,
    map_units,
    norms_of,
    present,
    smallest,
    tree_norm,
)
from clipjax._core.states import check_same
from clipjax.gradients.past_norms import average, if_counted

WarmupNorms = Literal["before", "after"]


class AdagcMemory(NamedTuple):
    """What :func:`adagc` remembers."""

    # A tree like the parameters, with an array of floats for each leaf that has units.
    # Its shape is that of the leaf with 1 for the reduced axes, or (). Elements are
    # infinite until a norm is known.
    gammas: Any
    steps: jax.Array  # int32: how many steps had a finite norm above 0


def adagc(
    relative_bound: Bound = 1.04,
    *,
    decay: Number = 0.99,
    warmup_steps: SupportsIndex = 100,
    warmup_max_norm: Bound = 1.0,
    warmup_norms: WarmupNorms = "before",
    axes: Axes = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of each leaf, or unit, to a little more than its moving average.

        in the warm-up:  x * min(1, warmup_max_norm / norm of all leaves)
                         gamma = smallest |x| so far
        after it:        x * n / |x|,  n = min(|x|, relative_bound * gamma)
                         gamma <- decay * gamma + (1 - decay) * n

    Use it for the pretraining of language models when outlier gradients come from
    single layers, whose norms differ by orders of magnitude.

    Args:
      relative_bound: the threshold for |x| / gamma after the warm-up, a scalar `Bound`,
        1.04 by default.
      decay: the decay of the moving average, in [0, 1), 0.99 by default.
      warmup_steps: the number of steps of the warm-up, 100 by default. If it is 0, or
        if all gradients of a leaf were 0 in the warm-up, the first norm of the leaf is
        not clipped and becomes its gamma.
      warmup_max_norm: the threshold for the norm of all leaves in the warm-up, a
        scalar `Bound`, 1.0 by default. It has no effect later.
      warmup_norms: whether the norms that enter gamma in the warm-up are those "before"
        (the default) or "after" the clip of the warm-up.
      axes: the axes that are reduced, as `Axes`. None, the default, gives each leaf one
        gamma. Leaves that are skipped do not count toward the norm of all leaves.

    Returns:
      A gradient transformation with the metrics of a clip, where `norm` is the norm of
      all leaves, and `threshold`: `warmup_max_norm` in the warm-up, then the smallest
      threshold of a leaf or unit.

    Raises:
      ValueError: `warmup_norms` is not one of the two words; in `update`, there are
        more or fewer leaves or units than the parameters had.

    If an element is not finite, all leaves become NaN in the warm-up. After the
    warm-up, only the leaf of this element becomes NaN. Neither such a step nor a norm
    of 0 changes gamma. If the norms rise to a higher level and stay there, gamma grows
    by the fraction (1 - decay) * (relative_bound - 1) at each step. With the defaults,
    this is 0.04% per step, or a factor of ten in about 5,700 steps.

    `adagc` with "before" equals the authors' code for PaddlePaddle, except that their
    warm-up has one more step. With "after", it equals the algorithm in the paper and
    the authors' code for Megatron, except that in their code a leaf whose gradient is 0
    once in the warm-up stays 0 forever.

    References:
      Wang et al., 2025, AdaGC: enhancing LLM pretraining stability via adaptive
      gradient clipping, arXiv:2502.11034.

    See Also:
      :func:`zclip` clips all leaves by one norm; :func:`clip_by_norm` has a fixed
      threshold.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> tx = clipjax.adagc(warmup_steps=1)
      >>> grads = {"a": jnp.array([0.3, 0.4]), "b": jnp.array([0.5])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> grads["b"] = jnp.array([5.0])
      >>> clipped, state = tx.update(grads, state)
      >>> print(clipped["a"], f"{clipped['b'][0]:.3f}")
      [0.3 0.4] 0.520
    """
    relative = check_bound("relative_bound", relative_bound, scalar=True)
    cap = check_bound("warmup_max_norm", warmup_max_norm, scalar=True)
    decay = number("decay", decay, "[0, 1)")
    warm = check_count("warmup_steps", warmup_steps, 0)
    check_word("warmup_norms", warmup_norms, get_args(WarmupNorms))
    axes = check_axes(axes)

    def remember(params: Leaves) -> AdagcMemory:
        known = [
            jnp.zeros_like(x) if isinstance(x, jax.ShapeDtypeStruct) else x
            for x in params.values
        ]
        norms = norms_of(known, axes_of(params, axes))
        # Infinities in the sharding of the norms; `jnp.full` would need to be told it.
        gammas = map_units(lambda n: jnp.where(n < 0, n, jnp.inf), norms)
        # A box of Flax may have a sharding, which does not fit the norms.
        tree = unboxed(params.rebuild(gammas))
        return AdagcMemory(tree, jnp.zeros((), np.int32))

    def act(
        updates: Leaves, params: Tree, step: Step, memory: AdagcMemory, /, **_: Any
    ) -> Any:
        of = norms_of(updates.values, axes_of(updates, axes))
        unit_norms = present(of)
        gammas = jax.tree.leaves(memory.gammas)
        treedef: Any = jax.tree.structure(memory.gammas)
        shapes = [[x.shape for x in each] for each in (gammas, unit_norms)]
        check_same("updates of adagc", *(f"norms of shapes {each}" for each in shapes))
        # The metrics are computed from all leaves together, since a part for each leaf
        # would be another kernel to compile. The factors are not: XLA on a CPU would
        # compute the joined numbers anew in each leaf (JAX 0.12: 33 s in place of 7 s
        # to compile 300 leaves).
        pairs = list(zip(unit_norms, gammas, strict=True))
        all_norms = _stacked(unit_norms)
        all_gammas = _stacked([gamma.astype(n.dtype) for n, gamma in pairs])
        total = tree_norm(all_norms)
        now = _Now(
            memory.steps < warm,
            total,
            jnp.asarray(cap.at(step), total.dtype),
            jnp.asarray(relative.at(step), total.dtype),
        )

        bounds = [_bound(n, gamma, now) for n, gamma in pairs]
        new_gammas = []
        for (n, gamma), bound in zip(pairs, bounds, strict=True):
            entering = _clipped(n, bound, now) if warmup_norms == "after" else n
            new_gammas.append(_next_gamma(gamma, bound, entering, now, 1 - decay))
        bound_of = iter(bounds)
        factors = map_units(
            lambda n, x: _factor(n, next(bound_of), now, x.dtype), of, updates.values
        )

        all_bounds = [
            _bound(n, gamma, now)
            for n, gamma in zip(all_norms, all_gammas, strict=True)
        ]
        stacks = list(zip(all_norms, all_bounds, strict=True))
        scales = [_factor(n, bound, now) for n, bound in stacks]
        after = tree_norm(_clipped(n, bound, now) for n, bound in stacks)
        metrics = metrics_of(total, smallest_scale(scales), after)
        least = smallest(all_bounds).astype(total.dtype)
        metrics["threshold"] = jnp.where(now.warming, now.cap, least)
        steps = if_counted(total, memory.steps, optax.safe_increment(memory.steps))
        new_memory = AdagcMemory(treedef.unflatten(new_gammas), steps)
        values = rescaled(updates.values, factors)
        return updates.rebuild(values), metrics, new_memory

    return transformation("adagc", act, remember)


class _Now(NamedTuple):
    """What all leaves share at a step."""

    warming: Scalar
    total: Scalar  # the norm of all leaves
    cap: Scalar  # the threshold for `total` in the warm-up
    ratio: Scalar  # the relative bound


@jax.jit
def _bound(n: jax.Array, gamma: jax.Array, now: _Now) -> jax.Array:
    """Return the threshold after the warm-up; infinity where gamma is not known."""
    ratio = now.ratio.astype(n.dtype)
    # Infinity times 0 would be NaN in derivatives.
    finite = (gamma < jnp.inf) & (ratio < jnp.inf)
    usual = jnp.where(gamma < jnp.inf, gamma, n)
    return jnp.where(finite, jnp.where(finite, ratio, 1) * usual, jnp.inf)


@functools.partial(jax.jit, static_argnames="dtype")
def _factor(
    n: jax.Array, bound: jax.Array, now: _Now, dtype: DType = None
) -> jax.Array:
    """Return the factor of a leaf; in the warm-up it is the factor of all leaves."""
    most = jnp.where(now.warming, now.cap.astype(n.dtype), bound)
    seen = jnp.where(now.warming, now.total.astype(n.dtype), n)
    return factor_to(most, seen, dtype)


@jax.jit
def _clipped(n: jax.Array, bound: jax.Array, now: _Now) -> jax.Array:
    """Return the norm after the clip."""
    in_warmup = n * factor_to(now.cap, now.total).astype(n.dtype)
    return jnp.where(now.warming, in_warmup, jnp.minimum(n, bound))


@jax.jit
def _next_gamma(
    gamma: jax.Array, bound: jax.Array, n: jax.Array, now: _Now, rate: Any
) -> jax.Array:
    """Return gamma after a norm: the smallest norm in the warm-up, then the average."""
    entering = jnp.where(now.warming, n, jnp.minimum(n, bound))
    usual = jnp.where(gamma < jnp.inf, gamma, entering)
    usual = average(usual, entering, rate)
    new = jnp.where(now.warming, jnp.minimum(gamma, entering), usual)
    return if_counted(now.total, gamma, jnp.where(entering > 0, new, gamma))


def _stacked(each: Sequence[jax.Array]) -> list[jax.Array]:
    """Return arrays with their single numbers joined, one array for each dtype.

    XLA would take three times as long to compile a step with 1,000 separate numbers
    (JAX 0.12).
    """
    singles: dict[Any, list[jax.Array]] = {}
    for x in each:
        if x.size == 1:
            singles.setdefault(x.dtype, []).append(x.reshape(()))
    return [
        *map(jnp.stack, singles.values()),
        *(x for x in each if x.size != 1),
    ]
