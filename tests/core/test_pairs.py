"""Sums of squares in pairs of float32: how far they are from the exact sum, in whatever order they are added.

Judged in NumPy's extended precision, or with integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from clipjax._core import pairs
from clipjax._core.platforms import NORM_ERROR
from tests.support.trees import DTYPES

# Three roundings of the rests of squares, each by 2**-24 of at most 2**-11 of the sum.
OF_SQUARES = 3 * 2.0**-35
# What one addition rounds off, as a share of the sum.
OF_ADDITION = 2.0**-46
ROWS, COLUMNS = 4096, 8


@jax.jit
def summed(x: Any) -> Any:
    """The sums along axis 0, in XLA's own order."""
    return pairs.reduce_sum([pairs.square(lax.convert_element_type(x, np.float32))], (0,))


@jax.jit
def one_after_the_other(x: Any) -> Any:
    """The sums along axis 0, each entry added to the sum of those before it."""
    squares = pairs.square(lax.convert_element_type(x, np.float32))
    nothing = (jnp.zeros(x.shape[1:], jnp.float32), jnp.zeros(x.shape[1:], jnp.float32))
    return lax.scan(lambda total, square: (pairs.add(total, square), None), nothing, squares)[0]


ORDERS = {"XLA's": summed, "one after the other": one_after_the_other}


def exact(x: np.ndarray) -> np.ndarray:
    """The sums of squares along axis 0, in extended precision: of float32, only the additions are rounded."""
    return sum(np.sum(part.astype(np.longdouble) ** 2, axis=0) for part in np.array_split(x, 16))  # type: ignore[return-value]


def error(found: Any, x: np.ndarray) -> float:
    """The largest relative error."""
    total, rest = (np.asarray(part).astype(np.longdouble) for part in found)
    right = exact(x)
    return float(np.max(np.abs(total + rest - right) / right))


def hard(rows: int, seed: int = 0) -> Iterator[tuple[str, np.ndarray]]:
    """Columns whose sums round badly."""
    rng = np.random.default_rng(seed)
    some = rng.uniform(1, 2, COLUMNS).astype(np.float32)
    one = np.full((rows, COLUMNS), some)
    huge = np.ones((rows, 1), np.float32)
    huge[0] = 2.0**20
    yield "all equal", one
    yield "huge, then tiny", one * huge
    yield "tiny, then huge", one * huge[::-1]
    yield "alternating", one * np.where(np.arange(rows) % 2, 1, np.float32(1e-3))[:, None]
    yield "powers of two", (2.0 ** rng.integers(-20, 20, one.shape)).astype(np.float32)
    yield "growing", one * np.exp(np.linspace(-9, 9, rows, dtype=np.float32))[:, None]
    yield "shrinking", one * np.exp(np.linspace(9, -9, rows, dtype=np.float32))[:, None]
    yield "twelve bits", (1 + rng.integers(0, 2**11, one.shape) * 2.0**-11).astype(np.float32)
    yield "just off twelve bits", one.view(np.uint32).__and__(0xFFFFF000).__or__(0x7FF).view(np.float32)


def test_every_square_is_exact_to_two_roundings_of_its_rest() -> None:
    """All 2**23 numbers of one binade; other binades are these times a power of two."""
    x = (np.arange(2**23, dtype=np.uint32) | np.uint32(0x3F800000)).view(np.float32)
    first, rest = (np.asarray(part, np.float64) for part in jax.jit(pairs.square)(x))
    square = x.astype(np.float64) ** 2  # exact, of 48 bits
    assert np.max(np.abs((first - square) + rest) / square) <= 2.0**-34
    assert np.max(np.abs(rest) / square) <= 2.0**-11


