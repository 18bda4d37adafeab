"""What differs between platforms: measuring with float64 accuracy, at the speed of memory.

The platform is known when a program is lowered, not while it is traced.

A CPU adds in float64, which takes no longer than reading the memory. So does a GPU, except that it adds all
entries of a large array in pairs of float32, since many GPUs have a thirtieth of their speed in float64. A
TPU has neither float64 nor a range beyond that of float32. It adds pairs, too, and in the same pass the
squares of scaled entries, for what is out of range. The largest entries are found in
:mod:`clipjax._core.maxima`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core import pairs
from clipjax._core.blocks import FAR, inner_products_of_blocks, kept, sums_of_blocks, sums_of_squares
from clipjax._core.devices import on_single_device
from clipjax._core.dtypes import wide
from clipjax._core.mesh import split_by_type
from clipjax._core.side_by_side import side_by_side
from clipjax._core.xla_cpu import (
    Reduction,
    Turn,
    added,
    computed_once,
    in_turn,
    is_large,
    paired,
    reduce_in_slices,
)

Arrays: TypeAlias = Sequence[jax.Array]
Axes: TypeAlias = tuple[int, ...]

# The largest relative error of a measured norm.
NORM_ERROR = 2.0**-32
# The range of sums of squares in which pairs of float32 keep their accuracy.
_LEAST, _MOST = 2.0**-60, 2.0**120
# On a GPU, pairs (size, scale): entries of at least this size, and below the next, are multiplied by the
# scale before they are squared, so that up to 2**31 of them keep their accuracy.
_SCALES = ((0.0, 2.0**80), (2.0**-40, 1.0), (2.0**23, 2.0**-65))
# The largest relative error of the plain float32 norm that a TPU uses outside the range of pairs.
_PLAIN_ERROR = 2.0**-12
# The number of small arrays of one shape that are added entry by entry before they are reduced.
_TOGETHER = 16


@functools.partial(jax.jit, static_argnums=(1, 2))  # otherwise compiled again at every call outside jit
def euclidean_norms(
    leaves: Sequence[Arrays], axes: tuple[Axes, ...], of: Callable[..., jax.Array] = added
) -> list[jax.Array]:
    """Return the root of the sum of squares of each leaf along axes, in float64, with axes kept with size 1.

    Args:
      leaves: the terms of each leaf, float arrays of at most 32 bits.
      axes: the reduced axes of each leaf.
      of: the function of the terms that is measured, entry by entry; a term may have size 1 along the axes.
    """

    def on_cpu(leaves: Sequence[Arrays]) -> list[jax.Array]:
        squares = _SQUARES._replace(of=lambda *terms: _square(of(*terms)))
        return [jnp.sqrt(total) for total in reduce_in_slices(squares, leaves, axes)]

    def on_tpu(leaves: Sequence[Arrays]) -> list[jax.Array]:
        sums = _on_tpu([of(*terms) for terms in leaves], axes)
        return side_by_side(lambda a, b, *far: _root(_widened_sum(a, b), *far), *sums)

    def on_gpu(leaves: Sequence[Arrays]) -> list[jax.Array]:
        xs = [of(*terms) for terms in leaves]
        sums = lax.cond(on_single_device(), lambda xs: _on_gpu(xs, axes), lambda xs: _plain(xs, axes), xs)
        return [jnp.sqrt(total) for total in sums]

    return lax.platform_dependent([tuple(terms) for terms in leaves], cpu=on_cpu, tpu=on_tpu, default=on_gpu)


@jax.jit
def euclidean_norm(xs: Arrays) -> jax.Array:
    """Return the root of the sum of squares of all entries of several arrays, as a float64 scalar."""

    def on_cpu(xs: Arrays) -> list[jax.Array]:
        return reduce_in_slices(_SQUARES, [(x,) for x in xs], [all_axes(x) for x in xs]) if xs else []

    def on_gpu(xs: Arrays) -> list[jax.Array]:
        return _on_gpu(xs, [all_axes(x) for x in xs])

    def total(sums: Callable[[Arrays], list[jax.Array]], xs: Arrays) -> jax.Array:
        def grouped(xs: Arrays) -> jax.Array:
            large, small = [x for x in xs if is_large(x)], [x for x in xs if not is_large(x)]
            groups = [jnp.sum(paired([_square(x) for x in group], jnp.add)) for group in alike(small)]
            return _sum([*sums(large), *groups])

        return lax.cond(
            on_single_device(), grouped, lambda xs: _sum(_plain(xs, [all_axes(x) for x in xs])), xs
        )

    def on_tpu(xs: Arrays) -> jax.Array:
        a, b, *far = _on_tpu(xs, [all_axes(x) for x in xs])
        return _root(_sum(side_by_side(_widened_sum, a, b)), *map(_sum, far))

    return lax.platform_dependent(
        tuple(xs),
        cpu=lambda xs: jnp.sqrt(total(on_cpu, xs)),
        tpu=on_tpu,
        default=lambda xs: jnp.sqrt(total(on_gpu, xs)),
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(4,))
@functools.partial(jax.jit, static_argnums=4)
def inner_product(a: jax.Array, b: jax.Array, unit_a: jax.Array, unit_b: jax.Array, axes: Axes) -> jax.Array:
    """Return the sum of products of a / unit_a and b / unit_b along axes, which are kept with size 1.

    The result is float64; a and b are real, of one dtype of at least 32 bits. The units are constant powers
    of two, and divided by them the arrays have norms of at most 2: a TPU has no range for other products.
    """

    def scaled(x: jax.Array, unit: jax.Array) -> jax.Array:
        return x * lax.convert_element_type(1 / unit, x.dtype)

    def in_float64(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(wide(scaled(a, unit_a)) * wide(scaled(b, unit_b)), axis=axes, keepdims=True)

    def on_cpu(a: jax.Array, b: jax.Array) -> jax.Array:
        if a.dtype == np.float64:
            return in_float64(a, b)
        products = _SQUARES._replace(of=lambda a, b: wide(a) * wide(b))
        return reduce_in_slices(products, [(a, b)], [axes])[0] / unit_a / unit_b

    def in_pairs(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = (lax.convert_element_type(scaled(*x), np.float32) for x in ((a, unit_a), (b, unit_b)))
        return lax.cond(on_single_device(), alone, on_many, a, b)

    def alone(a: jax.Array, b: jax.Array) -> jax.Array:
        return _widened_sum(*pairs.sum_signed(pairs.product(a, b), axes))

    def on_many(a: jax.Array, b: jax.Array) -> jax.Array:
        return functools.reduce(jnp.add, map(wide, inner_products_of_blocks(a, b, axes)))

    return lax.platform_dependent(a, b, cpu=on_cpu, tpu=in_pairs, default=in_float64)


@inner_product.defjvp
def _inner_product_jvp(axes: Axes, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (a, b, unit_a, unit_b), (da, db, *_) = primals, tangents
    with jax.enable_x64(True):  # JAX may run this later, in the user's mode
        slopes = wide(da) / unit_a * (wide(b) / unit_b) + wide(a) / unit_a * (wide(db) / unit_b)
        return inner_product(a, b, unit_a, unit_b, axes), jnp.sum(slopes, axis=axes, keepdims=True)


@functools.partial(jax.jit, static_argnums=1)
def sum_of_sizes(x: jax.Array, axes: Axes) -> jax.Array:
    """Return the sum of absolute values along axes, in float64, with the axes kept with size 1."""

    def in_pairs(x: jax.Array) -> jax.Array:
        size = lax.convert_element_type(jnp.abs(x), np.float32)
        a, b = pairs.reduce_sum([(size, jnp.zeros_like(size))], axes)
        return _widened_sum(a.reshape(kept(x, axes)), b.reshape(kept(x, axes)))

    def in_float64(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.abs(wide(x)), axis=axes, keepdims=True)

    return lax.platform_dependent(x, tpu=in_pairs, default=in_float64)


def _sum(values: Arrays) -> jax.Array:
    return jnp.sum(jnp.stack([value.reshape(()) for value in values]))


def all_axes(x: jax.Array) -> Axes:
    """Return all axes of an array."""
    return tuple(range(x.ndim))


def _square(x: jax.Array) -> jax.Array:
    return wide(x) * wide(x)


_SQUARES = Reduction(_square, jnp.add, lambda x, axes: jnp.sum(x, axis=axes, keepdims=True))


def alike(xs: Arrays) -> list[list[jax.Array]]:
    """Group arrays of the same shape, so that hundreds of them compile to a few operations."""
    groups: dict[Any, list[jax.Array]] = {}
    for x in xs:
        groups.setdefault((x.shape, x.dtype, split_by_type(x)), []).append(x)
    return [group[i : i + _TOGETHER] for group in groups.values() for i in range(0, len(group), _TOGETHER)]


def _plain(xs: Arrays, axes: Sequence[Axes]) -> list[jax.Array]:
    """Return the sums of squares in float64, which several devices add in one all-reduce."""
    return [_SQUARES.along(_square(x), along) for x, along in zip(xs, axes, strict=True)]


def _on_tpu(xs: Arrays, axes: Sequence[Axes]) -> list[list[jax.Array]]:
    """Return the sums of squares of all arrays: the first parts, the second parts, and those of `FAR`."""

    def of_all(sums: Callable[[jax.Array, Axes], Arrays], xs: Arrays) -> list[list[jax.Array]]:
        each = [sums(x, along) for x, along in zip(xs, axes, strict=True)]
        return [list(part) for part in zip(*each, strict=True)]

    alone, on_many = (functools.partial(of_all, sums) for sums in (sums_of_squares, sums_of_blocks))
    return lax.cond(on_single_device(), alone, on_many, xs)


def _on_gpu(xs: Arrays, axes: Sequence[Axes]) -> list[jax.Array]:
    """Return the sums of squares, on one GPU."""
    # For units, XLA would store the pairs before it adds them.
    in_pairs = [is_large(x) and len(along) == x.ndim for x, along in zip(xs, axes, strict=True)]
    each = list(zip(xs, axes, in_pairs, strict=True))
    columns = list(zip(*(_scaled_pair_sums(x, along) for x, along, yes in each if yes), strict=True))
    large = iter(side_by_side(_one_sum, *columns) if columns else ())
    return [next(large) if yes else _SQUARES.along(_square(x), along) for x, along, yes in each]


def _scaled_pair_sums(x: jax.Array, axes: Axes) -> list[jax.Array]:
    """Return sums of squares of small, medium and large entries, as no single scale fits all of them."""
    x = lax.convert_element_type(x, np.float32)
    size, nothing = jnp.abs(x), jnp.zeros_like(x)
    squares = []
    for (least, scale), (most, _) in zip(_SCALES, (*_SCALES[1:], (jnp.inf, 1)), strict=True):
        chosen = (size >= np.float32(least)) & ((size < np.float32(most)) | (most == jnp.inf))
        squares.append(pairs.square(jnp.where(chosen, x * np.float32(scale), nothing)))
    # The largest size is needed too, as pairs cannot be infinite, and no sum contains NaN.
    return [part.reshape(kept(x, axes)) for part in pairs.reduce_sum(squares, axes, [size])]


def _one_sum(*parts: jax.Array) -> jax.Array:
    *sums, largest = parts
    scales = [scale for _, scale in _SCALES]
    each = zip(sums[::2], sums[1::2], scales, strict=True)
    total = functools.reduce(jnp.add, [(wide(a) + wide(b)) / scale**2 for a, b, scale in each])
    return jnp.where(largest < jnp.inf, total, wide(largest))


def _widened_sum(a: jax.Array, b: jax.Array) -> jax.Array:
    return wide(a) + wide(b)


def _root(total: jax.Array, small: jax.Array, large: jax.Array) -> jax.Array:
    """Return the root of a sum in the range of pairs, else that of scaled squares, increased by its error."""
    below, above = (jnp.sqrt(s) / scale for s, scale in zip((small, large), FAR, strict=True))
    instead = jnp.where(small < jnp.inf, below, above)
    most = float(np.finfo(np.float32).max)
    larger = jnp.where(instead < most, jnp.minimum(wide(instead) * (1 + _PLAIN_ERROR), most), wide(instead))
    return jnp.where((total >= _LEAST) & (total < _MOST), jnp.sqrt(total), larger)


@jax.jit
def stored(x: jax.Array, turn: Turn) -> jax.Array:
    """Return a large array that is read more than once, stored in memory; on a CPU, once its turn has come.

    On other platforms, XLA would recompute it for each reader, from a donated buffer that is already reused.
    """
    if not is_large(x):
        return x
    now = np.ones((), np.float32) if turn is None else turn
    return lax.platform_dependent(x, now, cpu=in_turn, default=lambda x, _: lax.optimization_barrier(x))


def once(x: jax.Array, leaf: jax.Array) -> jax.Array:
    """Return values that all entries of a leaf read, computed only once if the leaf is large."""
    if not is_large(leaf):
        return x
    return lax.platform_dependent(x, cpu=computed_once, default=lambda x: x)
