"""The one door to what platforms do differently: measuring, to float64 accuracy, at the speed of memory.

Which way is taken is known when a program is lowered for what it is to run on, not while it is traced.

A CPU adds in float64: it takes no longer than memory does. So does a GPU; but where it adds all of a large
array, it adds pairs of float32, since many GPUs have a thirtieth of their speed in float64. A TPU, which has
neither float64 nor a range beyond that of float32, adds pairs, too, and measures once more what was out of
range.
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

from clipjax._core import pairs
from clipjax._core.blocks import FAR, inner_products_of_blocks, kept, pair_sum, sums_of_blocks
from clipjax._core.mesh import split_by_type, varying
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
        return reduce_in_slices(_SQUARES, [(x,) for x in xs], [_all(x) for x in xs]) if xs else []

    def on_gpu(xs: Arrays) -> list[jax.Array]:
        return _on_gpu(xs, [_all(x) for x in xs])

    def total(sums: Callable[[Arrays], list[jax.Array]], xs: Arrays) -> jax.Array:
        def grouped(xs: Arrays) -> jax.Array:
            large, small = [x for x in xs if is_large(x)], [x for x in xs if not is_large(x)]
            groups = [jnp.sum(paired([_square(x) for x in group], jnp.add)) for group in _alike(small)]
            return _sum([*sums(large), *groups])

        return lax.cond(on_single_device(), grouped, lambda xs: _sum(_plain(xs, [_all(x) for x in xs])), xs)

    def on_tpu(xs: Arrays) -> jax.Array:
        def alone(xs: Arrays) -> jax.Array:
            sums = side_by_side(_widened_sum, *zip(*(pair_sum(x, _all(x)) for x in xs), strict=True))
            return _in_range([_sum(sums)], xs)[0].reshape(())

        def on_many(xs: Arrays) -> jax.Array:
            sums = zip(*(_sums_on_many(x, _all(x)) for x in xs), strict=True)
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


def _all(x: jax.Array) -> Axes:
    return tuple(range(x.ndim))


def _square(x: jax.Array) -> jax.Array:
    return wide(x) * wide(x)


_SQUARES = Reduction(_square, jnp.add, lambda x, axes: jnp.sum(x, axis=axes, keepdims=True))


def _alike(xs: Arrays) -> list[list[jax.Array]]:
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


def by_kind(
    function: Callable[..., Sequence[Any]], kinds: Sequence[Any], *columns: Sequence[Any]
) -> list[Any]:
    """Apply `function(kind, *columns)` to the leaves of each kind; the results are in the order of leaves."""
    found: list[Any] = [None] * len(kinds)
    for kind in dict.fromkeys(kinds):
        places = [i for i, other in enumerate(kinds) if other == kind]
        results = function(kind, *([column[i] for i in places] for column in columns))
        for i, result in zip(places, results, strict=True):
            found[i] = result
    return found


def side_by_side(function: Callable[..., Any], *columns: Sequence[jax.Array]) -> list[Any]:
    """Apply an elementwise function to small arrays of many leaves: on one accelerator to all at once.

    Hundreds of small computations take long to compile for a TPU, where each operation on float64 becomes
    dozens, and are as many kernels on a GPU. For a CPU it takes longer to compile hundreds of slices.

    Args:
      function: of one array from each column, which have one shape, to a tree of such arrays.
      *columns: an array for each leaf.
    """

    def apart(*columns: Sequence[jax.Array]) -> list[Any]:
        return [function(*leaf) for leaf in zip(*columns, strict=True)]

    def of_a_kind(_: Any, *columns: Sequence[jax.Array]) -> list[Any]:
        found = function(*(jnp.concatenate([x.ravel() for x in column]) for column in columns))
        shapes = [x.shape for x in columns[0]]
        ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()

        def leaf(start: int, end: int, shape: tuple[int, ...]) -> Any:
            return jax.tree.map(lambda x: lax.slice_in_dim(x, start, end).reshape(shape), found)

        return [leaf(*each) for each in zip([0, *ends[:-1]], ends, shapes, strict=True)]

    def together(*columns: Sequence[jax.Array]) -> list[Any]:
        return by_kind(
            of_a_kind, [tuple(map(varying, leaf)) for leaf in zip(*columns, strict=True)], *columns
        )

    if len(columns[0]) < 2 or any(split_by_type(x) or not isinstance(x.size, int) for x in columns[0]):
        return apart(*columns)
    return lax.platform_dependent(
        *(list(column) for column in columns),
        cpu=apart,
        default=lambda *columns: lax.cond(on_single_device(), together, apart, *columns),
    )


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


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def largest(
    xs: Arrays,
    axes: tuple[Axes, ...],
    of: Callable[[jax.Array], jax.Array] = jnp.abs,
    at_least: float = 0.0,
) -> list[jax.Array]:
    """The largest of(x) of each array along its axes, in float64, the axes kept as 1; NaN if any entry is.

    Args:
      xs: real or complex arrays.
      axes: the reduced axes of each.
      of: what is compared, entry by entry.
      at_least: what the result is at least.
    """

    def along(x: jax.Array, axes: Axes) -> jax.Array:
        return jnp.max(x, axis=axes, keepdims=True, initial=at_least)

    def along_on_cpu(x: jax.Array, axes: Axes) -> jax.Array:
        # XLA (jaxlib 0.10.2) loses NaN in a maximum of 4,096 entries and more, but not in a sum. It is taken
        # in the other width: what a sum and a maximum share would be stored as a whole.
        other = np.float32 if x.dtype == np.float64 else np.float64
        sizes = jnp.abs(lax.convert_element_type(x, other))  # without signs: inf - inf is NaN
        total = jnp.sum(sizes, axis=axes, keepdims=True)
        return jnp.where(jnp.isnan(total), jnp.nan, along(x, axes))

    def on_cpu(xs: Arrays) -> list[jax.Array]:
        others = [i for i, x in enumerate(xs) if x.dtype.itemsize >= 4]
        how = Reduction(of, jnp.maximum, along_on_cpu)
        reduced = iter(reduce_in_slices(how, [(xs[i],) for i in others], [axes[i] for i in others]))
        each = zip(xs, axes, strict=True)
        return [wide(along_narrow(x, a) if x.dtype.itemsize < 4 else next(reduced)) for x, a in each]

    def along_narrow(x: jax.Array, axes: Axes) -> jax.Array:
        # What 16-bit entries are converted to XLA would store where two operations share it.
        apart = jnp.abs(lax.convert_element_type(lax.optimization_barrier(x), np.float32))
        total = jnp.sum(apart, axis=axes, keepdims=True)
        return jnp.where(jnp.isnan(total), jnp.nan, along(of(wide(x)), axes))

    def default(xs: Arrays) -> list[jax.Array]:
        return [wide(along(of(x), each)) for x, each in zip(xs, axes, strict=True)]

    return lax.platform_dependent(tuple(xs), cpu=on_cpu, default=default)


@functools.partial(jax.jit, static_argnums=(1, 2))
def largest_of_all(
    xs: Arrays, of: Callable[[jax.Array], jax.Array] = jnp.abs, at_least: float = 0.0
) -> jax.Array:
    """The largest of(x) of all entries of several arrays, as a float64 scalar; NaN if any entry is."""

    def together(xs: Arrays, of: Callable[[jax.Array], jax.Array]) -> jax.Array:
        found = [value.reshape(()) for value in largest(xs, tuple(_all(x) for x in xs), of, at_least)]
        return max_of(jnp.stack(found), at_least)

    def grouped(xs: Arrays) -> jax.Array:
        large, small = [x for x in xs if is_large(x)], [x for x in xs if not is_large(x)]
        groups = [paired([of(x) for x in group], jnp.maximum) for group in _alike(small)]
        parts = [together(part, each) for part, each in ((large, of), (groups, jnp.positive)) if part]
        return together(parts, jnp.positive)

    if len(xs) == 1:
        return together(xs, of)
    return lax.cond(on_single_device(), grouped, lambda xs: together(xs, of), tuple(xs))


def max_of(x: jax.Array, at_least: float = 0.0) -> jax.Array:
    """The largest entry, in float64, and at least so much; NaN if any entry is."""
    return largest([x], (_all(x),), jnp.positive, at_least)[0].reshape(())


def min_of(x: jax.Array, at_most: float = jnp.inf) -> jax.Array:
    """The smallest entry, in float64, and at most so much; NaN if any entry is."""
    return -max_of(-x, at_least=-at_most)


def largest_of_rows(xs: Arrays, names: Sequence[Sequence[str]]) -> jax.Array:
    """The largest number of each row of arrays without NaN, each over its mesh axes, in float64."""

    def over_all(xs: Arrays) -> jax.Array:
        found = [jnp.max(x, axis=range(1, x.ndim), initial=-jnp.inf) for x in xs]
        over_devices = [lax.pmax(x, tuple(over)) if over else x for x, over in zip(found, names, strict=True)]
        return jnp.max(jnp.stack([wide(x) for x in over_devices]), axis=0)

    def in_float32(xs: Arrays) -> jax.Array:  # TPUs have no such reduction of float64
        return wide(over_all([lax.convert_element_type(x, np.float32) for x in xs]))

    return lax.platform_dependent(tuple(xs), tpu=in_float32, default=over_all)


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
