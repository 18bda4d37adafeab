"""How far a result may be from its oracle."""

from typing import Any

import jax.numpy as jnp

# Capped singular values come from some twenty products of matrices, which all round.
BY_PRODUCTS = {"spectral_cap": 4e-5}


def tolerance(dtype: Any, terms: int = 1) -> float:
    """Return the relative error that a dtype and the number of terms in a sum explain.

    A factor is up to 2^-20 smaller than the bound / norm, and its own arithmetic rounds
    a few times by 2^-24: 2e-6 in all. Sums in float32 add at most one rounding for each
    level of a tree of sums, whose leaves are blocks of some 64 terms added one after
    another: 2^-24 * (64 + log2(terms)), of which a random walk reaches less than half.
    In 16 bits the margin is half an ulp more, and each entry rounds by half an ulp:
    eps.
    """
    info = jnp.finfo(dtype)
    levels = min(terms, 64) + max(terms, 1).bit_length()
    return 2e-6 + 2.0**-25 * levels + (float(info.eps) if info.bits < 32 else 0)


def tolerance_of(row: Any, dtype: Any) -> float:
    """Return the relative error of a row of the contract."""
    return BY_PRODUCTS.get(row.name) or tolerance(dtype)


def below_of(row: Any, dtype: Any) -> float:
    """Return how far below its bound a row may end: a share of the bound."""
    return below(dtype) + BY_PRODUCTS.get(row.name, 0)


def below(dtype: Any) -> float:
    """Return how far below its bound a norm may end: a share of the bound."""
    info = jnp.finfo(dtype)
    return 2e-6 if info.bits >= 32 else (1e-3 if info.nmant == 10 else 1e-2)
