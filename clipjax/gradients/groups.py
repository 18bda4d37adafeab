"""One norm and one bound for each group of leaves."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from clipjax._core.arguments import explained, shown
from clipjax._core.axes import Rule as AxesRule
from clipjax._core.axes import is_measured, resolve_axes
from clipjax._core.bounds import Bound, bound_at, check_fits
from clipjax._core.dtypes import in_float64, only_arrays
from clipjax._core.members import Acted, Memory, with_stats
from clipjax._core.mesh import AxisName
from clipjax._core.norms import check_ord, joint_norms
from clipjax._core.paths import (
    Path,
    check_none_is_hidden,
    described,
    first_matches,
    leaves_with_paths,
    path_name,
)
from clipjax._core.rescale import Scale, rescale, to_bound
from clipjax._core.stats import Stats, count
from clipjax._core.trees import Report, Unit, decide, for_each, measure_units, of_norms, summary, units_of
from clipjax._core.where import Where

Stack: TypeAlias = Mapping[str, int]


class OfGroup(NamedTuple):
    """What was done to a group: scalars, or an entry for each layer of a stack."""

    group_norm: jax.Array  # float: the norm at the last step, before clipping
    group_after: jax.Array  # float: the norm at the last step, after clipping
    group_factor: jax.Array  # float: the factor applied at the last step
    group_clipped: jax.Array  # int32: steps at which the group was clipped


class ClipByGroupNormState(NamedTuple):
    """State of :func:`clip_by_group_norm`."""

    clip_by_group_norm: Stats
    groups: dict[str, OfGroup]  # by pattern


@explained
def clip_by_group_norm(
    max_norms: Mapping[str, Bound],
    *,
    ord: float = 2,  # noqa: A002
    stack: Stack | None = None,
    specs: Any = None,
    where: Where = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    """Clip the joint norm of each group of leaves to a bound of its own.

    A tensor that explodes then does not scale down the rest of the model, as it does with one norm of the
    whole tree.

    Args:
      max_norms: a mapping from path patterns (globs for the whole path, such as `"encoder/Dense_0/kernel"`,
        or for its last components) to bounds: each a number, a scalar array or a schedule. A leaf belongs to
        the first pattern that matches it; leaves that no pattern matches are left alone.
      ord: 1, 2, any p >= 1, or `jax.numpy.inf`.
      stack: the groups that are stacks of layers, such as `nn.scan` makes: a mapping from patterns of
        `max_norms` to the axis along which the layers are stacked. Each layer is then a group of its own,
        over all leaves of the pattern, and the bound may be an array `(layers,)`.
      specs: inside `shard_map`, the tree of `PartitionSpec` or `NamedSharding` of the updates, needed for
        stacks that are split. If their layers are split, the entries of the state are, too.
      where: the leaves to clip, as path patterns, a rule or a tree of bools (see :func:`clipjax.box`). None
        selects all. Other leaves are returned unchanged, are not measured and may hold anything.
      axis_name: the mesh axes that split the leaves, in `pmap` and unchecked `shard_map`: names, or a mapping
        from path patterns to names, as in :func:`clip_by_global_norm`.

    Returns:
      A transformation with the metrics `norm/<pattern>`, `norm_after/<pattern>`, `scale/<pattern>` and
      `clipped_fraction/<pattern>`; for each layer of a stack, `norm/<pattern>/<layer>` and so on. Without a
      pattern, `norm` is the largest norm of all groups, and `scale` the smallest scale.

    Raises:
      TypeError, ValueError: `max_norms` is empty or not a mapping; a bound is negative, NaN or not a number;
        `ord` is below 1; `stack` has a key that is not in `max_norms`. In `init`: a pattern matches no leaf;
        the leaves of a stack differ in their number of layers.

    Guarantees: those of :func:`clip_by_global_norm`, for each group. A group with a non-finite entry becomes
    NaN, and the other groups are not affected.

    Equals `torch.nn.utils.clip_grad_norm_` called for one parameter group after the other.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> grads = {"experts": {"w": jnp.array([30.0, 40.0])}, "head": jnp.array([0.3])}
      >>> tx = clipjax.clip_by_group_norm({"experts/*": 1.0, "*": 0.5})
      >>> clipped, state = tx.update(grads, tx.init(grads))
      >>> print(clipped["experts"]["w"].round(3), clipped["head"])
      [0.6 0.8] [0.3]
      >>> print(clipjax.metrics(state)["clip_by_group_norm/norm_after/experts/*"])
      1.0
    """
    stack = _checked(max_norms, stack)
    bounds = {p: bound_at(f"max_norms[{p!r}]", x, scalar=p not in stack) for p, x in max_norms.items()}
    axes: dict[str, Any] = {p: _all_but(stack[p]) if p in stack else None for p in max_norms}
    order = check_ord(ord)

    def groups_of(tree: Any) -> list[str | None]:
        """Return the group of each leaf."""
        return first_matches("max_norms", list(max_norms), tree)

    def first(params: Any, stats: Stats) -> Memory:
        params = only_arrays(params)
        check_none_is_hidden("max_norms", list(max_norms), params)
        groups = groups_of(params)
        resolve_axes(axes, params, may_bound_nothing=True)
        leaves = list(zip(groups, leaves_with_paths(params), strict=True))
        layers = {p: _layers(p, stack, [leaf for group, leaf in leaves if group == p]) for p in max_norms}

        def start(shape: tuple[int, ...]) -> OfGroup:
            dtype = stats.norm.dtype
            zeros, ones = (functools.partial(x, shape) for x in (jnp.zeros, jnp.ones))
            return OfGroup(zeros(dtype), zeros(dtype), ones(dtype), zeros(jnp.int32))

        return ({p: start(layers[p]) for p in sorted(max_norms)},)

    @in_float64
    def act(updates: Any, memory: Memory, params: Any, step: Any, **extra_args: Any) -> Acted:
        del params, extra_args
        treedef: Any
        leaves, treedef = jax.tree.flatten(updates)
        groups = groups_of(updates)
        units = units_of(updates, axes, specs, axis_name, may_bound_nothing=True)
        labels = [str(groups[unit.position]) for unit in units]
        norms = measure_units(units, order)
        _check_alike(labels, units, norms)
        joint = joint_norms(labels, [norm.ravel() for norm in norms], order)
        at_step = {p: _fitting(p, bounds[p](step), joint[p]) for p in joint}
        columns = [
            [for_each(norm, by_group[p].reshape(norm.shape)) for p, norm in zip(labels, norms, strict=True)]
            for by_group in (joint, at_step)
        ]
        _, down = decide(lambda *_: (_by_group, columns), units, norms)
        for unit, scale in zip(units, down, strict=True):
            leaves[unit.position] = rescale(unit.leaf, scale)
        joint, at_step = lax.stop_gradient((joint, at_step))  # reports are not differentiated
        reports = {p: of_norms(norm, to_bound(norm, at_step[p])) for p, norm in joint.items()}
        over = {label: unit.over for label, unit in zip(labels, units, strict=True)}
        kept = {p: _taken_in(p, old, reports.get(p)) for p, old in memory[0].items()}
        return treedef.unflatten(leaves), summary(list(reports.values()), [over[p] for p in reports]), (kept,)

    return with_stats(ClipByGroupNormState, act, first, where=where)


def _by_group(norm: jax.Array, joint: jax.Array, bound: jax.Array) -> Scale:
    del norm
    return to_bound(joint, bound)


def _checked(max_norms: Any, stack: Any) -> Stack:
    if not isinstance(max_norms, Mapping) or not all(isinstance(p, str) for p in max_norms):
        raise TypeError(
            f"max_norms must be a mapping from path patterns to bounds, such as "
            f"{{'experts/*': 1.0, '*': 0.5}}; got {shown(max_norms)}"
        )
    if not max_norms:
        raise ValueError("max_norms must name at least one group, got {}")
    stack = {} if stack is None else stack
    if not isinstance(stack, Mapping):
        raise TypeError(
            f"stack must be a mapping from patterns of max_norms to an axis, such as {{'layers/*': 0}}, got "
            f"{shown(stack)}"
        )
    for pattern, axis in stack.items():
        if pattern not in max_norms:
            raise ValueError(f"stack: {pattern!r} is not a pattern of max_norms, {shown(list(max_norms))}")
        if isinstance(axis, bool) or not isinstance(axis, int):
            raise TypeError(f"stack[{pattern!r}] must be an axis, got {shown(axis)}")
    return stack


def _all_but(axis: int) -> AxesRule:
    """Make the rule that reduces all axes but one."""

    def rule(path: Path, leaf: Any) -> tuple[int, ...]:
        rank = len(leaf.shape)
        if not -rank <= axis < rank:
            raise ValueError(f"stack: axis {axis} is out of range for leaf {described(path, leaf)}")
        return tuple(a for a in range(rank) if a != axis % rank)

    return rule


def _layers(pattern: str, stack: Stack, leaves: list[tuple[Path, Any]]) -> tuple[int, ...]:
    """Return the shape of an array with one entry for each layer: () for a group that is not a stack."""
    if pattern not in stack:
        return ()
    sizes = {path_name(path): x.shape[stack[pattern]] for path, x in leaves if is_measured(x)}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name!r} has {size}" for name, size in list(sizes.items())[:5])
        raise ValueError(f"stack[{pattern!r}]: the leaves have different numbers of layers: {listed}")
    return (next(iter(sizes.values()), 0),)


def _check_alike(labels: Sequence[str], units: Sequence[Unit], norms: Sequence[jax.Array]) -> None:
    """Raise an error if a device has different layers of the leaves of one stack."""
    first: dict[str, tuple[str, int]] = {}
    for label, unit, norm in zip(labels, units, norms, strict=True):
        path, size = first.setdefault(label, (unit.path, norm.size))
        if norm.size != size:
            raise ValueError(
                f"stack[{label!r}]: {path!r} has {size} layers here, and {unit.path!r} {norm.size}: inside "
                f"shard_map, all leaves of a stack must be split over their layers, or none"
            )


def _fitting(pattern: str, bound: jax.Array, norm: jax.Array) -> jax.Array:
    """Return a bound for each of the norms of a group."""
    fits = check_fits(f"max_norms[{pattern!r}]", bound, norm.shape, "the layers of the stack")
    return jnp.broadcast_to(fits, norm.shape)


def _taken_in(pattern: str, old: OfGroup, report: Report | None) -> OfGroup:
    """Update the state of a group by one step; without a report, the group had no updates."""
    if report is None:
        return old
    shape = old.group_norm.shape
    if old.group_norm.size != report.norm.size:
        raise ValueError(
            f"state: it has {old.group_norm.size} layers of {pattern!r}, but the updates have "
            f"{report.norm.size}: inside shard_map, the entries of a stack must be split like its layers"
        )

    def stored(new: jax.Array, was: jax.Array) -> jax.Array:
        return lax.convert_element_type(new.reshape(shape), was.dtype)

    clipped = (report.clipped & jnp.isfinite(report.norm)).reshape(shape)
    return OfGroup(
        group_norm=stored(report.norm, old.group_norm),
        group_after=stored(report.after, old.group_after),
        group_factor=stored(report.scale, old.group_factor),
        group_clipped=count(old.group_clipped, clipped),
    )