@settings(max_examples=300)
@given(
    st.lists(st.integers(2**23, 2**24 - 1), min_size=4, max_size=4),
    st.integers(0, 60),
    st.integers(0, 12),
    st.sampled_from([(1, 1), (1, -1), (-1, 1), (-1, -1)]),
)
def test_an_addition_loses_nothing_but_roundings_of_the_rests(
    mantissas: list[int], apart: int, bits: int, signs: tuple[int, int]
) -> None:
    """Of sums so far, whose rests are roundings of them, and of squares, whose rests are up to 2**-11."""
    a, b, of_a, of_b = (float(mantissa) for mantissa in mantissas)
    a, of_a = np.float32(a * 2.0**apart), np.float32(signs[0] * of_a * 2.0 ** (apart - 24 - bits))
    b, of_b = np.float32(b), np.float32(signs[1] * of_b * 2.0 ** (-12 - bits))
    right = sum(Fraction(float(part)) for part in (a, b, of_a, of_b))
    for first, second in (((a, of_a), (b, of_b)), ((b, of_b), (a, of_a))):
        total, rest = (Fraction(float(part)) for part in added(first, second))
        of_rests = 2.0**-24 * (abs(float(of_a)) + abs(float(of_b)))
        assert abs(total + rest - right) <= OF_ADDITION * right + Fraction(of_rests)
        assert abs(rest) <= Fraction(2.0**-24) * total
        assert total >= 0


added = jax.jit(pairs.add)


@pytest.mark.parametrize("order", ORDERS)
def test_hard_sums_are_as_exact_as_norms_have_to_be(order: str) -> None:
    for name, x in hard(ROWS):
        found = error(ORDERS[order](x), x)
        assert found <= OF_SQUARES + ROWS * OF_ADDITION, name
        assert found <= 2 * NORM_ERROR * (1 - NORM_ERROR), name  # the root halves it


@pytest.mark.full
@pytest.mark.parametrize("order", ORDERS)
def test_long_sums_lose_as_little_at_each_addition(order: str) -> None:
    """More than what a norm may be off by: so many additions must not follow upon each other."""
    for rows in (2**16, 2**20):
        for name, x in hard(rows):
            assert error(ORDERS[order](x), x) <= OF_SQUARES + rows * OF_ADDITION, (rows, name)


@pytest.mark.parametrize("kind", DTYPES)
@given(
    seed=st.integers(0, 2**30),
    place=st.floats(0, 1, width=16),
    decades=st.sampled_from([0.0, 1.0, 6.0]),
    zeros=st.booleans(),
)
def test_sums_of_any_scale_are_exact_to_what_squares_are_rounded_by(
    kind: str, seed: int, place: float, decades: float, zeros: bool
) -> None:
    """From 2**-60 to 2**120, and what a dtype holds of it."""
    rng = np.random.default_rng(seed)
    low, high = (-8.9, 11.7) if kind != "f16" else (-4.0, 4.0)
    size = 10.0 ** np.clip(low + place * (high - low) - decades * rng.random((ROWS, COLUMNS)), -30, high)
    size[0] = np.maximum(size[0], 10.0**low)
    x = (size * rng.choice([-1.0, 1.0], size.shape)).astype(DTYPES[kind])
    if zeros:
        x[1:] = np.where(rng.random(x[1:].shape) < 0.9, 0, x[1:])
    for order, run in ORDERS.items():
        assert error(run(x), x) <= OF_SQUARES + ROWS * OF_ADDITION, order


@pytest.mark.parametrize("shape", [(1, 3), (2, 3), (5, 0), (0, 3)])
def test_small_and_empty_arrays(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    total, rest = (np.asarray(part) for part in summed(x))
    assert total.shape == shape[1:]
    np.testing.assert_allclose(
        total.astype(np.float64) + rest, np.asarray(exact(x), np.float64), rtol=2.0**-33
    )


def test_several_sums_and_a_largest_one_in_one_pass() -> None:
    x = np.random.default_rng(0).standard_normal((6, 5, 4)).astype(np.float32)

    def both(x: Any) -> Any:
        squares = pairs.square(x)
        return pairs.reduce_sum([squares, (4 * squares[0], 4 * squares[1])], (0, 2), [jnp.abs(x)])

    *parts, largest = (np.asarray(part, np.float64) for part in jax.jit(both)(x))
    right = np.sum(x.astype(np.float64) ** 2, axis=(0, 2))
    np.testing.assert_allclose(parts[0] + parts[1], right, rtol=2.0**-33)
    np.testing.assert_allclose(parts[2] + parts[3], 4 * right, rtol=2.0**-33)
    np.testing.assert_array_equal(largest, np.max(np.abs(x), axis=(0, 2)))
