"""Norms that are accurate enough to compare with bounds.

Norms are float64 values inside this package, whatever `jax_enable_x64` is. A plain float32 sum of a million
squares has an error larger than the four ulp that a bounded unit may lose, and overflows at 1e19.
:mod:`clipjax._core.platforms` chooses how the entries are added.

Therefore every function that uses such a norm has to run under :func:`in_float64`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.arguments import shown
from clipjax._core.axes import Reduced, is_measured
from clipjax._core.dtypes import in_float64, is_wide, strong, wide
from clipjax._core.maxima import largest, largest_of_all
from clipjax._core.mesh import (
    AxisName,
    Names,
    largest_of_devices,
    names_of_leaves,
    placed_as,
    sum_of_devices,
)
from clipjax._core.platforms import euclidean_norm, euclidean_norms, sum_of_sizes
from clipjax._core.side_by_side import by_kind, side_by_side
from clipjax._core.xla_cpu import added

Arrays: TypeAlias = Sequence[jax.Array]


def check_ord(ord: Any) -> Any:  # noqa: A002 - the name that NumPy, JAX and SciPy use
    """Return `ord` as a Python float, or unchanged if it is traced."""
    if isinstance(ord, jax.core.Tracer):
        return ord
    if isinstance(ord, bool) or not (
        isinstance(ord, int | float) or (np.ndim(ord) == 0 and hasattr(ord, "dtype"))
    ):
        raise TypeError(f"ord must be a number, such as 2 or jnp.inf, got {shown(ord)}")
    if not np.isreal(ord):
        raise TypeError(f"ord must be real, got {shown(ord)}")
    if not float(ord) >= 1:
        raise ValueError(f"ord must be at least 1, got {shown(ord)}")
    return float(ord)


@in_float64
def norms_of(
    leaves: Sequence[Arrays],
    axes: Sequence[Reduced],
    ord: Any,  # noqa: A002
    names: Sequence[Names],
    of: Callable[..., jax.Array] = added,
) -> list[jax.Array]:
    """Measure the p-norms of each leaf along its axes, in float64, with reduced axes kept with size 1.

    Args:
      leaves: the terms of each leaf: usually one real or complex array.
      axes: the reduced axes of each leaf; `None` reduces all and gives a scalar.
      ord: p >= 1 or inf; may be traced, which costs a power per entry.
      names: for each leaf, the mesh axes over which a norm's entries are spread.
      of: the function of the terms that is measured, entry by entry; a module's, as it is known by identity.
    """
    leaves = [tuple(strong(term) for term in terms) for terms in leaves]
    if isinstance(ord, jax.core.Tracer):
        norms = [_traced_norm((of(*terms),), along, ord) for terms, along in zip(leaves, axes, strict=True)]
    else:
        norms = _norms(leaves, tuple(axes), ord, of) if leaves else []

    def over_devices(kind: tuple[Names, bool], norms: Sequence[jax.Array]) -> Sequence[jax.Array]:
        names, narrow = kind
        if not names:
            return norms
        return side_by_side(lambda norm: _over_devices(norm, ord, names, narrow=narrow), norms)

    kinds = [(spread, not is_wide(terms[0].dtype)) for spread, terms in zip(names, leaves, strict=True)]
    return by_kind(over_devices, kinds, norms)


def norm_of(x: Any, axes: Reduced, ord: Any, names: Names = ()) -> jax.Array:  # noqa: A002
    """Measure the p-norm of one array along `axes`; see :func:`norms_of`."""
    return norms_of([(x,)], [axes], ord, [names])[0]


@in_float64
def tree_norm(tree: Any, ord: Any, axis_name: AxisName = None) -> jax.Array:  # noqa: A002
    """Return the norm of all leaves of `tree` together, on all devices.

    Leaves that are spread over the same mesh axes are combined first, with one all-reduce of a scalar.
    """
    groups: dict[Names, list[jax.Array]] = {}
    for leaf, names in zip(jax.tree.leaves(tree), names_of_leaves(tree, axis_name), strict=True):
        if is_measured(leaf):
            groups.setdefault(names, []).append(strong(leaf))
    parts = []
    for names, group in groups.items():
        traced = isinstance(ord, jax.core.Tracer)
        norm = _traced_norm(tuple(group), None, ord) if traced else _norm_together(tuple(group), ord)
        narrow = not any(is_wide(leaf.dtype) for leaf in group)
        parts.append(_over_devices(norm, ord, names, narrow=narrow) if names else norm)
    if len(parts) == 1:
        return parts[0]
    return norm_of(jnp.stack(parts) if parts else jnp.zeros(0, np.float64), None, ord)


@in_float64
def joint_norms(labels: Sequence[str], norms: Sequence[jax.Array], ord: Any) -> dict[str, jax.Array]:  # noqa: A002
    """Return the norm for each label, elementwise from the norms of its parts, which have the same shape."""

    def alike(each: list[jax.Array]) -> list[jax.Array]:
        return [placed_as(each[0], norm) for norm in each]

    parts: dict[str, list[jax.Array]] = {}
    for label, norm in zip(labels, norms, strict=True):
        parts.setdefault(label, []).append(norm)
    return {
        label: each[0] if len(each) == 1 else norm_of(jnp.stack(alike(each)), (0,), ord)[0]
        for label, each in parts.items()
    }


def _over_devices(norm: jax.Array, ord: Any, names: Names, *, narrow: bool) -> jax.Array:  # noqa: A002
    """Combine the norms of devices over mesh axes; `narrow` says that the entries have less than 64 bits."""
    known = None if isinstance(ord, jax.core.Tracer) else ord
    if known == math.inf:
        return largest_of_devices(norm, names)
    in_range = narrow and known is not None and known <= 2  # then no power overflows float64
    return _root_of_sum(norm, lax.convert_element_type(ord, np.float64), known, names, in_range)


# The norms of each leaf, which is a function of its terms.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
@in_float64
def _norms(
    leaves: Sequence[Arrays], axes: tuple[Reduced, ...], p: float, of: Callable[..., jax.Array] = added
) -> list[jax.Array]:
    along = [tuple(range(terms[0].ndim)) if a is None else a for terms, a in zip(leaves, axes, strict=True)]
    if p == math.inf:
        norms: list[Any] = largest([of(*terms) for terms in leaves], tuple(along))
        return [norm.reshape(()) if a is None else norm for norm, a in zip(norms, axes, strict=True)]
    norms = [None] * len(leaves)
    fast = [i for i, terms in enumerate(leaves) if p == 2 and _is_narrow_and_real(terms[0])]
    if fast:
        found = euclidean_norms([leaves[i] for i in fast], tuple(along[i] for i in fast), of)
        for i, norm in zip(fast, found, strict=True):
            norms[i] = norm
    for i, terms in enumerate(leaves):
        if norms[i] is None:
            norms[i] = _any_norm((of(*terms),), along[i], p)
    return [norm.reshape(()) if a is None else norm for norm, a in zip(norms, axes, strict=True)]


# The norm of several arrays together.
@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
@in_float64
def _norm_together(xs: Arrays, p: float) -> jax.Array:
    if p == 2 and all(_is_narrow_and_real(x) for x in xs):
        return euclidean_norm(xs)
    return _any_norm(xs, None, p)


def _is_narrow_and_real(x: jax.Array) -> bool:
    return x.dtype.itemsize <= 4 and not jnp.iscomplexobj(x)


def _any_norm(xs: Arrays, axes: Reduced, p: float) -> jax.Array:
    """Return a norm of any order and dtype, computed entry by entry in float64."""
    if p == math.inf:
        return largest_of(xs, axes)
    if p == 1 and axes is not None:
        return sum_of_sizes(xs[0], axes)
    if p == 1:
        return functools.reduce(jnp.add, [sum_of_sizes(x, tuple(range(x.ndim))).reshape(()) for x in xs])
    if p == 2 and all(x.dtype.itemsize <= 4 or x.dtype == np.complex64 for x in xs):
        parts = [part for x in xs for part in ((x.real, x.imag) if jnp.iscomplexobj(x) else (x,))]
        if axes is None:
            return euclidean_norm(parts)
        re, im = euclidean_norms([(part,) for part in parts], (axes,) * len(parts))
        unit = _nonzero(jnp.maximum(re, im))
        return unit * jnp.sqrt((re / unit) ** 2 + (im / unit) ** 2)
    unit = _nonzero(largest_of(xs, axes))
    return unit * _root(_sum(xs, axes, lambda x: _power(jnp.abs(wide(x)) / unit, p)), p)


@_norms.defjvp
@in_float64
def _norms_jvp(
    axes: tuple[Reduced, ...], p: float, of: Callable[..., jax.Array], primals: Any, tangents: Any
) -> Any:
    (leaves,), (dleaves,) = primals, tangents
    norms = _norms(leaves, axes, p, of)
    slopes = []
    for norm, terms, dterms, along in zip(norms, leaves, dleaves, axes, strict=True):
        x, dx = jax.jvp(of, terms, dterms)
        slopes.append(_derivative(norm, (x,), (dx,), along, p))
    return norms, slopes


@_norm_together.defjvp
@in_float64
def _norm_together_jvp(p: float, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (xs,), (dxs,) = primals, tangents
    norm = _norm_together(xs, p)
    return norm, _derivative(norm, xs, dxs, None, p)


def _derivative(norm: jax.Array, xs: Arrays, dxs: Arrays, axes: Reduced, p: float) -> jax.Array:
    pairs = [_size_and_slope(x, dx) for x, dx in zip(xs, dxs, strict=True)]
    if p == math.inf:  # entries that tie for the largest share the derivative
        ties = jnp.maximum(_sum([size for size, _ in pairs], axes, lambda size: wide(size == norm)), 1.0)
        slopes = [wide(size == norm) / ties * slope for size, slope in pairs]
    else:
        slopes = [_power(size / _nonzero(norm), p - 1) * slope for size, slope in pairs]
    return _sum(slopes, axes, wide)


def _size_and_slope(x: jax.Array, dx: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return |x| and its derivative along dx, which is 0 at 0."""
    if not jnp.iscomplexobj(x):
        return jnp.abs(wide(x)), jnp.sign(wide(x)) * wide(dx)
    # Widen the parts, not x: JAX transposes `x.real` and `x.imag` in the width of the user's mode.
    re, im, dre, dim = (wide(part) for part in (x.real, x.imag, dx.real, dx.imag))
    size = jnp.sqrt(jnp.where((re == 0) & (im == 0), 1.0, re * re + im * im))
    return jnp.where((re == 0) & (im == 0), 0.0, size), (re * dre + im * dim) / size


