"""Norms of leaves, of trees and of units, in float32 (float64 for 64-bit leaves).

They are over all devices where a leaf differs. A unit is what shares a norm within a
leaf, as the reduced `axes` say. Functions of one leaf are jitted, so that JAX traces
them once for each shape and not once for each leaf.
"""

import functools
import math
import operator
import pathlib
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, reshard

from clipjax._core.aliases import SKIP, DType, Path, Reduced, Rule, Scalar, Skip
from clipjax._core.bounds import traced_error
from clipjax._core.leaves import (
    Leaf,
    Leaves,
    a_few,
    is_inexact,
    of_each_leaf,
    path_name,
)

# A warning is about the first line outside installed packages and outside this one.
_LIBRARIES = (
    str(pathlib.Path(jax.__file__).parents[1]),
    str(pathlib.Path(__file__).parents[1]),
)


def sum_dtype(dtype: DType) -> Any:
    """Return the real dtype in which the norms of leaves of a dtype are added."""
    return np.float64 if dtype in (np.float64, np.complex128) else np.float32


def mesh_axes(x: Any) -> tuple[str, ...]:
    """Return the mesh axes over which x differs inside `shard_map`, from its type."""
    matter = getattr(jax.typeof(x), "mat", None)
    return tuple(sorted(getattr(matter, "varying", None) or ()))


def over_devices(
    combine: Callable[..., jax.Array], x: jax.Array, but: Container[str] = ()
) -> jax.Array:
    """Return `lax.psum`, `pmax` or `pmin` of x over the devices on which it differs.

    Along the mesh axes `but`, it stays different.
    """
    names = tuple(name for name in mesh_axes(x) if name not in but)
    return combine(x, names) if names else x


def replicated(x: jax.Array) -> jax.Array:
    """Return x, on every device if explicit mesh axes split it.

    Under explicit axes, only arrays of one sharding can be added or joined.
    """
    sharding = jax.typeof(x).sharding
    if not any(sharding.spec):
        return x
    return reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))


def split_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """Return x, split over explicit mesh axes like another array of its shape.

    Under explicit axes, `jnp.where` takes only arrays of one sharding.
    """
    sharding = jax.typeof(like).sharding
    if x.shape != like.shape or not any(sharding.spec):
        return x
    return reshard(x, sharding)


def warn_if_local() -> None:
    """Warn where types do not say over which devices leaves differ.

    Types do not say it in `pmap` and in an unchecked `shard_map`. Call this function
    first in every public function that measures, so that the warning is about the
    user's line.
    """
    # Before Python 3.12 the warning is about the line that calls the function.
    at: Any = {"stacklevel": 3}
    if sys.version_info >= (3, 12):
        at = {"skip_file_prefixes": _LIBRARIES}
    for name in jax.sharding.get_abstract_mesh().manual_axes:
        if lax.axis_size(name) > 1 and not mesh_axes(lax.axis_index(name)):
            warnings.warn(
                "clipjax measures norms and losses on each device alone, since over "
                f"the axis {name!r} JAX does not track which arrays differ. They are "
                "right if gradients and losses are the same on all devices, as after "
                "lax.pmean. If they differ, use jit, or shard_map with "
                "check_vma=True.",
                **at,
            )


def nan_unless(fine: jax.Array, x: jax.Array) -> jax.Array:
    """Return x where `fine`, else NaN.

    The NaN is computed: as a constant, it would raise under `jax_debug_nans` where
    nothing is wrong.
    """
    return jnp.where(fine, x, 0 * jnp.where(fine, 0, jnp.inf))


@functools.partial(jax.jit, static_argnames=("axes", "ord"))
def norm_of(x: jax.Array, axes: Reduced, ord: float = 2) -> jax.Array:
    """Return the norm along `axes`; the norm of the whole leaf is over all devices."""
    power = total(x, axes, ord)
    if axes is None:
        power = over_devices(lax.pmax if ord == jnp.inf else lax.psum, power)
    return root(power, ord)


def tree_norm(leaves: Iterable[jax.Array], ord: float = 2) -> Scalar:
    """Return the norm of leaves together: an all-reduce for each set of mesh axes."""
    return root(tree_total(leaves, ord), ord)


def tree_total(leaves: Iterable[jax.Array], ord: float) -> Scalar:
    """Return the norm of leaves together to the power `ord`."""
    return on_all([total(x, None, ord) for x in leaves], ord)


def largest(values: Iterable[jax.Array], empty: float = 0) -> Scalar:
    """Return the largest number on all devices, or `empty` if there is none.

    It is for metrics, and has no derivative. It is inf if a number is NaN.
    """
    each = map(lax.stop_gradient, values)
    scalars = [_largest_of(x, empty) if x.ndim else x for x in each]
    return on_all(scalars, jnp.inf, empty)


