"""Bounds on each leaf or unit that follow the past norms of that leaf or unit."""

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
from clipjax._core.bounds import Bound, bound_at, check_count, check_number
from clipjax._core.dtypes import as_arrays, in_float64, wide
from clipjax._core.members import Acted, Memory
from clipjax._core.mesh import AxisName, is_spread, names_of_units, spec_leaves, varying
from clipjax._core.norms import norm_of, norms_of
from clipjax._core.paths import Path, leaves_with_paths
from clipjax._core.rescale import Scale, factor_of, rescale, to_bound
from clipjax._core.rounding import round_up
from clipjax._core.side_by_side import side_by_side
from clipjax._core.stats import Stats
from clipjax._core.trees import Unit, decide, for_each, joined, least_of, measure_units, report_of, units_of
from clipjax._core.where import Where
from clipjax.gradients.past import check_leaves, leaves_of, no_norms, no_threshold, one_more, remembering

WarmupNorms = Literal["before", "after"]


class AdagcState(NamedTuple):
    """State of :func:`adagc`."""

    adagc: Stats
    threshold: jax.Array  # float: the smallest bound of the last step
    # The gamma of each leaf, float (leaves,), infinite while unknown. With `axes`, a tuple with an array for
    # each leaf that has units, with the leaf's shape but length 1 along the reduced axes.
    gammas: Any
    taken: jax.Array  # int32: steps that the statistics include


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

    During the warm-up, the norm of the whole tree is clipped to `max_norm`, and the gamma of a leaf is the
    smallest norm that it has had. After that, each leaf is clipped to relative_bound * gamma, and then gamma
    <- decay * gamma + (1 - decay) * n, where n is its norm after clipping. With `axes`, the same applies to
    each unit instead of each leaf: layers that `nn.scan` stacks in leaves (layers, in, out) follow their own
    past with `axes={"*kernel": (1, 2), "*bias": 1}`.

    Args:
      relative_bound: how many times gamma a norm may be: a number, a scalar array or a schedule.
      decay: the decay of the moving average, in [0, 1).
      warmup_steps: the length of the warm-up, at least 0. Without a warm-up, the first norm of a leaf is its
        first gamma.
      max_norm: the bound during the warm-up: a number, a scalar array or a schedule.
      warmup_norms: whether gamma is the smallest of the norms "before" or "after" the clip of the warm-up.
      axes: the axes that are reduced, as in :func:`clip_by_norm`: entries along them share a norm and a
        gamma. None is the whole leaf. Leaves that are left alone, because of `clipjax.SKIP` or because no
        pattern matches them, are not clipped in the warm-up either, and do not count toward its norm.
      specs: inside `shard_map`, the `PartitionSpec` tree of the updates, needed for units of leaves that are
        split. The `gammas` of a leaf are split like the leaf, except along its reduced axes: for a leaf with
        `P("pipe", None, "model")` and axes (1, 2), the spec is `P("pipe", None, None)`.
      where: the leaves to clip, as path patterns, a rule or a tree of bools (see :func:`clipjax.box`). None
        selects all. Other leaves are returned unchanged, are not measured and may hold anything.
      axis_name: the mesh axes that split the leaves, in `pmap` and unchecked `shard_map`. In a checked
        `shard_map`, the types of the leaves contain the axes.

    Returns:
      A transformation. `norm` is the norm of the whole tree; `threshold` is `max_norm` during the warm-up,
      then the smallest bound of a leaf or unit. In its state, `gammas` has one entry for each float or
      complex leaf of the parameters, in their order. With `axes`, it has an array for each leaf that has
      units, with the leaf's shape but length 1 along the reduced axes (shape () if the whole leaf is
      reduced).

    Raises:
      TypeError, ValueError: an argument is not a number, or is out of range; `axes` has an invalid form. In
        `init`: a leaf does not have an axis; a pattern matches no leaf. In `update`: the gradients have more
        or fewer leaves or units than the parameters had; inside `shard_map`, also if `gammas` is not split
        like the leaf.

    Guarantees: measured in float64, no clipped norm is above its bound; leaves or units within their bound
    are unchanged, bit for bit. A non-finite entry makes its leaf or unit NaN, or the whole tree during the
    warm-up; such a step leaves all statistics unchanged and does not count toward the warm-up. Derivatives
    treat the norms of other steps as constants.

    Equals the authors' code: for PaddlePaddle with "before", except that it has one more step of warm-up, and
    for Megatron with "after". Equals `pytorch_optimizer.AdaGC` with "after", except that it has one step
    less. There, a leaf whose gradient is 0 once in the warm-up, or for a long time later, stays 0 forever,
    because its gamma is 0. Here, a norm of 0 does not change gamma.

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

    def clip(updates: Any, memory: Memory, step: jax.Array, dtype: Any) -> Acted:
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

        if rule is None:  # stacked, because hundreds of separate scalars take long to compile
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
        memory = round_up(threshold, dtype), known[0] if rule is None else known, one_more(taken)
        return treedef.unflatten(leaves), report, memory

    return remembering(AdagcState, first, clip, where)


def _scale_of(
    norm: jax.Array, gamma: jax.Array, ratio: jax.Array, warming: jax.Array, *together: jax.Array
) -> Scale:
    """Return the scale that brings a norm to its own bound or, in the warm-up, that of the tree."""
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
    """Return the next gamma, the bound and the scale of each norm.

    In the warm-up, gamma follows the norms after clipping if `clipped`, else those before.
    """

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
    """Return the norm of all units of all leaves, on all devices."""
    if any(unit.over or is_spread(norm) for unit, norm in zip(units, norms, strict=True)):
        over = [unit.over for unit in units]
        norms = norms_of([(norm,) for norm in norms], [None] * len(units), 2.0, over)
    return norm_of(joined(norms) if norms else jnp.zeros(0), None, 2.0)


def _with_units(params: Any, rule: Axes, specs: Any) -> Iterator[tuple[Path, Any, Reduced, Any]]:
    """Yield the path of each leaf that has units, the leaf, its reduced axes and its spec."""
    tree = as_arrays(params)
    for (path, leaf), reduced, spec in zip(
        leaves_with_paths(tree), resolve_axes(rule, tree), spec_leaves(specs, tree), strict=True
    ):
        if not isinstance(reduced, Skip):
            yield path, leaf, reduced, spec


def _unknown(path: Path, leaf: Any, reduced: Reduced, spec: Any, dtype: Any) -> jax.Array:
    """Return the gammas of a leaf before the first step; in `shard_map`, with the type of the later ones."""
    kept = () if reduced is None else tuple(1 if i in reduced else n for i, n in enumerate(leaf.shape))
    over = names_of_units(path, leaf, reduced, spec, None)[1] if varying(leaf) else ()
    unknown = jnp.full(kept, jnp.inf, dtype)
    return lax.pcast(unknown, over, to="varying") if over else unknown


def _check_units(units: Sequence[Unit], norms: Sequence[jax.Array], gammas: Sequence[jax.Array]) -> None:
    """Raise an error if the state was made for units of other shapes than those of the updates."""
    for unit, norm, gamma in zip(units, norms, gammas, strict=True):
        if norm.shape != gamma.shape:
            raise ValueError(
                f"adagc: the units of leaf {unit.path!r} have shape {norm.shape}, but their gammas in the "
                f"state have {gamma.shape}: start again with tx.init(params). Inside shard_map, give gammas "
                "the PartitionSpec of the leaf, with None for the reduced axes"
            )
