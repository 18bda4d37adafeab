"""Bounds on each leaf or unit that follow its own past norms."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, SupportsIndex, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clipjax import _checks
from clipjax._core import bounds, clipping, norms, transformation, trees, units
from clipjax._core.aliases import Scalar, Tree
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
    """Clip the norm of each leaf, or unit, to a little more than its moving average.

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
    relative_bound_at = bounds.as_schedule(
        "relative_bound", relative_bound, scalar=True
    )
    max_norm_at = bounds.as_schedule("max_norm", max_norm, scalar=True)
    decay = _checks.check_number("decay", decay, "[0, 1)")
    warm = _checks.check_count("warmup_steps", warmup_steps, 0)
    _checks.check_word("warmup_norms", warmup_norms, get_args(WarmupNorms))
    axes = units.check_axes(axes)

    def remember(params: Tree) -> AdagcMemory:
        # A box of Flax may have a sharding, which is not that of the norms.
        leaves, rebuild = trees.leaves_of(_unboxed(params))
        gammas: list[Any] = [None] * len(leaves)
        for each in units.of_tree(params, axes):
            value = each.leaf.value
            if isinstance(value, jax.ShapeDtypeStruct):
                value = jnp.zeros_like(value)
            n = norms.norm(value, each.axes)
            if trees.is_in_host(n):
                n = jax.device_put(n, jax.memory.Space.Device)
            # No norm is below 0: infinity, sharded as the norms. `jnp.full` would need
            # to be told their mesh.
            gammas[each.place] = jnp.where(n < 0, n, jnp.inf)
        return AdagcMemory(rebuild(gammas), jnp.zeros((), np.int32))

    def act(
        updates: Tree, params: Tree, step: Scalar | None, memory: AdagcMemory
    ) -> Any:
        found = units.of_tree(updates, axes)
        unit_norms = units.norms_of(found)
        gammas = jax.tree.leaves(memory.gammas)
        _check_units(found, unit_norms, gammas)
        # The metrics are computed of all leaves together: the share of each would be
        # another kernel to compile.
        pairs = list(zip(unit_norms, gammas, strict=True))
        all_norms = _stacked(unit_norms)
        all_gammas = _stacked([gamma.astype(n.dtype) for n, gamma in pairs])
        total = norms.tree_norm(all_norms)
        now = _Now(
            memory.steps < warm,
            total,
            jnp.asarray(max_norm_at(step), total.dtype),
            jnp.asarray(relative_bound_at(step), total.dtype),
        )

        factors = []
        new_gammas = []
        for each, (n, gamma) in zip(found, pairs, strict=True):
            bound = _bound(n, gamma, now)
            factors.append(_factor(n, bound, now, each.leaf.value.dtype))
            entering = n
            if warmup_norms == "after":
                entering = _clipped(n, bound, now)
            new_gammas.append(_next_gamma(gamma, bound, entering, now, 1 - decay))

        all_bounds = [
            _bound(n, gamma, now)
            for n, gamma in zip(all_norms, all_gammas, strict=True)
        ]
        stacks = list(zip(all_norms, all_bounds, strict=True))
        scales = [_factor(n, bound, now) for n, bound in stacks]
        after = norms.tree_norm(_clipped(n, bound, now) for n, bound in stacks)
        metrics = clipping.metrics_of(total, clipping.smallest_scale(scales), after)
        least = norms.smallest(all_bounds).astype(total.dtype)
        metrics["threshold"] = jnp.where(now.warming, now.cap, least)
        steps = if_counted(total, optax.safe_increment(memory.steps), memory.steps)
        treedef = jax.tree.structure(memory.gammas)
        new_memory = AdagcMemory(jax.tree.unflatten(treedef, new_gammas), steps)
        return clipping.rescaled(updates, found, factors), metrics, new_memory

    return transformation.with_metrics("adagc", act, remember)


class _Now(NamedTuple):
    """What all leaves share at a step."""

    warming: Scalar
    total: Scalar  # the norm of all leaves
    cap: Scalar  # its bound in the warm-up
    ratio: Scalar  # the relative bound


@jax.jit
def _bound(n: jax.Array, gamma: jax.Array, now: _Now) -> jax.Array:
    """Return the bound after the warm-up; infinity for an unknown gamma."""
    ratio = now.ratio.astype(n.dtype)
    # Infinity times 0 would be NaN in derivatives.
    finite = (gamma < jnp.inf) & (ratio < jnp.inf)
    usual = jnp.where(gamma < jnp.inf, gamma, n)
    return jnp.where(finite, jnp.where(finite, ratio, 1) * usual, jnp.inf)


@functools.partial(jax.jit, static_argnames="dtype")
def _factor(n: jax.Array, bound: jax.Array, now: _Now, dtype: Any = None) -> jax.Array:
    """Return the factor of a leaf, in the warm-up that of all leaves."""
    most = jnp.where(now.warming, now.cap.astype(n.dtype), bound)
    seen = jnp.where(now.warming, now.total.astype(n.dtype), n)
    return clipping.factor_to(most, seen, dtype)


@jax.jit
def _clipped(n: jax.Array, bound: jax.Array, now: _Now) -> jax.Array:
    """Return the norm after the clip."""
    in_warmup = n * clipping.factor_to(now.cap, now.total).astype(n.dtype)
    return jnp.where(now.warming, in_warmup, jnp.minimum(n, bound))


@jax.jit
def _next_gamma(
    gamma: jax.Array, bound: jax.Array, n: jax.Array, now: _Now, rate: Any
) -> jax.Array:
    """Return gamma after a norm: the smallest in the warm-up, then the average."""
    entering = jnp.where(now.warming, n, jnp.minimum(n, bound))
    usual = jnp.where(gamma < jnp.inf, gamma, entering)
    average = usual + rate * (entering - usual)
    new = jnp.where(now.warming, jnp.minimum(gamma, entering), average)
    return if_counted(now.total, jnp.where(entering > 0, new, gamma), gamma)


def _stacked(each: Sequence[jax.Array]) -> list[jax.Array]:
    """Stack the single numbers among arrays, by dtype.

    XLA would take three times as long to compile a step with 1,000 apart (JAX 0.12).
    """
    singles: dict[Any, list[jax.Array]] = {}
    for x in each:
        if x.size == 1:
            singles.setdefault(x.dtype, []).append(x.reshape(()))
    return [*map(jnp.stack, singles.values()), *(x for x in each if x.size != 1)]


def _check_units(
    found: Sequence[units.LeafUnits],
    unit_norms: Sequence[jax.Array],
    gammas: Sequence[jax.Array],
) -> None:
    """Raise an error if the state was made for other leaves or units."""
    if len(found) != len(gammas):
        raise ValueError(
            f"updates: adagc got {len(found)} leaves to clip; the parameters given to "
            f"init had {len(gammas)}"
        )
    for each, n, gamma in zip(found, unit_norms, gammas, strict=True):
        if n.shape != gamma.shape:
            raise ValueError(
                f"updates: adagc got {each.leaf}, whose norms have shape {n.shape}; "
                f"those of the parameters given to init had {gamma.shape}"
            )


def _unboxed(tree: Tree) -> Tree:
    """Return a tree with arrays in place of Flax's boxes around them.

    Inside `optax.masked` boxes may be empty.
    """

    def content(node: Any) -> Any:
        leaves = jax.tree.leaves(node) if trees.is_box(node) else [node]
        return leaves[0] if len(leaves) == 1 else leaves

    return jax.tree.map(content, tree, is_leaf=trees.is_box)
