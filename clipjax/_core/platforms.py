"""The one door to what platforms do differently: measuring, to float64 accuracy, at the speed of memory.

Which way is taken is known when a program is lowered for what it is to run on, not while it is traced.

A CPU adds in float64: it takes no longer than memory does. So does a GPU; but where it adds all of a large
array, it adds pairs of float32, since many GPUs have a thirtieth of their speed in float64. A TPU, which has
neither float64 nor a range beyond that of float32, adds pairs, too, and measures once more what was out of
range. The largest entries are found in :mod:`clipjax._core.maxima`.
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
from clipjax._core.blocks import FAR, inner_products_of_blocks, kept, pair_sum, sums_of_blocks
from clipjax._core.mesh import split_by_type, varying
from clipjax._core.side_by_side import by_kind, side_by_side
from clipjax._core.xla_cpu import (
    Reduction,
    Turn,
    added,
    computed_once,
    in_turn,
    is_large,
    on_single_device,
    paired,
    reduce_in_slices,
)

Arrays: TypeAlias = Sequence[jax.Array]
Axes: TypeAlias = tuple[int, ...]

# How far a measured norm may be from the norm, relatively.
NORM_ERROR = 2.0**-32
# Of sums of squares, the range in which pairs of float32 keep their accuracy.
_LEAST, _MOST = 2.0**-60, 2.0**120
# On a GPU: entries from each of these sizes on are multiplied by the number beside it before they are
# squared, so that up to 2**31 of them keep their accuracy.
_SCALES = ((0.0, 2.0**80), (2.0**-40, 1.0), (2.0**23, 2.0**-65))
# How much the plain float32 norm may be off that stands on a TPU for what is out of the range of pairs.
_PLAIN_ERROR = 2.0**-12
# So many small arrays of one shape are added entry by entry before they are reduced.
_TOGETHER = 16


def wide(x: Any) -> jax.Array:
    """Convert to float64 (complex128), where 64-bit types are allowed."""
    x = jnp.asarray(x)
    return lax.convert_element_type(x, np.complex128 if jnp.iscomplexobj(x) else np.float64)


@functools.partial(jax.jit, static_argnums=1)  # else compiled anew at every call without jit
def euclidean_norms(leaves: Sequence[Arrays], axes: tuple[Axes, ...]) -> list[jax.Array]:
    """The root of the sum of squares of each leaf along its axes, in float64, with the axes kept as 1.

    Args:
      leaves: of each leaf the terms whose sum is measured, float arrays of at most 32 bits.
      axes: the reduced axes of each leaf.
    """

    def on_cpu(leaves: Sequence[Arrays]) -> list[jax.Array]:
        return [jnp.sqrt(total) for total in reduce_in_slices(_SQUARES, leaves, axes)]

    def on_tpu(leaves: Sequence[Arrays]) -> list[jax.Array]:
        def alone(xs: Arrays) -> list[jax.Array]:
            def of_a_kind(_: Any, xs: Arrays, axes: Sequence[Axes]) -> list[jax.Array]:
                sums = [pair_sum(x, along) for x, along in zip(xs, axes, strict=True)]
                return _in_range(side_by_side(_widened_sum, *zip(*sums, strict=True)), xs, axes)

            return by_kind(of_a_kind, [varying(x) for x in xs], xs, axes)

        def on_many(xs: Arrays) -> list[jax.Array]:
            return [_root_of_many(*_sums_on_many(x, along)) for x, along in zip(xs, axes, strict=True)]

        return lax.cond(on_single_device(), alone, on_many, [added(terms) for terms in leaves])

    def on_gpu(leaves: Sequence[Arrays]) -> list[jax.Array]:
        xs = [added(terms) for terms in leaves]
        sums = lax.cond(on_single_device(), lambda xs: _on_gpu(xs, axes), lambda xs: _plain(xs, axes), xs)
        return [jnp.sqrt(total) for total in sums]

    return lax.platform_dependent([tuple(terms) for terms in leaves], cpu=on_cpu, tpu=on_tpu, default=on_gpu)


@jax.jit
def euclidean_norm(xs: Arrays) -> jax.Array:
    """The root of the sum of squares of all entries of several arrays, as a float64 scalar."""

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
        def alone(xs: Arrays) -> jax.Array:
            sums = side_by_side(_widened_sum, *zip(*(pair_sum(x, all_axes(x)) for x in xs), strict=True))
            return _in_range([_sum(sums)], xs)[0].reshape(())

        def on_many(xs: Arrays) -> jax.Array:
            sums = zip(*(_sums_on_many(x, all_axes(x)) for x in xs), strict=True)
            return _root_of_many(*map(_sum, sums))

        return lax.cond(on_single_device(), alone, on_many, xs)

    return lax.platform_dependent(
        tuple(xs),
        cpu=lambda xs: jnp.sqrt(total(on_cpu, xs)),
        tpu=on_tpu,
        default=lambda xs: jnp.sqrt(total(on_gpu, xs)),
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
@functools.partial(jax.jit, static_argnums=2)
def inner_product(a: jax.Array, b: jax.Array, axes: Axes) -> jax.Array:
    """The sum of products along axes, in float64, with the axes kept as 1; of real arrays of one dtype.

    For a TPU the arrays have to be scaled, to norms of at most 2.
    """

    def in_float64(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(wide(a) * wide(b), axis=axes, keepdims=True)

    def in_pairs(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = (lax.convert_element_type(x, np.float32) for x in (a, b))
        return lax.cond(on_single_device(), alone, on_many, a, b)

    def alone(a: jax.Array, b: jax.Array) -> jax.Array:
        return _widened_sum(*pairs.sum_signed(pairs.product(a, b), axes))

    def on_many(a: jax.Array, b: jax.Array) -> jax.Array:
        return functools.reduce(jnp.add, map(wide, inner_products_of_blocks(a, b, axes)))

    return lax.platform_dependent(a, b, tpu=in_pairs, default=in_float64)


@inner_product.defjvp
def _inner_product_jvp(axes: Axes, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (a, b), (da, db) = primals, tangents
    with jax.enable_x64(True):  # JAX may ask for it later, in its own mode
        slopes = wide(da) * wide(b) + wide(a) * wide(db)
        return inner_product(a, b, axes), jnp.sum(slopes, axis=axes, keepdims=True)


@functools.partial(jax.jit, static_argnums=1)
def sum_of_sizes(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum of absolute values along axes, in float64, with the axes kept as 1."""

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
    """The axes of a whole leaf."""
    return tuple(range(x.ndim))


