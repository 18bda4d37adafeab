"""Norms, in float32 (float64 for 64-bit leaves), over all devices where a leaf differs.

Functions of one leaf are jitted, so that JAX traces them once for each shape and not
once for each leaf.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, reshard

from clipjax._core.aliases import DType, Reduced, Scalar

# A warning is about the first line outside installed packages and outside this one.
_LIBRARIES = str(Path(jax.__file__).parents[1]), str(Path(__file__).parents[1])


def sum_dtype(dtype: DType) -> Any:
    """Return the real dtype in which the norms of leaves of a dtype are added."""
    return np.float64 if dtype in (np.float64, np.complex128) else np.float32


def mesh_axes(x: Any) -> tuple[str, ...]:
    """Return the mesh axes over which x differs inside `shard_map`, from its type."""
    kind = jax.typeof(x)
    of_matter = getattr(kind, "mat", None)  # from JAX 0.10 on
    names = getattr(kind, "vma", None) or getattr(of_matter, "varying", None)
    return tuple(sorted(names or ()))


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


def stack(arrays: Iterable[jax.Array]) -> jax.Array:
    """Stack arrays, also where `vmap` maps only some of them (see `_joinable`)."""
    return jnp.stack(_joinable(arrays))


def concatenate(arrays: Iterable[jax.Array], axis: int = 0) -> jax.Array:
    """Join arrays along an axis, also where `vmap` maps only some (see `_joinable`)."""
    return jnp.concatenate(_joinable(arrays), axis)


def _joinable(arrays: Iterable[jax.Array]) -> list[jax.Array]:
    """Return arrays that JAX can join; their values are the same.

    If `vmap` maps arrays that explicit mesh axes split, JAX does not join them with
    arrays that are not mapped (JAX 0.12). So each depends on all, in a condition that
    changes nothing, and that XLA removes.
    """
    each = list(arrays)
    if not jax.sharding.get_abstract_mesh().explicit_axes:
        return each
    conditions = [jnp.any(x == x) for x in each]
    any_of_all = functools.reduce(jnp.logical_or, conditions, jnp.zeros((), bool))
    return [jnp.where(any_of_all, x, x) for x in each]


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
        return jnp.max(_nan_as_inf(stack(each)))

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
