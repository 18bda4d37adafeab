"""Sums of squares in pairs of float32, on one TPU and on several.

XLA cannot reduce pairs over devices: it gathers them, leaf by leaf. So on several TPUs a leaf is added in
blocks, of which each device has some, and the blocks in float32: their sums are cut at the same bits into
pieces, which it adds without rounding.
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

# What entries are multiplied by where a sum is below and above the range of pairs.
FAR = np.float32(2.0**70), np.float32(2.0**-70)
# Into how many blocks an axis is cut at most, over which it can be split; how many bits are in a piece of
# their sums, of which float32 adds those of 4,096 blocks without rounding; and 2**20 by the bit above each
# piece, from the largest float32 down to what may be rounded off the smallest sum in range.
_BLOCKS, _BITS = 64, 12
_PIECES = np.float32(2.0) ** np.arange(20 - 128, 20 + 100, _BITS, dtype=np.float32)


def pair_sum(x: jax.Array, axes: Axes) -> pairs.Pair:
    """The sum of squares along axes, which are kept as 1."""
    a, b = pairs.reduce_sum([pairs.square(lax.convert_element_type(x, np.float32))], axes)
    return a.reshape(kept(x, axes)), b.reshape(kept(x, axes))


def sums_of_blocks(x: jax.Array, axes: Axes) -> list[jax.Array]:
    """The pair of the sum of squares along axes, and that of entries multiplied by each of `FAR`, in float32.

    All sums of a leaf are sent as one array, since XLA takes up to 256 arrays into an all-reduce.
    """
    last = x.ndim - 1
    y, within, over = _cut(lax.convert_element_type(x, np.float32), [a for a in axes if a < max(last, 1)])
    a, b = pair_sum(y, within)
    far = [jnp.sum(jnp.square(y * scale), axis=within, keepdims=True) for scale in FAR]
    if 0 < last in axes:  # after the others, as cutting through its tiles copies
        (a, within, _), (b, *_), *others = (_cut(z, [a.ndim - 1]) for z in (a, b, *far))
        over = (*over, a.ndim - 2) if a.ndim > y.ndim else over
        a, b = (z.reshape(kept(a, within)) for z in pairs.reduce_sum([(a, b)], within))
        far = [jnp.sum(z, axis=within, keepdims=True) for z, *_ in others]
    beyond = (a * np.float32(2.0**-20))[None] * _PIECES.reshape(
        -1, *[1] * a.ndim
    )  # above the bits of a piece
    pieces = jnp.trunc(jnp.where(beyond < 2.0**24, beyond - jnp.trunc(beyond), 0.0) * 2.0**_BITS)
    rows = jnp.concatenate([pieces, *(z[None] for z in (b, *far))])
    sums = jnp.sum(rows, axis=[axis + 1 for axis in over], keepdims=True)
    first = sums[:-3] * (2.0 ** (20 - _BITS) / _PIECES).reshape(-1, *[1] * a.ndim)
    top, rest = pairs.reduce_sum([(first, jnp.zeros_like(first))], (0,))
    found = top, rest + sums[-3], sums[-2], sums[-1]
    return [z.reshape(kept(x, axes)) for z in found]


def inner_products_of_blocks(a: jax.Array, b: jax.Array, axes: Axes) -> list[jax.Array]:
    """Four float32 arrays whose sum is the sum of products along axes, which are kept as 1.

    For arrays whose norms are at most 2. A block's product, in [-4, 4], is cut into two pieces of 12 bits, of
    which float32 adds those of 4,096 blocks without rounding, and the rest.
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
    """Cut axes into blocks: the array, the axes within blocks, and those over them."""
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
            else:  # through no tile of 8 rows
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
    """The shape with axes of 1."""
    return [1 if a in axes else n for a, n in enumerate(x.shape)]