def _square(x: jax.Array) -> jax.Array:
    return wide(x) * wide(x)


_SQUARES = Reduction(_square, jnp.add, lambda x, axes: jnp.sum(x, axis=axes, keepdims=True))


def alike(xs: Arrays) -> list[list[jax.Array]]:
    """Put arrays of one shape together: hundreds of them compile to a few operations."""
    groups: dict[Any, list[jax.Array]] = {}
    for x in xs:
        groups.setdefault((x.shape, x.dtype, split_by_type(x)), []).append(x)
    return [group[i : i + _TOGETHER] for group in groups.values() for i in range(0, len(group), _TOGETHER)]


def _plain(xs: Arrays, axes: Sequence[Axes]) -> list[jax.Array]:
    """The sums of squares in float64, which several devices add in one all-reduce."""
    return [_SQUARES.along(_square(x), along) for x, along in zip(xs, axes, strict=True)]


def _on_gpu(xs: Arrays, axes: Sequence[Axes]) -> list[jax.Array]:
    """The sums of squares, on one GPU."""
    # Of units XLA would store the pairs before it adds them.
    in_pairs = [is_large(x) and len(along) == x.ndim for x, along in zip(xs, axes, strict=True)]
    each = list(zip(xs, axes, in_pairs, strict=True))
    columns = list(zip(*(_scaled_pair_sums(x, along) for x, along, yes in each if yes), strict=True))
    large = iter(side_by_side(_one_sum, *columns) if columns else ())
    return [next(large) if yes else _SQUARES.along(_square(x), along) for x, along, yes in each]