@in_float64
def _traced_norm(xs: Arrays, axes: Reduced, p: jax.Array) -> jax.Array:
    """Return the norm for a p that is only known at run time; scaling makes p = inf correct too."""
    p = lax.convert_element_type(p, np.float64)
    unit = lax.stop_gradient(_nonzero(largest_of(xs, axes)))

    def powers(x: jax.Array) -> jax.Array:
        ratio = jnp.abs(wide(x)) / unit
        return jnp.where(ratio == 0, 0.0, jnp.where(ratio == 0, 1.0, ratio) ** p)

    def to_any_power() -> jax.Array:
        total = _sum(xs, axes, powers)
        return unit * jnp.where(total == 0, 0.0, jnp.where(total == 0, 1.0, total) ** (1 / p))

    def euclidean() -> jax.Array:
        return _norm_together(xs, 2.0) if axes is None else _norms([xs], (axes,), 2.0)[0]

    return lax.cond(p == 2, euclidean, to_any_power)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
@in_float64
def _root_of_sum(
    norm: jax.Array, p: jax.Array, known: float | None, names: Names, in_range: bool
) -> jax.Array:
    """Return the p-norm over devices from their norms; p is `known`, or traced if that is None."""

    def power(x: jax.Array) -> jax.Array:
        return x**p if known is None else _power(x, known)

    def root(x: jax.Array) -> jax.Array:
        return x ** (1 / p) if known is None else _root(x, known)

    def plain(norm: jax.Array) -> jax.Array:
        return root(lax.psum(power(norm), names))

    def scaled(norm: jax.Array) -> jax.Array:
        unit = _nonzero(largest_of_devices(norm, names))
        return unit * root(sum_of_devices(power(norm / unit), names))

    # On a TPU, float64 has only the range of float32.
    return lax.platform_dependent(norm, tpu=scaled, default=plain if in_range else scaled)


