"""Bounds on each leaf or unit that follow its own past norms."""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, SupportsIndex, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clipjax import _checks
from clipjax._core import bounds, clipping, norms, transformation, trees, units
from clipjax.gradients.history import if_counted

WarmupNorms = Literal["before", "after"]


class AdagcMemory(NamedTuple):
    """What :func:`adagc` remembers."""

    # A tree like the parameters, with a float array for each leaf that has units: of
    # the leaf's shape with 1 for the reduced axes, or (). It is infinite until a norm
    # is known.
    gammas: Any
    steps: jax.Array  # int32: how many steps had a finite norm above 0


def adagc(
    relative_bound: bounds.Bound = 1.04,
    *,
    decay: bounds.Number = 0.99,
    warmup_steps: SupportsIndex = 100,
    max_norm: bounds.Bound = 1.0,
    warmup_norms: WarmupNorms = "before",
    axes: units.Axes = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of each leaf, or unit along `axes`, to a little more than its moving average gamma.

    In the warm-up, the norm of all leaves is clipped to `max_norm`, and gamma is the
    smallest norm so far. After it, each leaf is clipped to relative_bound * gamma, and
    with n, its norm after the clip, gamma <- decay * gamma + (1 - decay) * n. A norm of
    0 does not change gamma. So where norms stay at a higher level, gamma rises by (1 -
    decay) * (relative_bound - 1) of itself a step: by default 0.04%, or tenfold in
    5,800 steps.

    Args:
      relative_bound: how many times gamma a norm may be: a number, a scalar array or a
        schedule.
      decay: the decay of the moving average, in [0, 1).
      warmup_steps: the length of the warm-up, at least 0. Without one, or after zeros
        alone, the first norm of a leaf is not clipped and becomes its gamma.
      max_norm: the bound in the warm-up: a number, a scalar array or a schedule.
      warmup_norms: whether gamma is the smallest norm "before" or "after" the clip of
        the warm-up.
      axes: the axes that are reduced. None: each leaf has one gamma. Leaves that are
        skipped do not count toward the norm of all leaves.

    Returns:
      A transformation with the metrics of a clip, where `norm` is that of all leaves,
      and `threshold`: `max_norm` in the warm-up, then the smallest bound.

    Raises:
      ValueError: in `update`, there are more or fewer leaves or units than the
        parameters had.

    A leaf that is not finite makes all leaves NaN in the warm-up, and later only
    itself. Such a step changes no gamma.

    With "before" it equals the authors' code for PaddlePaddle, except that theirs has
    one more step of warm-up; with "after" the algorithm in the paper and the authors'
    code for Megatron, except that in theirs a leaf whose gradient is 0 once in the
    warm-up stays 0 forever.

    References:
      Wang et al., 2025, AdaGC: enhancing LLM pretraining stability via adaptive
      gradient clipping, arXiv:2502.11034.

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
    ratio_at = bounds.as_schedule("relative_bound", relative_bound, scalar=True)
    cap_at = bounds.as_schedule("max_norm", max_norm, scalar=True)
    decay = _checks.check_number("decay", decay, "[0, 1)")
    warm = _checks.check_count("warmup_steps", warmup_steps, 0)
    if warmup_norms not in get_args(WarmupNorms):
        raise ValueError(
            f"warmup_norms must be one of {get_args(WarmupNorms)}, got "
            f"{bounds.short_repr(warmup_norms)}"
        )
    axes = units.check_axes(axes)

    def remember(params: Any) -> AdagcMemory:
        # A box of Flax may have a sharding, which is not that of the norms.
        leaves, rebuild = trees.leaves_of(_unboxed(params))
        gammas: list[Any] = [None] * len(leaves)
        found = units.of_tree(params, axes)
        for each, n in zip(found, units.norms_of(found), strict=True):
            # No norm is below 0: infinity, sharded as the norms. `jnp.full` would need
            # to be told their mesh.
            gammas[each.place] = jnp.where(n < 0, n, jnp.inf)
        return AdagcMemory(rebuild(gammas), jnp.zeros((), np.int32))

    def act(updates: Any, params: Any, step: Any, memory: AdagcMemory) -> Any:
        found = units.of_tree(updates, axes)
        sizes, gammas, steps = (
            units.norms_of(found),
            jax.tree.leaves(memory.gammas),
            memory.steps,
        )
        _check_units(found, sizes, gammas)
        # The metrics are computed of all leaves together: the share of each would be
        # another kernel to compile.
        same = (gamma.astype(n.dtype) for n, gamma in zip(sizes, gammas, strict=True))
        all_sizes, all_gammas = _stacked(sizes), _stacked(list(same))
        warming, total = steps < warm, norms.tree_norm(all_sizes)
        cap, ratio = (jnp.asarray(at(step), total.dtype) for at in (cap_at, ratio_at))
        follow = functools.partial(
            _follow,
            warming=warming,
            total=total,
            cap=cap,
            ratio=ratio,
            rate=1 - decay,
            after=warmup_norms == "after",
        )

        factors, new_gammas = [], []
        for each, n, gamma in zip(found, sizes, gammas, strict=True):
            _, most, seen, _, new = follow(n, gamma)
            factors.append(clipping.factor_to(most, seen, each.leaf.value.dtype))
            new_gammas.append(new)

        limits, mosts, all_seen, after, _ = (
            zip(*map(follow, all_sizes, all_gammas), strict=True) if found else [()] * 5
        )
        scales = list(map(clipping.factor_to, mosts, all_seen))
        metrics = clipping.metrics_of(
            total, clipping.smallest(scales), norms.tree_norm(after)
        )
        least = -norms.largest((-bound for bound in limits), empty=-jnp.inf)
        metrics["threshold"] = jnp.where(warming, cap, least.astype(cap.dtype))
        new_steps = if_counted(total, optax.safe_increment(steps), steps)
        new_memory = AdagcMemory(
            jax.tree.unflatten(jax.tree.structure(memory.gammas), new_gammas), new_steps
        )
        return clipping.rescaled(updates, found, factors), metrics, new_memory

    return transformation.with_metrics("adagc", act, remember)


@functools.partial(jax.jit, static_argnames="after")
def _follow(
    n: jax.Array,
    gamma: jax.Array,
    *,
    warming: Any,
    total: Any,
    cap: Any,
    ratio: Any,
    rate: Any,
    after: bool,
) -> tuple[jax.Array, ...]:
    """Return the bound, what is compared with what, the norm after the clip, and the next gamma."""
    total, cap, ratio = (x.astype(n.dtype) for x in (total, cap, ratio))
    is_known, is_finite = (
        gamma < jnp.inf,
        ratio < jnp.inf,
    )  # infinity times 0 would be NaN in derivatives
    usual = jnp.where(is_known, gamma, n)
    bound = jnp.where(
        is_known & is_finite, jnp.where(is_finite, ratio, 1) * usual, jnp.inf
    )
    most, seen = jnp.where(warming, cap, bound), jnp.where(warming, total, n)
    n_after = jnp.where(
        warming, n * clipping.factor_to(cap, total), jnp.minimum(n, bound)
    )
    entering = n_after if after else jnp.where(warming, n, n_after)
    new = jnp.where(
        warming, jnp.minimum(gamma, entering), usual + rate * (entering - usual)
    )
    return (
        bound,
        most,
        seen,
        n_after,
        if_counted(total, jnp.where(entering > 0, new, gamma), gamma),
    )


def _stacked(each: list[jax.Array]) -> list[jax.Array]:
    """Stack the scalars among arrays, by dtype."""
    scalars: dict[Any, list[jax.Array]] = {}
    for x in each:
        if x.ndim == 0:
            scalars.setdefault(x.dtype, []).append(x)
    return [*map(jnp.stack, scalars.values()), *(x for x in each if x.ndim)]


def _check_units(
    found: list[units.LeafUnits], sizes: list[jax.Array], gammas: list[jax.Array]
) -> None:
    """Raise an error if the state was made for other leaves or units than those of the updates."""
    if len(found) != len(gammas):
        raise ValueError(
            f"updates: adagc got {len(found)} leaves to clip; the parameters given to "
            f"init had {len(gammas)}"
        )
    for each, n, gamma in zip(found, sizes, gammas, strict=True):
        if n.shape != gamma.shape:
            raise ValueError(
                f"updates: adagc got {each.leaf}, whose norms have shape {n.shape}; "
                f"those of the parameters given to init had {gamma.shape}"
            )


def _unboxed(tree: Any) -> Any:
    """Return a tree with arrays in place of Flax's boxes around them, which may be empty inside `optax.masked`."""

    def content(node: Any) -> Any:
        leaves = jax.tree.leaves(node)
        return leaves[0] if len(leaves) == 1 else leaves

    return jax.tree.map(
        lambda node: content(node) if trees.is_box(node) else node,
        tree,
        is_leaf=trees.is_box,
    )