def _scaled_pair_sums(x: jax.Array, axes: Axes) -> list[jax.Array]:
    """Sums of squares of small, of usual and of large entries: no scale is right for all of them."""
    x = lax.convert_element_type(x, np.float32)
    size, nothing = jnp.abs(x), jnp.zeros_like(x)
    squares = []
    for (least, scale), (most, _) in zip(_SCALES, (*_SCALES[1:], (jnp.inf, 1)), strict=True):
        chosen = (size >= np.float32(least)) & ((size < np.float32(most)) | (most == jnp.inf))
        squares.append(pairs.square(jnp.where(chosen, x * np.float32(scale), nothing)))
    # The largest size, too, as no pair can be infinite; and NaN is in none of the sums.
    return [part.reshape(kept(x, axes)) for part in pairs.reduce_sum(squares, axes, [size])]


def _one_sum(*parts: jax.Array) -> jax.Array:
    *sums, largest = parts
    scales = [scale for _, scale in _SCALES]
    each = zip(sums[::2], sums[1::2], scales, strict=True)
    total = functools.reduce(jnp.add, [(wide(a) + wide(b)) / scale**2 for a, b, scale in each])
    return jnp.where(largest < jnp.inf, total, wide(largest))


def _widened_sum(a: jax.Array, b: jax.Array) -> jax.Array:
    return wide(a) + wide(b)


def _in_range(totals: Arrays, xs: Arrays, axes: Sequence[Axes] | None = None) -> list[jax.Array]:
    """The roots of sums of squares; where these have left the range of pairs, measured again, less exactly.

    Without `axes` there is one total, of all arrays together.
    """

    def plain(x: jax.Array, scale: jax.Array, along: Axes | None) -> jax.Array:
        entries = lax.convert_element_type(x, np.float32) * scale
        return jnp.sum(jnp.square(entries), axis=along, keepdims=along is not None)

    def again(totals: Arrays, xs: Arrays) -> list[jax.Array]:
        scales = [jnp.where(total < 1, *FAR) for total in totals]
        if axes is None:
            sums = [jnp.sum(jnp.stack([plain(x, scales[0], None) for x in xs]))]
        else:
            sums = [plain(*each) for each in zip(xs, scales, axes, strict=True)]
        return [jnp.sqrt(s) / k for s, k in zip(sums, scales, strict=True)]

    def not_needed(totals: Arrays, xs: Arrays) -> list[jax.Array]:
        del xs
        return [lax.convert_element_type(total, np.float32) for total in totals]

    all_fit = functools.reduce(jnp.logical_and, [jnp.all(_fits(total)) for total in totals])
    return side_by_side(_root, totals, lax.cond(all_fit, not_needed, again, list(totals), list(xs)))


def _sums_on_many(x: jax.Array, axes: Axes) -> tuple[jax.Array, ...]:
    """On one of several TPUs: the sum of squares, and that of entries far below and far above its range."""
    a, b, small, large = sums_of_blocks(x, axes)
    return _widened_sum(a, b), small, large


def _root_of_many(total: jax.Array, small: jax.Array, large: jax.Array) -> jax.Array:
    """The norm from these sums. A branch, as on one TPU, would add over the devices once more."""
    below, above = (jnp.sqrt(s) / k for s, k in zip((small, large), FAR, strict=True))
    return _root(total, jnp.where(small < jnp.inf, below, above))


def _fits(total: jax.Array) -> jax.Array:
    return (total >= _LEAST) & (total < _MOST)


def _root(total: jax.Array, instead: jax.Array) -> jax.Array:
    """The root of a sum in the range of pairs, else a norm in float32, made larger by its error."""
    most = float(np.finfo(np.float32).max)
    larger = jnp.where(instead < most, jnp.minimum(wide(instead) * (1 + _PLAIN_ERROR), most), wide(instead))
    return jnp.where(_fits(total), jnp.sqrt(total), larger)


@jax.jit
def stored(x: jax.Array, turn: Turn) -> jax.Array:
    """The values of a large array that is read more than once, stored: on a CPU when its turn has come.

    Elsewhere XLA would compute it for each of its readers, from what a donated buffer no longer holds.
    """
    if not is_large(x):
        return x
    now = np.ones((), np.float32) if turn is None else turn
    return lax.platform_dependent(x, now, cpu=in_turn, default=lambda x, _: lax.optimization_barrier(x))


def once(x: jax.Array) -> jax.Array:
    """The values, which many entries read, computed once."""
    return lax.platform_dependent(x, cpu=computed_once, default=lambda x: x)