@_root_of_sum.defjvp
@in_float64
def _root_of_sum_jvp(
    known: float | None, names: Names, in_range: bool, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    norm, p = primals
    total = _root_of_sum(norm, p, known, names, in_range)
    share = norm / _nonzero(total)
    slope = share ** (p - 1) if known is None else _power(share, known - 1)
    return total, lax.psum(slope * tangents[0], names)


def largest_of(
    xs: Arrays, axes: Reduced = None, of: Callable[[jax.Array], jax.Array] = jnp.abs, at_least: float = 0.0
) -> jax.Array:
    """Return the largest of(x), in float64, or `at_least` if larger; of all arrays if `axes` is None."""
    return largest_of_all(xs, of, at_least) if axes is None else largest(xs, (axes,), of, at_least)[0]


def _sum(xs: Arrays, axes: Reduced, of: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Sum a function of the entries along `axes` and over the arrays."""
    sums = [jnp.sum(of(x), axis=axes, keepdims=axes is not None) for x in xs]
    return jnp.sum(jnp.stack(sums), axis=0) if len(sums) > 1 else sums[0]


def _nonzero(x: jax.Array) -> jax.Array:
    """Replace 0, NaN and infinity by 1, so that the result can be a divisor."""
    return jnp.where((x > 0) & (x < jnp.inf), x, 1.0)


# A general power in float64 takes a TPU's compiler a second, products and a cube root a tenth of that.
def _power(size: jax.Array, p: float) -> jax.Array:
    return lax.integer_pow(size, int(p)) if p.is_integer() else size**p


def _root(total: jax.Array, p: float) -> jax.Array:
    roots: dict[float, Any] = {1: lambda x: x, 2: jnp.sqrt, 3: jnp.cbrt}
    return roots[p](total) if p in roots else total ** (1 / p)
