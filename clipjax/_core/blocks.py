"""Sums of squares in pairs of float32, on one TPU and on several.

XLA cannot reduce pairs over devices: it gathers them, leaf by leaf. So on several TPUs a leaf is summed in
blocks, some of which are on each device. The sums of blocks are split at the same bits into pieces, which
float32 adds without rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from clipjax._core import pairs
from clipjax._core.mesh import split_by_type, varying

Axes: TypeAlias = tuple[int, ...]

# Entries are multiplied by the first if a sum is below the range of pairs, by the second if it is above.
FAR = np.float32(2.0**70), np.float32(2.0**-70)
# The largest number of blocks per axis, over which devices can split it; the number of bits in a piece of a
# block's sum, such that float32 adds the pieces of 4,096 blocks without rounding; and 2**20 by the bit above
# each piece, from the largest float32 down to what may be rounded off the smallest sum in range.
_BLOCKS, _BITS = 64, 12
_PIECES = np.float32(2.0) ** np.arange(20 - 128, 20 + 100, _BITS, dtype=np.float32)


def sums_of_squares(x: jax.Array, axes: Axes) -> list[jax.Array]:
    """Return the sum of squares along axes as a pair, and those of entries times each of `FAR`, in float32.

    All are found in one pass over x, and the axes are kept with size 1.
    """
    x = lax.convert_element_type(x, np.float32)
    a, b = pairs.reduce_sum([pairs.square(x)], axes)
    far = [jnp.sum(jnp.square(x * scale), axis=axes, keepdims=True) for scale in FAR]
    return [a.reshape(kept(x, axes)), b.reshape(kept(x, axes)), *far]


def sums_of_blocks(x: jax.Array, axes: Axes) -> list[jax.Array]:
    """Return the sum of squares along axes as a pair, and those of entries times each of `FAR`, in float32.

    All sums of a leaf are sent as one array, since XLA combines up to 256 arrays into an all-reduce.
    """
    last = x.ndim - 1
    y, within, over = _cut(x, [a for a in axes if a < max(last, 1)])
    a, b, *far = sums_of_squares(y, within)
    if 0 < last in axes:  # after the other axes, as splitting its tiles copies the array
        (a, within, _), (b, *_), *others = (_cut(z, [a.ndim - 1]) for z in (a, b, *far))
        over = (*over, a.ndim - 2) if a.ndim > y.ndim else over
        a, b = (z.reshape(kept(a, within)) for z in pairs.reduce_sum([(a, b)], within))
        far = [jnp.sum(z, axis=within, keepdims=True) for z, *_ in others]
    # What is above the bits of each piece.
    beyond = (a * np.float32(2.0**-20))[None] * _PIECES.reshape(-1, *[1] * a.ndim)
    pieces = jnp.trunc(jnp.where(beyond < 2.0**24, beyond - jnp.trunc(beyond), 0.0) * 2.0**_BITS)
    rows = jnp.concatenate([pieces, *(z[None] for z in (b, *far))])
    sums = jnp.sum(rows, axis=[axis + 1 for axis in over], keepdims=True)
    first = sums[:-3] * (2.0 ** (20 - _BITS) / _PIECES).reshape(-1, *[1] * a.ndim)
    top, rest = pairs.reduce_sum([(first, jnp.zeros_like(first))], (0,))
    found = top, rest + sums[-3], sums[-2], sums[-1]
    return [z.reshape(kept(x, axes)) for z in found]


def inner_products_of_blocks(a: jax.Array, b: jax.Array, axes: Axes) -> list[jax.Array]:
    """Return four float32 arrays whose sum is the sum of products along axes, which are kept with size 1.

    The norms of the arrays must be at most 2. A block's product, in [-4, 4], is split into two pieces of 12
    bits and a rest; float32 adds the pieces of 4,096 blocks without rounding.
    """
    last = a.ndim - 1
    (x, within, over), (y, *_) = (_cut(z, [i for i in axes if i < max(last, 1)]) for z in (a, b))
    high, low = pairs.sum_signed(pairs.product(x, y), within)
    if 0 < last in axes:
        (high, within, more), (low, *_) = (_cut(z, [z.ndim - 1]) for z in (high, low))
        over = (*over, *more)
        high, low = pairs.sum_signed((high, low), within)
    first = jnp.round(high * 2.0**10) * 2.0**-10
    second = jnp.round((high - first) * 2.0**22) * 2.0**-22
    rows = jnp.stack([first, second, high - first - second, low])
    sums = jnp.sum(rows, axis=[axis + 1 for axis in over], keepdims=True)
    return [z.reshape(kept(a, axes)) for z in sums]


def _cut(x: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, Axes, Axes]:
    """Split axes into blocks. Return the array, the axes within blocks, and the axes over blocks."""
    if varying(x) or not isinstance(x.size, int):
        return x, tuple(axes), ()
    split = split_by_type(x)
    shape: list[int] = []
    spec: list[Any] = []
    within, over = [], []
    for axis, n in enumerate(x.shape):
        names, blocks = split[axis] if split else None, 1
        if axis in axes:
            if split:  # a block for each device
                of = jax.typeof(x).sharding.mesh.shape
                blocks = math.prod(of[name] for name in ((names,) if isinstance(names, str) else names or ()))
            else:  # that do not split a tile of 8 rows
                blocks = math.gcd(n, max(1, min(_BLOCKS, n // 8 if axis >= x.ndim - 2 else n)))
            within.append(len(shape) + 1)
            over.append(len(shape))
            shape.append(blocks)
            spec.append(names)
        shape.append(n // blocks)
        spec.append(None if axis in axes else names)
    placed = NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec)) if split else None
    return lax.reshape(x, shape, out_sharding=placed), tuple(within), tuple(over)


def kept(x: jax.Array, axes: Axes) -> list[int]:
    """Return the shape in which axes have size 1."""
    return [1 if a in axes else n for a, n in enumerate(x.shape)]
