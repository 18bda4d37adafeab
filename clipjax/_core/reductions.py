"""Reducing whole arrays: as fast as memory on a CPU, and in few operations where there are many of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from clipjax._core.axes import Reduced
from clipjax._core.turns import Turn, first_entry, in_turn, is_large, is_small, turn_after

Arrays = Sequence[jax.Array]

# On a CPU, so many slices of a large leaf are read side by side; and so many small leaves reduced as one.
_SLICES = 8
_TOGETHER = 16
# A large leaf is reduced in rounds, of which each adds slices up to about so many entries: in at most so
# many rounds, since each has to be compiled.
_PARTIAL = 2**17
_ROUNDS = 4


class Reduction(NamedTuple):
    """What is reduced, and how."""

    of: Callable[[jax.Array], jax.Array]  # of an array, entry by entry
    pair: Callable[[jax.Array, jax.Array], jax.Array]  # two arrays to one, entry by entry
    along: Callable[..., jax.Array]  # one array along axes, as `jax.numpy.sum` takes them


def reduce_all(how: Reduction, xs: Arrays, terms: Arrays, axes: Reduced, turn: Turn) -> jax.Array:
    """Reduce one array, which may be the sum of `terms`, along `axes`; or all entries of several arrays."""
    if len(xs) == 1:
        return _reduced(how, xs[0], terms or xs, axes, turn)
    values = []
    for x in xs:
        if not is_small(x):
            values.append(_reduced(how, x, (x,), None, turn))
            turn = turn_after(turn, x, -jnp.abs(values[-1]))
    for alike in _alike([x for x in xs if is_small(x)]):
        values.append(how.along(_pairwise(how, [how.of(x) for x in alike])))
    return how.along(jnp.stack(values))


def _alike(xs: Arrays) -> list[list[jax.Array]]:
    """Put arrays of one shape together, so many that hundreds compile to a few operations."""
    groups: dict[Any, list[jax.Array]] = {}
    for x in xs:
        groups.setdefault((x.shape, x.dtype), []).append(x)
    return [group[i : i + _TOGETHER] for group in groups.values() for i in range(0, len(group), _TOGETHER)]


def _reduced(how: Reduction, x: jax.Array, terms: Arrays, axes: Reduced, turn: Turn) -> jax.Array:
    """Reduce one array, the sum of `terms`, along `axes`."""

    def along_axes(values: jax.Array) -> jax.Array:
        return how.along(values, axis=axes, keepdims=axes is not None)

    reduced = range(x.ndim) if axes is None else axes
    long_enough = [a for a in reduced if x.shape[a] >= 2 * _SLICES]
    # What is narrow would be widened as a whole before it is sliced.
    if not (is_large(x) and long_enough and not is_narrow(x)):
        return along_axes(how.of(x))
    axis = min(long_enough)  # of the longest pieces

    # XLA's CPU reductions take float64 at a third of the speed of memory, and are no faster for the
    # largest of float32; an elementwise operation on slices runs at memory's speed, and leaves one entry
    # in so many to the reduction. The rounding, which rounds nothing, keeps XLA from taking the slices back
    # into the reduction.
    rounds = max(1, min(_ROUNDS, x.size // (_SLICES * _PARTIAL), x.shape[axis] // (2 * _SLICES)))
    width = x.shape[axis] // (_SLICES * rounds)

    def part(start: int, stop: int) -> jax.Array:
        parts = [lax.slice_in_dim(term, start, stop, axis=axis) for term in terms]
        return how.of(functools.reduce(jnp.add, parts))

    total = along_axes(part(rounds * _SLICES * width, x.shape[axis]))
    for start in range(0, rounds * _SLICES * width, _SLICES * width):
        parts = [part(start + i * width, start + (i + 1) * width) for i in range(_SLICES)]
        partial = in_turn(_pairwise(how, parts), x, turn)
        bits = jnp.finfo(partial.dtype)
        found = along_axes(lax.reduce_precision(partial, bits.nexp, bits.nmant))
        turn = turn_after(turn, x, -jnp.abs(first_entry(found)))
        total = how.pair(total, found)
    return total


def max_of(x: jax.Array, axis: Reduced = None, keepdims: bool = False, initial: float = 0.0) -> jax.Array:
    """The largest entry, and at least `initial`; NaN if any entry is. Under `in_float64`.

    XLA's CPU compiler loses NaN in a maximum of 4,096 entries and more (jaxlib 0.10.2), but not in a sum.
    """

    def largest(x: jax.Array) -> jax.Array:
        return jnp.max(x, axis=axis, keepdims=keepdims, initial=initial)

    def on_cpu(x: jax.Array) -> jax.Array:
        # In the other width: what a sum and a maximum share would be stored as a whole.
        other = np.float32 if x.dtype == np.float64 else np.float64
        sizes = jnp.abs(lax.convert_element_type(x, other))  # without signs: inf - inf is NaN
        total = jnp.sum(sizes, axis=axis, keepdims=keepdims)
        return jnp.where(jnp.isnan(total), jnp.nan, largest(x))

    return lax.platform_dependent(x, cpu=on_cpu, default=largest)


def min_of(x: jax.Array, initial: float = jnp.inf) -> jax.Array:
    """The smallest entry, and at most `initial`; NaN if any entry is."""
    return -max_of(-x, initial=-initial)


def _pairwise(how: Reduction, values: list[jax.Array]) -> jax.Array:
    while len(values) > 1:
        odd = values[len(values) // 2 * 2 :]
        values = [how.pair(a, b) for a, b in zip(values[::2], values[1::2], strict=False)] + odd
    return values[0]


def is_narrow(x: jax.Array) -> bool:
    return x.dtype.itemsize < 4
