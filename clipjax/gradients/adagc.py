"""Bounds on each leaf or unit that follow its own past norms."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, SupportsIndex, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from clipjax._core.aliases import Axes, Bound, DType, Number, Scalar, Step, Tree
from clipjax._core.bounds import limit
from clipjax._core.checks import check_count, check_number, check_word
from clipjax._core.clip import factor_to, metrics_of, rescaled, smallest_scale
from clipjax._core.door import transformation
from clipjax._core.leaves import Leaves, unboxed
from clipjax._core.norms import smallest, tree_norm
from clipjax._core.states import check_same
from clipjax._core.units import axes_of, check_axes, map_units, norms_of, present
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
    relative_bound: Bound = 1.04,
    *,
    decay: Number = 0.99,
    warmup_steps: SupportsIndex = 100,
    max_norm: Bound = 1.0,
    warmup_norms: WarmupNorms = "before",
    axes: Axes = None,
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
    relative = limit("relative_bound", relative_bound, scalar=True)
    cap = limit("max_norm", max_norm, scalar=True)
    decay = check_number("decay", decay, "[0, 1)")
    warm = check_count("warmup_steps", warmup_steps, 0)
    check_word("warmup_norms", warmup_norms, get_args(WarmupNorms))
    axes = check_axes(axes)

    def remember(params: Leaves) -> AdagcMemory:
        known = [
            jnp.zeros_like(x) if isinstance(x, jax.ShapeDtypeStruct) else x
            for x in params.values
        ]
        gammas = map_units(_infinity_like, norms_of(known, axes_of(params, axes)))
        # A box of Flax may have a sharding, which is not that of the norms.
        tree = unboxed(params.rebuild(gammas))
        return AdagcMemory(tree, jnp.zeros((), np.int32))

    def act(
        updates: Leaves, params: Tree, step: Step, memory: AdagcMemory, **_: Any
    ) -> Any:
        of = norms_of(updates.values, axes_of(updates, axes))
        unit_norms = present(of)
        gammas = jax.tree.leaves(memory.gammas)
        treedef: Any = jax.tree.structure(memory.gammas)
        check_same("updates of adagc", *_shapes(gammas, unit_norms))
        # The metrics are computed of all leaves together: a part for each leaf would be
        # another kernel to compile.
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
        steps = if_counted(total, optax.safe_increment(memory.steps), memory.steps)
        new_memory = AdagcMemory(treedef.unflatten(new_gammas), steps)
        return rescaled(updates.values, factors), metrics, new_memory

    return transformation("adagc", act, remember)


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
def _factor(
    n: jax.Array, bound: jax.Array, now: _Now, dtype: DType = None
) -> jax.Array:
    """Return the factor of a leaf, in the warm-up that of all leaves."""
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


def _shapes(*each: Sequence[jax.Array]) -> list[str]:
    """Return the shapes of gammas and of norms, as an error shows them."""
    return [f"norms of shapes {[x.shape for x in arrays]}" for arrays in each]


def _infinity_like(norms: jax.Array) -> jax.Array:
    """Return infinities, sharded as norms, on the device, in a buffer of their own.

    `jnp.full` would need to be told the mesh.
    """
    if jax.typeof(norms).memory_space == jax.memory.Space.Host:
        norms = jax.device_put(norms, jax.memory.Space.Device)
    return jnp.where(norms < 0, norms, jnp.inf)
