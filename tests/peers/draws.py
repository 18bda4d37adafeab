"""Random gradients, and how close to each other two libraries are."""

from typing import Any

import numpy as np
import pytest

# A seed draws entries of one size, and a bound that is this share of the norm of all
# leaves.
SHARES = (0.01, 0.3, 0.9, 1.5)
SEEDS = pytest.mark.parametrize("seed", range(len(SHARES)))


def draw(seed: int) -> tuple[list[np.ndarray], float]:
    """Draw leaves of rank 1 to 4, of sizes 1e-3 to 1e3, and a bound for their norm."""
    rng = np.random.default_rng(seed)
    size = 10 ** rng.uniform(-3, 3)
    shapes = [(5, 6), (7,), (3, 3, 2, 4), (4, 2, 3)]
    leaves = [
        (size * rng.standard_normal(shape)).astype(np.float32) for shape in shapes
    ]
    return leaves, float(SHARES[seed] * norm_of(leaves))


def norm_of(leaves: Any) -> float:
    """Measure all leaves as one vector, in float64."""
    return float(np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in leaves)))


def assert_close(ours: Any, theirs: Any, extra: float = 0) -> None:
    """Compare leaf by leaf: a factor of ours is up to 2^-20 smaller, and both round
    some times by 2^-24.
    """
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-6 + extra)
