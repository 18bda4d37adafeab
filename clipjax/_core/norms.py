"""Norms, in float32 (float64 for 64-bit leaves), over all devices on which a leaf differs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.bounds import not_static


def is_float(x: Any) -> bool:
    """Return whether a leaf has a norm: float and complex ones do; ints, bools, keys and float0 do not."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def wide(dtype: Any) -> Any:
    """Return the real dtype in which the norms of such leaves are added."""
    return np.float64 if dtype in (np.float64, np.complex128) else np.float32


def mesh_axes(x: Any) -> tuple[str, ...]:
    """Return the mesh axes over which x differs inside `shard_map`, from its type."""
    kind = jax.typeof(x)
    names = getattr(kind, "vma", None)
    if names is None:  # JAX 0.10 and later
        names = getattr(getattr(kind, "mat", None), "varying", None)
    return tuple(sorted(names or ()))


def over_devices(combine: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    """Return `lax.psum`, `lax.pmax` or `lax.pmin` of x over the devices on which it differs."""
    names = mesh_axes(x)
    return combine(x, names) if names else x


def warn_if_local() -> None:
    """Warn where types do not say over which devices leaves differ: in `pmap` and unchecked `shard_map`."""
    for name in jax.sharding.get_abstract_mesh().manual_axes:
        if not mesh_axes(lax.axis_index(name)):
            warnings.warn(
                f"norms and losses are those of each device alone, since over the axis {name!r} JAX does not track "
                "which arrays differ. They are right where gradients and losses are the same on all devices, as after "
                "lax.pmean. Where these are split, use jit, or shard_map with check_vma=True.",
                stacklevel=2,
            )


def _sizes(x: jax.Array) -> jax.Array:
    """Return |x|. The modulus of a complex 0 has no derivative, so a root that has one is taken."""
    return _root(_squares(x), 2) if jnp.iscomplexobj(x) else jnp.abs(x.astype(wide(x.dtype)))


def _squares(x: jax.Array) -> jax.Array:
    parts = (x.real, x.imag) if jnp.iscomplexobj(x) else (x,)
    return sum(jnp.square(part.astype(wide(x.dtype))) for part in parts)  # type: ignore[return-value]


def _powers(x: jax.Array, ord: float) -> jax.Array:
    if ord == 2:
        return _squares(x)
    if ord == jnp.inf:
        return _nan_as_inf(_sizes(x))
    return _sizes(x) if ord == 1 else _sizes(x) ** (int(ord) if ord == int(ord) else ord)


def _nan_as_inf(x: jax.Array) -> jax.Array:
    """Return x with inf for NaN, since XLA may lose NaN in a maximum."""
    return jnp.where(x < jnp.inf, x, jnp.inf)


def nan_unless(fine: jax.Array, x: jax.Array) -> jax.Array:
    """Return x where `fine`, else NaN. As a constant, NaN would raise under `jax_debug_nans` where nothing is wrong."""
    return jnp.where(fine, x, 0 * jnp.where(fine, 0, jnp.inf))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _root(total: jax.Array, ord: float) -> jax.Array:
    """Return the root of order `ord`; its derivative at 0 is 0."""
    if ord in (1, jnp.inf):
        return total
    return jnp.sqrt(total) if ord == 2 else total ** (1 / ord)


@_root.defjvp
def _root_jvp(ord: float, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    root = _root(primals[0], ord)
    slope = jnp.where(root > 0, jnp.where(root > 0, root, 1) ** (1 - ord) / ord, 0)
    return root, tangents[0] * (1.0 if ord in (1, jnp.inf) else slope)


def _add(powers: jax.Array, axes: tuple[int, ...] | None, ord: float) -> jax.Array:
    keep = axes is not None
    if ord == jnp.inf:
        return jnp.max(powers, axis=axes, keepdims=keep, initial=0)
    return jnp.sum(powers, axis=axes, keepdims=keep)


def norm(x: jax.Array, axes: tuple[int, ...] | None = None, ord: float = 2) -> jax.Array:
    """Return the norm along `axes`, which are kept with size 1; with None that of the whole leaf."""
    total = _add(_powers(x, ord), axes, ord)
    if axes is None:
        total = over_devices(lax.pmax if ord == jnp.inf else lax.psum, total)
    return _root(total, ord)


def tree_norm(leaves: Iterable[jax.Array], ord: float = 2) -> jax.Array:
    """Return the norm of all leaves together, with one all-reduce for each set of mesh axes."""
    warn_if_local()
    powers = [_add(_powers(x, ord), None, ord) for x in leaves]
    if ord == jnp.inf:
        return _over_leaves(_most, lax.pmax, powers)
    return _root(_over_leaves(_sum, lax.psum, powers), ord)


def largest(values: Iterable[jax.Array], least: float = 0) -> jax.Array:
    """Return the largest of all numbers on all devices, for metrics: it has no derivative.

    It is inf if one number is NaN, and `least` if there are none.
    """
    each = map(lax.stop_gradient, values)
    scalars = [jnp.max(_nan_as_inf(x), initial=least) if x.ndim else x for x in each]
    return _over_leaves(_most, lax.pmax, scalars, least)


def _sum(scalars: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, scalars)


def _most(scalars: Sequence[jax.Array]) -> jax.Array:
    """Return the largest, of one array: on a CPU XLA takes 3 GB to compile 1,000 maxima of two."""
    return jnp.max(_nan_as_inf(jnp.stack(scalars)))


def _over_leaves(
    combine: Callable[[Sequence[jax.Array]], jax.Array],
    over: Callable[..., jax.Array],
    scalars: list[jax.Array],
    start: float = 0,
) -> jax.Array:
    """Combine scalars, and those of other devices; `start` if there are none."""
    local: dict[tuple[str, ...], list[jax.Array]] = {}
    widest = max((x.dtype for x in scalars), key=lambda dtype: dtype.itemsize, default=None)
    for x in (x if x.dtype == widest else x.astype(widest) for x in scalars):
        local.setdefault(mesh_axes(x), []).append(x)
    totals = [over_devices(over, combine(each)) for each in local.values()]
    return combine(totals) if totals else jnp.full((), start, np.float32)


def check_ord(ord: Any) -> float:
    """Return the order of a norm, 2 for None, or raise an error that names it."""
    if ord is None:  # the default of transformations, since `optax.inject_hyperparams` would trace a number
        return 2.0
    if isinstance(ord, jax.Array):
        raise not_static("ord", ord)
    if isinstance(ord, bool) or not isinstance(ord, int | float | np.number):
        raise TypeError(f"ord must be 1, 2, a number of at least 1 or infinity, got {ord!r}")
    if not ord >= 1:
        raise ValueError(f"ord must be at least 1, got {ord!r}")
    return float(ord)
