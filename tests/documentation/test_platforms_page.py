"""The page docs/platforms.md: its error analysis of pairs of float32, carried out in NumPy."""

from __future__ import annotations

import numpy as np

from tests.support import ROOT

PAGE = (ROOT / "docs" / "platforms.md").read_text(encoding="utf-8")
Pair = tuple[np.ndarray, np.ndarray]


def head(x: np.ndarray) -> np.ndarray:
    """The first 12 bits of float32 entries, rounded to the nearest, ties to even."""
    bits = x.view(np.uint32)
    bits = (bits + np.uint32(2**11 - 1) + ((bits >> np.uint32(12)) & np.uint32(1))) & ~np.uint32(2**12 - 1)
    return bits.view(np.float32)


def square(x: np.ndarray) -> Pair:
    return head(x) * head(x), (x - head(x)) * (x + head(x))


def add(a: Pair, b: Pair) -> Pair:
    total = a[0] + b[0]
    rest = (a[1] + b[1]) + (np.minimum(a[0], b[0]) - (total - np.maximum(a[0], b[0])))
    new = total + rest
    return new, rest - (new - total)


def off(pair: Pair, exact: np.ndarray) -> np.ndarray:
    """The relative error, in float64: a sum of two float32 numbers that overlap little is exact there."""
    return np.abs((pair[0].astype(np.float64) + pair[1]) / exact - 1)


def in_a_chain(squares: list[Pair]) -> Pair:
    total = (np.zeros_like(squares[0][0]), np.zeros_like(squares[0][0]))
    for each in squares:
        total = add(total, each)
    return total


def test_the_square_of_every_mantissa() -> None:
    x = np.arange(2**23, 2**24, dtype=np.uint32).astype(np.float32) / np.float32(2**23)
    exact = x.astype(np.float64) ** 2
    pair = square(x)
    assert (pair[0] == head(x).astype(np.float64) ** 2).all()
    assert (np.abs(pair[1]) <= 2.0**-11 * exact).all()
    errors = off(pair, exact)
    assert 2.0**-34.1 < errors.max() <= 2.0**-34
    # Added when the rest is as large as it gets: two roundings of that rest, of half a unit each.
    assert (errors + np.spacing(np.abs(pair[1])) / exact).max() <= 2.0**-33
    worst = x[np.argsort(errors)[-256:]]
    chain = in_a_chain([square(worst)] * 4096)
    assert 2.0**-34.1 < off(chain, 4096 * worst.astype(np.float64) ** 2).max() < 2.0**-33.9
    assert "2⁻³⁴ t\n(4,096 of them)" in PAGE


def test_random_entries_in_a_chain() -> None:
    x = np.random.default_rng(0).standard_normal((16384, 64)).astype(np.float32)
    chain = in_a_chain([square(row) for row in x])
    assert off(chain, np.sum(x.astype(np.float64) ** 2, axis=0)).max() < 2.0**-39
    assert "2⁻³⁹ t at most" in PAGE


def test_rests_stay_small() -> None:
    x = np.random.default_rng(1).standard_normal((256, 64)).astype(np.float32)
    total, rest = in_a_chain([square(row) for row in x])
    assert (np.abs(rest) <= 2.0**-24 * total).all()


def test_what_makes_up_for_errors() -> None:
    """The two roundings, and a norm that is off by 2**-34 in the decision and in what was measured."""
    shrunk = (1 - 2.0**-23 - 2.0**-33) * (1 + 2.0**-24) ** 2
    assert shrunk * (1 + 2.0**-33) < 1