def smallest(values: Iterable[jax.Array], empty: float = jnp.inf) -> Scalar:
    """Return the smallest number on all devices, or -inf if a number is NaN."""
    return -largest((-x for x in values), -empty)


@functools.partial(jax.jit, static_argnames="empty")
def _largest_of(x: jax.Array, empty: float) -> Scalar:
    return jnp.max(_nan_as_inf(x), initial=empty)


def _powers(x: jax.Array, ord: float) -> jax.Array:
    """Return |x| to the power `ord`, or |x| if `ord` is infinite."""
    real_parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
    parts = [part.astype(sum_dtype(x.dtype)) for part in real_parts]
    if ord == 2:
        return functools.reduce(jnp.add, map(jnp.square, parts))
    # The modulus of a complex 0 has no derivative in JAX; `root` has one.
    absolute = jnp.abs(parts[0]) if len(parts) == 1 else root(_powers(x, 2), 2)
    if ord in (1, jnp.inf):
        return absolute
    return absolute ** (int(ord) if ord == int(ord) else ord)


@functools.partial(jax.jit, static_argnames=("axes", "ord"))
def total(x: jax.Array, axes: Reduced, ord: float) -> jax.Array:
    """Return the norm along `axes` to the power `ord`, on this device."""
    powers = _powers(x, ord)
    if ord == jnp.inf:
        return maximum(powers, jnp.isnan(x), axes)
    return jnp.sum(powers, axis=axes, keepdims=axes is not None)


def maximum(
    x: jax.Array, is_nan: jax.Array, axes: Reduced = None, empty: float = 0
) -> jax.Array:
    """Return the largest element along `axes`: `empty` if there is none, inf for NaN.

    XLA may lose a NaN in a maximum. So whether there is one is a maximum of numbers,
    too, and devices exchange both at once. The numbers are made from bytes, which take
    the least memory where XLA stores them, as on a CPU.
    """
    options: Any = {"axis": axes, "keepdims": axes is not None, "initial": empty}
    flags = is_nan.astype(np.uint8).astype(x.dtype)
    return jnp.where(jnp.max(flags, **options) > 0, jnp.inf, jnp.max(x, **options))


def _nan_as_inf(x: jax.Array) -> jax.Array:
    """Return x with inf for NaN, since XLA may lose NaN in a maximum."""
    return jnp.where(x < jnp.inf, x, jnp.inf)


def on_all(
    scalars: Sequence[jax.Array], ord: float, empty: float = 0, but: Container[str] = ()
) -> Scalar:
    """Return the sum over all leaves and devices, or the largest if `ord` is inf.

    Leaves that differ over the same mesh axes share an all-reduce. Along the mesh axes
    `but`, devices stay apart.
    """
    over = lax.psum if ord < jnp.inf else lax.pmax

    def combine(each: list[Scalar]) -> Scalar:
        if ord < jnp.inf:
            return sum_of(each)
        # XLA on a CPU takes 3 GB to compile 1,000 maxima of two (JAX 0.9).
        return jnp.max(_nan_as_inf(jnp.stack(each)))

    if not scalars:
        return jnp.full((), empty, np.float32)
    widest = max((x.dtype for x in scalars), key=lambda dtype: dtype.itemsize)
    local: dict[tuple[str, ...], list[Scalar]] = {}
    for x in scalars:
        same = x if x.dtype == widest else x.astype(widest)
        local.setdefault(mesh_axes(x), []).append(same)
    return combine([over_devices(over, combine(x), but) for x in local.values()])


