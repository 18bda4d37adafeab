"""Bounds on each leaf, or on each unit, that follow the norms of its own past."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

from clipjax._core.arguments import explained, shown
from clipjax._core.axes import Axes, Reduced, Skip, check_axes, resolve_axes
from clipjax._core.bounds import Bound, bound_at
from clipjax._core.members import Memory
from clipjax._core.mesh import AxisName, is_spread, names_of_units, spec_leaves, varying
from clipjax._core.norms import as_arrays, in_float64, norm_of, norms_of, wide
from clipjax._core.paths import Path, leaves_with_paths
from clipjax._core.rescale import Scale, factor_of, rescale, to_bound
from clipjax._core.side_by_side import side_by_side
from clipjax._core.stats import Stats
from clipjax._core.trees import Unit, decide, for_each, joined, least_of, measure_units, report_of, units_of
from clipjax._core.where import Where
from clipjax.gradients.past import (
    Clipped,
    check_count,
    check_leaves,
    check_number,
    leaves_of,
    no_norms,
    no_threshold,
    one_more,
    remembering,
    round_up,
)

WarmupNorms = Literal["before", "after"]


class AdagcState(NamedTuple):
    """State of :func:`adagc`."""

    adagc: Stats
    threshold: jax.Array  # float: the least bound used at the last step
    # The norm that each leaf is used to, float (leaves,), infinite while unknown. With `axes` a tuple of an
    # array for each leaf that has units, of its shape with the reduced axes as 1.
    gammas: Any
    taken: jax.Array  # int32: steps taken in so far


@explained
def adagc(
    relative_bound: Bound = 1.04,
    *,
    decay: float = 0.99,
    warmup_steps: int = 100,
    max_norm: Bound = 1.0,
    warmup_norms: WarmupNorms = "before",
    axes: Axes = None,
    specs: Any = None,
    where: Where = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip the norm of each leaf to a little more than the moving average of its own clipped norms.

    In the warm-up, the norm of the whole tree is clipped to `max_norm`, and gamma of a leaf is the least
    norm that it had. From then on each leaf is clipped to relative_bound * gamma, and then
    gamma <- decay * gamma + (1 - decay) * its norm after clipping. With `axes`, each unit is what a leaf is
    without: layers that `nn.scan` stacks in leaves (layers, in, out) follow their own past with
    `axes={"*kernel": (1, 2), "*bias": 1}`.

    Args:
      relative_bound: how many times gamma a norm may be: a number, a scalar array or a schedule.
      decay: of the moving average, in [0, 1).
      warmup_steps: at least 0. Without a warm-up the first norm of a leaf is its first gamma.
      max_norm: the bound in the warm-up: a number, a scalar array or a schedule.
      warmup_norms: whether gamma takes the least of the norms "before" or "after" the clip of the
        warm-up.
      axes: the axes that are reduced, as in :func:`clip_by_norm`: those whose entries share a norm, and a
        gamma. None: the whole leaf. Leaves that are left alone, by `clipjax.SKIP` or as no pattern matches
        them, are so in the warm-up as well, and do not count in its norm.
      specs: inside `shard_map`, the `PartitionSpec` tree of the updates, needed for units of leaves that
        are split. `gammas` of a leaf is split as the leaf is, but for its reduced axes: of a leaf of
        `P("pipe", None, "model")` with axes (1, 2) it has `P("pipe", None, None)`.
      where: which leaves are clipped, and count: path patterns, a rule or a tree of bools, as in
        :func:`clipjax.box`; the others may hold anything, and pass as they are. None: all.
      axis_name: the mesh axes that split the leaves, in `pmap` and unchecked `shard_map`. Inside a
        checked `shard_map` each leaf's type tells.

    Returns:
      A transformation. `norm` is that of the whole tree; `threshold` is `max_norm` in the warm-up, then
      the least of the leaves' or units' bounds. `gammas` in its state has one entry for each float or complex
      leaf of the parameters, in their order; with `axes` an array for each leaf that has units, of the leaf's
      shape with the reduced axes as 1 (of shape () where they are None).

    Raises:
      TypeError, ValueError: an argument is no number, or out of range; `axes` are no axes. In `init`: an axis
        that a leaf does not have, a pattern that matches no leaf. In `update`: the gradients have
        more or fewer leaves or units than the parameters had; inside `shard_map` also where `gammas` is
        not split as the leaf is.

    Guarantees: measured in float64, no clipped norm is above its bound; what is inside comes back bit
    for bit. A non-finite entry makes its leaf or unit NaN, in the warm-up the whole tree; it leaves all
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
    rule = check_axes(axes)
    check_number("decay", decay, 0, 1, below=True)
    check_count("warmup_steps", warmup_steps, 0)
    if warmup_norms not in get_args(WarmupNorms):
        raise ValueError(f"warmup_norms must be one of {get_args(WarmupNorms)}, got {shown(warmup_norms)}")

    def first(params: Any, dtype: Any) -> Memory:
        gammas: Any = jnp.full(leaves_of(params), jnp.inf, dtype)
        if rule is not None:
            gammas = tuple(_unknown(*leaf, dtype) for leaf in _with_units(params, rule, specs))
        return no_threshold(dtype), gammas, no_norms()

    def clip(updates: Any, memory: Memory, step: jax.Array, dtype: Any) -> Clipped:
        _, gammas, taken = memory
        treedef: Any
        leaves, treedef = jax.tree.flatten(updates)
        units = units_of(updates, rule, specs, axis_name)
        norms = measure_units(units)
        check_leaves("adagc", len(units), len(gammas))
        if rule is not None:
            _check_units(units, norms, gammas)
        each = [for_each(norm, gamma) for norm, gamma in zip(norms, gammas, strict=True)]

        total, cap, ratio = _together(norms, units), cap_of(step), ratio_of(step)
        warming = taken < warmup_steps
        together = to_bound(total, cap)
        columns = [[for_each(norm, x) for norm in norms] for x in (ratio, warming, *together)]
        _, scales = decide(lambda *_: (_scale_of, [each, *columns]), units, norms)
        for unit, scale in zip(units, scales, strict=True):
            leaves[unit.position] = rescale(unit.leaf, scale)

        if rule is None:  # all leaves side by side: hundreds of scalars take long to compile one by one
            norms, each, units = [jnp.stack(norms) if norms else jnp.zeros(0)], [gammas], units[:1]
        seen = warmup_norms == "after"
        now = lax.stop_gradient((norms, each, ratio, warming, together, wide(decay)))
        found = _follow(dtype, seen, *now)
        known, bounds = (tuple(each[i] for each in found) for i in (0, 1))
        threshold = jnp.where(warming, cap, least_of(bounds, tuple(unit.over for unit in units)))
        scales = [scale for *_, scale in found]
        factors = map(factor_of, scales)
        after = (
            _together([norm * x for norm, x in zip(now[0], factors, strict=True)], units) if units else total
        )
        report = report_of(now[0], scales, units)._replace(norm=total, after=after)
        return Clipped(
            treedef.unflatten(leaves),
            report,
            (round_up(threshold, dtype), known[0] if rule is None else known, one_more(taken)),
        )

    return remembering(AdagcState, first, clip, where)


def _scale_of(
    norm: jax.Array, gamma: jax.Array, ratio: jax.Array, warming: jax.Array, *together: jax.Array
) -> Scale:
    """What brings a norm to its own bound, or in the warm-up all norms to theirs."""
    alone = to_bound(norm, ratio * jnp.where(gamma < jnp.inf, gamma, norm))
    return Scale(*(jnp.where(warming, a, b) for a, b in zip(together, alone, strict=True)))


@in_float64
@functools.partial(jax.jit, static_argnums=(0, 1))
def _follow(
    dtype: Any,
    clipped: bool,
    norms: list[jax.Array],
    gammas: list[jax.Array],
    ratio: jax.Array,
    warming: jax.Array,
    together: Scale,
    decay: jax.Array,
) -> list[tuple[jax.Array, jax.Array, Scale]]:
    """The next gammas, in the warm-up of norms that are `clipped` or not; the bounds after it; and scales."""

    def follow(norm: jax.Array, gamma: jax.Array) -> tuple[jax.Array, jax.Array, Scale]:
        measured = wide(round_up(norm, dtype))
        known = jnp.where(gamma < jnp.inf, gamma, measured)
        bound = ratio * known
        average = decay * known + (1 - decay) * jnp.minimum(measured, bound)
        least = jnp.minimum(gamma, measured * factor_of(together) if clipped else measured)
        new = jnp.where(measured > 0, jnp.where(warming, least, average), gamma)
        return new, bound, _scale_of(norm, known, ratio, warming, *together)

    return side_by_side(follow, norms, gammas)


def _together(norms: Sequence[jax.Array], units: Sequence[Unit]) -> jax.Array:
    """The norm of all units of all leaves, on all devices."""
    if any(unit.over or is_spread(norm) for unit, norm in zip(units, norms, strict=True)):
        over = [unit.over for unit in units]
        norms = norms_of([(norm,) for norm in norms], [None] * len(units), 2.0, over)
    return norm_of(joined(norms) if norms else jnp.zeros(0), None, 2.0)


def _with_units(params: Any, rule: Axes, specs: Any) -> Iterator[tuple[Path, Any, Reduced, Any]]:
    """The path of each leaf that has units, the leaf, its reduced axes and its spec."""
    tree = as_arrays(params)
    for (path, leaf), reduced, spec in zip(
        leaves_with_paths(tree), resolve_axes(rule, tree), spec_leaves(specs, tree), strict=True
    ):
        if not isinstance(reduced, Skip):
            yield path, leaf, reduced, spec


def _unknown(path: Path, leaf: Any, reduced: Reduced, spec: Any, dtype: Any) -> jax.Array:
    """The gammas of a leaf before the first step; inside `shard_map` of the type that they will be of."""
    kept = () if reduced is None else tuple(1 if i in reduced else n for i, n in enumerate(leaf.shape))
    over = names_of_units(path, leaf, reduced, spec, None)[1] if varying(leaf) else ()
    unknown = jnp.full(kept, jnp.inf, dtype)
    return lax.pcast(unknown, over, to="varying") if over else unknown


def _check_units(units: Sequence[Unit], norms: Sequence[jax.Array], gammas: Sequence[jax.Array]) -> None:
    """Raise if a state is of other units than the updates."""
    for unit, norm, gamma in zip(units, norms, gammas, strict=True):
        if norm.shape != gamma.shape:
            raise ValueError(
                f"adagc: units of leaf {unit.path!r} have the shape {norm.shape}, and their gammas in the "
                f"state {gamma.shape}: start anew from tx.init(params). Inside shard_map, give gammas the "
                "PartitionSpec of the leaf, with None for the reduced axes"
            )
