"""Norms, in float32 (float64 for 64-bit leaves), over all devices on which a leaf differs.

What is done to each leaf is jitted, so that JAX traces it once for each shape and not
once for each leaf.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Axes = (
    tuple[int, ...] | None
)  # those that are reduced, and kept with size 1; None: all, which are not kept

# A warning is about the first line outside installed packages and outside this one.
_LIBRARIES = str(Path(jax.__file__).parents[1]), str(Path(__file__).parents[1])


def sum_dtype(dtype: Any) -> Any:
    """Return the real dtype in which norms of leaves of a dtype are added."""
    return np.float64 if dtype in (np.float64, np.complex128) else np.float32


def mesh_axes(x: Any) -> tuple[str, ...]:
    """Return the mesh axes over which x differs inside `shard_map`, from its type."""
    kind = jax.typeof(x)
    names = getattr(kind, "vma", None) or getattr(
        getattr(kind, "mat", None), "varying", None
    )  # from JAX 0.10 on
    return tuple(sorted(names or ()))


def over_devices(combine: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    """Return `lax.psum`, `lax.pmax` or `lax.pmin` of x over the devices on which it differs."""
    names = mesh_axes(x)
    return combine(x, names) if names else x


def warn_if_local() -> None:
    """Warn where types do not say over which devices leaves differ: in `pmap` and unchecked `shard_map`."""
    # Before Python 3.12, the line that calls `update` of a clip of all leaves.
    at: Any = (
        {"skip_file_prefixes": _LIBRARIES}
        if sys.version_info >= (3, 12)
        else {"stacklevel": 6}
    )
    for name in jax.sharding.get_abstract_mesh().manual_axes:
        if lax.axis_size(name) > 1 and not mesh_axes(lax.axis_index(name)):
            warnings.warn(
                "norms and losses are those of each device alone, since over the "
                f"axis {name!r} JAX does not track which arrays differ. They are "
                "right where gradients and losses are the same on all devices, as "
                "after lax.pmean. Where these are split, use jit, or shard_map with "
                "check_vma=True.",
                **at,
            )


def nan_unless(fine: jax.Array, x: jax.Array) -> jax.Array:
    """Return x where `fine`, else NaN. As a constant, NaN would raise under `jax_debug_nans` where nothing is wrong."""
    return jnp.where(fine, x, 0 * jnp.where(fine, 0, jnp.inf))


@functools.partial(jax.jit, static_argnames=("axes", "ord"))
def norm(x: jax.Array, axes: Axes = None, ord: float = 2) -> jax.Array:
    """Return the norm along `axes`; that of the whole leaf is over all devices."""
    total = _total(x, axes, ord)
    if axes is None:
        total = over_devices(lax.pmax if ord == jnp.inf else lax.psum, total)
    return _root(total, ord)


def tree_norm(leaves: Iterable[jax.Array], ord: float = 2) -> jax.Array:
    """Return the norm of all leaves together, with one all-reduce for each set of mesh axes."""
    return _root(tree_total(leaves, ord), ord)


def tree_total(leaves: Iterable[jax.Array], ord: float = 2) -> jax.Array:
    """Return the norm of all leaves together to the power `ord`, as `tree_norm`."""
    warn_if_local()
    return _on_all([_total(x, None, ord) for x in leaves], ord)


def largest(values: Iterable[jax.Array], empty: float = 0) -> jax.Array:
    """Return the largest of all numbers on all devices, for metrics: it has no derivative.

    It is inf if one number is NaN, and `empty` if there are none.
    """
    each = map(lax.stop_gradient, values)
    return _on_all(
        [_largest_of(x, empty) if x.ndim else x for x in each], jnp.inf, empty
    )


@functools.partial(jax.jit, static_argnames="empty")
def _largest_of(x: jax.Array, empty: float) -> jax.Array:
    return jnp.max(_nan_as_inf(x), initial=empty)


def _powers(x: jax.Array, ord: float) -> jax.Array:
    """Return |x| to the power `ord`, or |x| if that is infinite."""
    parts = [
        part.astype(sum_dtype(x.dtype))
        for part in ((x.real, x.imag) if jnp.iscomplexobj(x) else (x,))
    ]
    if ord == 2:
        return functools.reduce(jnp.add, map(jnp.square, parts))
    # The modulus of a complex 0 has no derivative, so a root that has one is taken.
    size = jnp.abs(parts[0]) if len(parts) == 1 else _root(_powers(x, 2), 2)
    return (
        size if ord in (1, jnp.inf) else size ** (int(ord) if ord == int(ord) else ord)
    )


@functools.partial(jax.jit, static_argnames=("axes", "ord"))
def _total(x: jax.Array, axes: Axes, ord: float) -> jax.Array:
    powers = _powers(x, ord)
    if ord == jnp.inf:
        return maximum(powers, jnp.isnan(x), axes)
    return jnp.sum(powers, axis=axes, keepdims=axes is not None)


def maximum(
    x: jax.Array, is_nan: jax.Array, axes: Axes = None, empty: float = 0
) -> jax.Array:
    """Return the largest entry along `axes`, `empty` if there is none, and inf if one is NaN, which XLA may lose.

    Whether one is NaN is a maximum of numbers, too, so that devices exchange both at
    once. They pass through bytes, which take the least memory where XLA stores them, as
    on a CPU.
    """
    flags = is_nan.astype(np.uint8).astype(x.dtype)
    most, any_nan = (
        jnp.max(each, axis=axes, keepdims=axes is not None, initial=empty)
        for each in (x, flags)
    )
    return jnp.where(any_nan > 0, jnp.inf, most)


def _nan_as_inf(x: jax.Array) -> jax.Array:
    """Return x with inf for NaN, since XLA may lose NaN in a maximum."""
    return jnp.where(x < jnp.inf, x, jnp.inf)


def _on_all(scalars: list[jax.Array], ord: float, empty: float = 0) -> jax.Array:
    """Return the sum of scalars of all leaves and devices, or the largest if `ord` is infinite."""

    def combine(each: list[jax.Array]) -> jax.Array:
        if ord < jnp.inf:
            return functools.reduce(jnp.add, each)
        return jnp.max(
            _nan_as_inf(jnp.stack(each))
        )  # XLA on a CPU takes 3 GB to compile 1,000 maxima of two

    if not scalars:
        return jnp.full((), empty, np.float32)
    widest = max((x.dtype for x in scalars), key=lambda dtype: dtype.itemsize)
    local: dict[tuple[str, ...], list[jax.Array]] = {}
    for x in scalars:
        local.setdefault(mesh_axes(x), []).append(
            x if x.dtype == widest else x.astype(widest)
        )
    return combine(
        [
            over_devices(lax.psum if ord < jnp.inf else lax.pmax, combine(each))
            for each in local.values()
        ]
    )


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