def sum_of(each: list[jax.Array]) -> jax.Array:
    """Return a sum, added in pairs, and pairs of these.

    One after the other, the roundings of a thousand leaves would add up to more than
    the margin of a factor.
    """
    while len(each) > 1:
        pairs = zip(each[::2], each[1::2], strict=False)
        odd = each[-1:] if len(each) % 2 else []
        each = [x + y for x, y in pairs] + odd
    return each[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def root(power: jax.Array, ord: float) -> jax.Array:
    """Return the root of order `ord`, whose derivative at 0 is 0."""
    if ord in (1, jnp.inf):
        return power
    return jnp.sqrt(power) if ord == 2 else power ** (1 / ord)


@root.defjvp
def _root_jvp(ord: float, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    norm = root(primals[0], ord)
    if ord in (1, jnp.inf):
        return norm, tangents[0]
    safe = jnp.where(norm > 0, norm, 1)
    return norm, tangents[0] * jnp.where(norm > 0, safe ** (1 - ord) / ord, 0)


_UNMATCHED = Skip()  # for a leaf that no pattern matches


def fan_in(path: Path, leaf: Any) -> tuple[int, ...] | Skip:
    """Reduce over the incoming weights of each output unit: all axes but the last.

    Use it as `axes` for kernels of Dense `(in, out)` and Conv `(*window, in, out)`.
    Attention kernels, embeddings and stacked layers need other axes: pass a mapping
    from path patterns to axes. The biases of stacked layers have rank 2, so this rule
    or an int as `axes` would apply to them. Leave them out, as in `{"*bias":
    clipjax.SKIP, "*": clipjax.fan_in}`.

    Args:
      path: the key path of a leaf, which is not used.
      leaf: an array, or anything with a shape.

    Returns:
      A tuple of axes, or :data:`SKIP` for leaves of rank 0 and 1, such as biases and
      scales.

    See Also:
      :func:`flax.unit_axes` and :func:`equinox.unit_axes` read the axes from the layers
      of a model.

    Example:
      >>> import clipjax, jax.numpy as jnp
      >>> kernel, bias = jnp.ones((3, 3, 16, 32)), jnp.ones(32)
      >>> clipjax.fan_in((), kernel), clipjax.fan_in((), bias)
      ((0, 1, 2), clipjax.SKIP)
    """
    return tuple(range(len(leaf.shape) - 1)) or SKIP


def fan_in_of_matrices(path: Path, leaf: Any) -> tuple[int, ...] | Skip:
    """Return `fan_in`, or raise for higher ranks: "auto" where weights are bounded."""
    if len(leaf.shape) > 2:
        raise unclear_error(path, leaf)
    return fan_in(path, leaf)


def unclear_error(path: Path, leaf: Any) -> ValueError:
    """Return the error for a leaf whose rank does not tell what it is."""
    return ValueError(
        f"axes: {Leaf(path, leaf)} may be the kernel of a convolution, of attention "
        "heads, or a stack of layers. Pass axes=unit_axes(model) of clipjax.flax or "
        "clipjax.equinox, which asks the layers (in Linen unit_axes(model, key, x)), "
        "clipjax.fan_in for convolutions (*window, in, out), or the axes to reduce, as "
        f"in axes={{{path_name(path) or '*'!r}: ...}}, with '*': 'auto' for other "
        "leaves"
    )


def whole_matrices(path: Path, leaf: Any) -> Skip | None:
    """Reduce a whole matrix, or raise for higher ranks: "auto" where norms are kept."""
    if len(leaf.shape) > 2:
        raise ValueError(
            f"axes: {Leaf(path, leaf)} may be a stack of matrices, of layers or of "
            "experts, each of which has a norm of its own. Pass the axes of one "
            f"matrix, as in axes={{{path_name(path) or '*'!r}: (1, 2)}}, None if all "
            "of it is one, or clipjax.SKIP, with '*': 'auto' for other leaves"
        )
    return None if len(leaf.shape) == 2 else SKIP


def fan_in_or_all(path: Path, leaf: Any) -> Reduced:
    """Reduce as `fan_in`, and a bias as a whole: "auto" for gradients beside weights.

    Ranks that may be stacks raise an error.
    """
    if len(leaf.shape) not in (0, 1, 2, 4):
        raise unclear_error(path, leaf)
    return tuple(range(len(leaf.shape) - 1)) or None


def axes_of(
    leaves: Leaves,
    axes: Any,
    chosen: Sequence[bool] | None = None,
    *,
    least_rank: int = 2,
) -> list[Reduced | Skip]:
    """Return for each leaf the axes that are reduced in it, or SKIP if it has no norm.

    Args:
      leaves: the leaves.
      axes: what :func:`check_axes` returned.
      chosen: for each leaf whether it may have units; None: all may.
      least_rank: the rank below which ints leave a leaf out, such as a bias.

    Returns:
      A list with one entry for each leaf.

    Raises:
      ValueError: an axis is out of range or repeated; a pattern matches no leaf; no
        leaf is reduced, although `axes` do not say so; inside `shard_map`, a leaf may
        be split along the reduced axes.
    """
    rules = of_each_leaf("axes", axes, leaves, _UNMATCHED)
    may = [True] * len(rules) if chosen is None else chosen
    where: list[Reduced | Skip] = []
    for leaf, rule, is_chosen in zip(leaves.each, rules, may, strict=True):
        reduced: Reduced | Skip = SKIP
        if is_inexact(leaf.value) and is_chosen:
            reduced = _resolve(rule, leaf, least_rank)
            if isinstance(reduced, tuple):
                check_whole("axes", leaf)
        where.append(reduced)
    if all(isinstance(reduced, Skip) for reduced in where) and SKIP not in rules:
        left = [leaf for leaf in leaves.each if is_inexact(leaf.value)]
        if any(leaf.value.size for leaf in left):
            raise ValueError(
                f"axes: they apply to none of: {a_few(left, 5)}. Ints and 'auto' are "
                "for leaves of rank 2 and more; axes=None gives each leaf one norm"
            )
    return where


def check_whole(name: str, leaf: Leaf) -> None:
    """Raise inside `shard_map` if this device may hold a part of each unit."""
    if axes := mesh_axes(leaf.value):
        raise ValueError(
            f"{name}: inside shard_map, {leaf} differs over {axes}, and its type does "
            "not say which of its axes are split. Clip, project and measure parts of "
            "leaves outside shard_map, under jit"
        )


def size_of_units(x: jax.Array, axes: Reduced) -> int:
    """Return how many elements share a norm, over all devices, and at least 1."""
    local = x.shape if axes is None else [x.shape[axis] for axis in axes]
    devices = map(lax.axis_size, mesh_axes(x))
    return max(math.prod([*local, *devices]), 1)


def norms_of(
    values: Sequence[jax.Array], where: Sequence[Reduced | Skip], ord: float = 2
) -> list[jax.Array | None]:
    """Return the norms of the units of each leaf, or None for a leaf that has none."""
    return [
        None if isinstance(axes, Skip) else norm_of(x, axes, ord)
        for x, axes in zip(values, where, strict=True)
    ]


def map_units(
    function: Callable[..., Any], of: Sequence[Any], *rest: Sequence[Any]
) -> list[Any]:
    """Return `function` of the norms of each leaf and of its entry in other lists.

    A leaf without norms, None, stays None.
    """
    rows = zip(of, *rest, strict=True)
    return [None if norm is None else function(norm, *others) for norm, *others in rows]


def present(entries: Sequence[Any]) -> list[Any]:
    """Return the entries that are not None."""
    return [entry for entry in entries if entry is not None]


def check_axes(axes: Any, name: str = "axes", *, auto: Rule | None = None) -> Any:
    """Return `axes`, with Python's ints and with the rule `auto` in place of "auto".

    The default is a word and not a function, since `optax.inject_hyperparams` takes
    functions for schedules. Axes that are invalid for any tree raise an error.
    """
    if auto and isinstance(axes, str) and axes == "auto":
        return auto
    if isinstance(axes, Mapping):
        nested = any(isinstance(inner, Mapping) for inner in axes.values())
        if not axes or nested or not all(isinstance(pattern, str) for pattern in axes):
            raise TypeError(
                f"{name}: a mapping must be from path patterns, such as "
                f"'encoder/kernel', to axes, got {axes!r}"
            )
        return {
            pattern: check_axes(inner, f"{name}[{pattern!r}]", auto=auto)
            for pattern, inner in axes.items()
        }
    if axes is None or callable(axes) or isinstance(axes, Skip):
        return axes
    if isinstance(axes, jax.core.Tracer):
        raise traced_error(name, axes)
    several = isinstance(axes, Sequence)
    try:
        ints = tuple(map(operator.index, axes if several else [axes]))
    except TypeError:
        ints = None
    if ints is None or isinstance(axes, bool | str | bytes):
        raise TypeError(
            f"{name} must be ints, a rule (path, leaf) -> axes, a mapping or None, got "
            f"{axes!r}"
        )
    return ints if several else ints[0]


def _resolve(axes: Any, leaf: Leaf, least_rank: int) -> Reduced | Skip:
    """Return the axes to reduce in a leaf, sorted and not negative."""
    if callable(axes):
        name = f"axes of {leaf.name!r}, by the rule,"
        axes = check_axes(axes(leaf.path, leaf.value), name)
        if callable(axes) or isinstance(axes, Mapping):
            raise TypeError(f"{name} must be ints, None or SKIP, got {axes!r}")
    elif isinstance(axes, int | tuple) and len(leaf.value.shape) < least_rank:
        return SKIP
    if axes is None or isinstance(axes, Skip):
        return axes
    ints = (axes,) if isinstance(axes, int) else tuple(axes)
    return tuple(sorted(positive_axes("axes", axes, ints, leaf)))


def positive_axes(name: str, given: Any, axes: Sequence[int], leaf: Leaf) -> list[int]:
    """Return axes of a leaf, counted from 0, or raise an error that shows `given`."""
    rank = len(leaf.value.shape)
    if any(not -rank <= axis < rank for axis in axes):
        raise ValueError(f"{name}: {given} is out of range for {leaf}")
    found = [axis % rank for axis in axes]
    if len(set(found)) < len(found):
        raise ValueError(f"{name}: {given} names an axis twice for {leaf}")
    return found
