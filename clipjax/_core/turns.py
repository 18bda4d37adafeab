"""Leaf after leaf: an order that keeps XLA on a CPU from holding what all leaves need at once.

XLA's scheduler for CPUs starts on every leaf as early as it can. What each leaf needs for a while (an
update that is read twice, partial sums) is then in memory for all of them together, in fresh pages
at every step, which cost more than the arithmetic. A turn makes a leaf wait for the one before it, so
that the same memory serves both: it is a scalar that is 1, computed from the leaf before in a way
that XLA cannot see through, and the next leaf is divided by it, which changes no bit.

Elsewhere memory is not allocated anew at every step, and leaves run side by side: there are no turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Turn: TypeAlias = jax.Array | None

# What is smaller fits the cache.
_LARGE = 2**17


def is_large(x: Any) -> bool:
    """Whether a leaf is worth waiting for: on a CPU that is one device, and from 131,072 entries on."""
    return jax.default_backend() == "cpu" and jax.local_device_count() == 1 and x.size >= _LARGE


def on_one_device() -> bool:
    """Whether nothing is spread over devices, so that what different leaves have may be put together."""
    return jax.device_count() == 1


def is_small(x: Any) -> bool:
    """Whether a leaf is mostly overhead, and may be put together with others."""
    return on_one_device() and x.size < _LARGE


def turn_after(turn: Turn, x: Any, at_most_one: jax.Array) -> Turn:
    """The turn of what comes after `x`, from a scalar that is computed last for x, and at most 1 or NaN."""
    if not is_large(x):
        return turn
    last = lax.stop_gradient(lax.convert_element_type(at_most_one, np.float32))
    return jnp.where(last > 1, last, np.float32(1) if turn is None else turn)


def first_entry(x: jax.Array) -> jax.Array:
    """One entry, which is there when all are."""
    return lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())


def turn_at_start(leaves: Sequence[Any], at_most_one: jax.Array) -> Turn:
    """The first turn, from a scalar that was there before; None if no leaf is large."""
    large = [x for x in leaves if is_large(x)]
    return turn_after(None, large[0], at_most_one) if large else None


def in_turn(value: jax.Array, leaf: Any, turn: Turn) -> jax.Array:
    """Return a value, bit for bit, when the turn of its leaf has come.

    To XLA a division is expensive: what is read more than once it stores, and only once.
    """
    if turn is None or not is_large(leaf):
        return value
    if jnp.iscomplexobj(value):  # whose division by 1 would lose the sign of a zero
        return lax.complex(in_turn(value.real, leaf, turn), in_turn(value.imag, leaf, turn))
    return value / lax.convert_element_type(turn, value.dtype)
