"""Reducing whole arrays: as fast as memory on a CPU, and in few operations where there are many of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._axes import Reduced
from clipjax._turns import Turn, in_turn, is_large, is_small, turn_after

Arrays = Sequence[jax.Array]

# On a CPU, so many slices of a large leaf are read side by side; and so many small leaves reduced as one.
_SLICES = 8
_TOGETHER = 16
# A large leaf is added up to about so many entries, which the cache holds, before they are reduced: in a
# loop over blocks, which takes longer to compile, and is not worth it for fewer blocks. (Of a loop that
# runs once XLA makes none, and copies what it would have carried.)
_PARTIAL = 2**16
_FEWEST_BLOCKS = 3


class Reduction(NamedTuple):
    """What is reduced, and how."""

    of: Callable[[jax.Array], jax.Array]  # of an array, entry by entry
    pair: Callable[[jax.Array, jax.Array], jax.Array]  # two arrays to one, entry by entry
    along: Callable[..., jax.Array]  # one array along axes, as `jax.numpy.sum` takes them


def reduce_all(
    how: Reduction, xs: Arrays, terms: Arrays, axes: Reduced, turn: Turn
) -> tuple[jax.Array, Arrays]:
    """Reduce one array, which may be the sum of `terms`, along `axes`; or all entries of several arrays.

    Returns the arrays, too: what overwrites one should read it from here (see `_reduced`).
    """
    if len(xs) == 1:
        reduced, x = _reduced(how, xs[0], terms, axes, turn)
        return reduced, (x,)
    values = []
    for x in xs:
        if not is_small(x):
            values.append(_reduced(how, x, (), None, turn)[0])
            turn = turn_after(turn, x, -jnp.abs(values[-1]))
    for alike in _alike([x for x in xs if is_small(x)]):
        values.append(how.along(_pairwise(how, [how.of(x) for x in alike])))
    return how.along(jnp.stack(values)), xs


def _alike(xs: Arrays) -> list[list[jax.Array]]:
    """Put arrays of one shape together, so many that hundreds compile to a few operations."""
    groups: dict[Any, list[jax.Array]] = {}
    for x in xs:
        groups.setdefault((x.shape, x.dtype), []).append(x)
    return [group[i : i + _TOGETHER] for group in groups.values() for i in range(0, len(group), _TOGETHER)]


def _reduced(
    how: Reduction, x: jax.Array, terms: Arrays, axes: Reduced, turn: Turn
) -> tuple[jax.Array, jax.Array]:
    """Reduce one array, which may be the sum of `terms`, along `axes`; and return it, read."""

    def along_axes(values: jax.Array) -> jax.Array:
        return how.along(values, axis=axes, keepdims=axes is not None)

    reduced = range(x.ndim) if axes is None else axes
    long_enough = [a for a in reduced if x.shape[a] >= 2 * _SLICES]
    # What is narrow would be widened as a whole before it is sliced.
    if not (is_large(x) and long_enough and not is_narrow(x)):
        return along_axes(how.of(x)), x
    axis = min(long_enough)  # of the longest pieces

    # XLA's CPU reductions take float64 at a third of the speed of memory, and are no faster for the
    # largest of float32; an elementwise operation on slices runs at memory's speed. It goes over the array
    # block by block, and leaves few entries to the reduction, which the cache still holds.
    length = x.shape[axis]
    width = max(1, _PARTIAL * length // x.size)
    blocks = length // (_SLICES * width)
    if blocks < _FEWEST_BLOCKS:
        width, blocks = length // _SLICES, 1

    def part(arrays: Arrays, start: Any, size: int) -> jax.Array:
        parts = [lax.dynamic_slice_in_dim(a, start, size, axis=axis) for a in arrays]
        return how.of(functools.reduce(jnp.add, parts))

    def block(arrays: Arrays, i: Any) -> jax.Array:
        starts = [(i * _SLICES + k) * width for k in range(_SLICES)]
        return _pairwise(how, [part(arrays, start, width) for start in starts])

    def add_block(i: Any, carry: tuple[jax.Array, Arrays]) -> tuple[jax.Array, Arrays]:
        # XLA gives the memory of what a loop has read to nobody but who reads it from the loop. The barrier
        # keeps it from seeing that the loop changes nothing, and that it could be read from before.
        partial, arrays = carry
        return how.pair(partial, block(arrays, i)), lax.optimization_barrier(arrays)

    arrays = tuple(terms) or (x,)
    first = in_turn(block(arrays, 0), x, turn)
    # The rounding, which rounds nothing, keeps XLA from taking the slices back into the reduction.
    bits = jnp.finfo(first.dtype)
    partial = lax.reduce_precision(first, bits.nexp, bits.nmant)
    if blocks > 1:
        partial, arrays = lax.fori_loop(np.int32(1), np.int32(blocks), add_block, (partial, arrays))
    total = along_axes(partial)
    done = blocks * _SLICES * width
    if done < length:
        total = how.pair(total, along_axes(part(arrays, done, length - done)))
    return total, x if terms else arrays[0]


def _pairwise(how: Reduction, values: list[jax.Array]) -> jax.Array:
    while len(values) > 1:
        odd = values[len(values) // 2 * 2 :]
        values = [how.pair(a, b) for a, b in zip(values[::2], values[1::2], strict=False)] + odd
    return values[0]


def is_narrow(x: jax.Array) -> bool:
    return x.dtype.itemsize < 4
