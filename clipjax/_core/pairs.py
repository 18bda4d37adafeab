"""Sums of squares in pairs of float32: nearly as accurate as float64, for devices without fast float64.

A pair (sum, rest) stands for the sum of both. The square of a number is a pair: the square of its first 12
bits, which a float32 represents exactly, and the rest of the square. Two pairs are added without losing what
the sum of their first parts rounds off (Dekker, 1971; Knuth's two-sum, with a minimum and a maximum instead
of its branch).

Error: for an exact sum of squares t, at most 2**-33 t after up to 2**16 additions in a row, and 2**-31 t
after 2**20 of them. The rest of a square, less than 2**-11 of the square, is rounded three times, which
contributes 3 * 2**-35; each addition contributes a little. Flushing to 0 contributes 2**-126 for each entry:
less than 2**-34 t if t is at least 2**-60, for up to 2**31 entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Pair: TypeAlias = tuple[jax.Array, jax.Array]


def square(x: jax.Array) -> Pair:
    """Return the square of each float32 entry, as a pair."""
    head = lax.reduce_precision(x, 8, 11)
    return head * head, (x - head) * (x + head)


def add(a: Pair, b: Pair) -> Pair:
    """Add two pairs whose first parts are not negative."""
    total = a[0] + b[0]
    lost = jnp.minimum(a[0], b[0]) - (total - jnp.maximum(a[0], b[0]))
    rest = (a[1] + b[1]) + lost
    new = total + rest
    return new, rest - (new - total)


def product(a: jax.Array, b: jax.Array) -> Pair:
    """Return the product of float32 entries, as a pair."""
    head_a, head_b = lax.reduce_precision(a, 8, 11), lax.reduce_precision(b, 8, 11)
    return head_a * head_b, (a - head_a) * b + head_a * (b - head_b)


def add_signed(a: Pair, b: Pair) -> Pair:
    """Add two pairs of any signs."""
    total = a[0] + b[0]
    of_b = total - a[0]
    lost = (a[0] - (total - of_b)) + (b[0] - of_b)
    rest = (a[1] + b[1]) + lost
    new = total + rest
    return new, rest - (new - total)


def sum_signed(x: Pair, axes: tuple[int, ...]) -> Pair:
    """Add pairs of any signs along axes, which are kept with size 1."""
    nothing = np.zeros((), np.float32)
    found = lax.reduce(x, (nothing, nothing), lambda a, b: add_signed((a[0], a[1]), (b[0], b[1])), axes)
    high, low = (jnp.expand_dims(part, axes) for part in found)
    return high, low


def reduce_sum(
    pairs: Sequence[Pair], axes: tuple[int, ...], sizes: Sequence[jax.Array] = ()
) -> tuple[jax.Array, ...]:
    """Add pairs along axes, which are removed, and find the largest of `sizes`, all in one pass.

    Returns the two parts of each sum in turn, and then the largest of each of `sizes`.
    """
    summed = 2 * len(pairs)

    def add_all(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        sums = [add((a[i], a[i + 1]), (b[i], b[i + 1])) for i in range(0, summed, 2)]
        return (*(part for pair in sums for part in pair), *map(jnp.maximum, a[summed:], b[summed:]))

    parts = (*(part for pair in pairs for part in pair), *sizes)
    return tuple(lax.reduce(parts, tuple(np.zeros((), np.float32) for _ in parts), add_all, axes))
