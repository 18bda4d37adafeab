"""What the comparisons with other libraries share: the numbers agree to float32 rounding.

Bounds are kept to, not met, so a clipped entry may be up to 4 ulp smaller than a peer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

SEEDS = pytest.mark.parametrize("seed", range(5))
# 4 ulp of ours, and as many of a sum in float32 of a few hundred squares.
CLOSE = {"rtol": 2e-6, "atol": 1e-37}


def draw(seed: int) -> tuple[list[np.ndarray], float]:
    """Three leaves whose scales differ by orders of magnitude, and a bound that they exceed or not."""
    random = np.random.default_rng(seed)
    shapes = [(5, 3, 4), (7,), (6, 8)]
    scales = 10.0 ** random.uniform(-2, 2, len(shapes))
    leaves = [
        (random.standard_normal(s) * scale).astype(np.float32)
        for s, scale in zip(shapes, scales, strict=True)
    ]
    norm = np.sqrt(sum(np.sum(leaf.astype(np.float64) ** 2) for leaf in leaves))
    return leaves, float(norm * random.uniform(0.05, 1.5))


def assert_close(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), **CLOSE)
