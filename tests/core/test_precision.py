"""Norms are right in every precision: they neither overflow, nor underflow, nor stagnate."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from clipjax import functional
from tests.support.oracles import exact_norm, exact_tree_norm
from tests.support.properties import with_wide_bounds
from tests.support.trees import DTYPES


def test_a_sum_over_many_bfloat16_leaves_does_not_stagnate() -> None:
    tree = [np.ones(1000, DTYPES["bf16"])] * 100
    clipped, norm = jax.jit(lambda tree: functional.clip_by_global_norm(tree, 1.0))(tree)
    assert float(norm) == pytest.approx(math.sqrt(100_000), rel=1e-6)
    # Each entry loses at most one of bfloat16's steps of 2^-7 to the rounding towards zero.
    assert 1 - 2**-7 < exact_tree_norm(clipped) <= 1


def clip(bound: Any, grads: Any) -> Any:
    tx = clipjax.clip_by_global_norm(bound)
    clipped, state = tx.update(grads, tx.init(grads))
    return clipped, state[0].norm


CLIPS = {"eager": clip, "jit": with_wide_bounds(clip)}
EXTREMES = [
    (1e20, 100, "f32", 1.0),
    (3e38, 1000, "f32", 1e-3),
    (1e-25, 100, "f32", 1e-26),
    (1e30, 64, "bf16", 1.0),
    (50.0, 100, "f16", 1.0),
    (6e4, 1000, "f16", 1.0),
    (1e-4, 10, "f16", 1e-4),
    (6e-8, 9, "f16", 1e-7),
]


@pytest.mark.parametrize(
    ("entry", "count", "kind", "bound", "how"),
    [
        pytest.param(*case, how, marks=[pytest.mark.full] * (how == "eager" and case != EXTREMES[1]))
        for case in EXTREMES
        for how in CLIPS
    ],
)
def test_norms_neither_overflow_nor_underflow(
    entry: float, count: int, kind: str, bound: float, how: str
) -> None:
    grads = np.zeros(1000, DTYPES[kind])  # of one shape: zeros do not count
    grads[:count] = entry
    clipped, norm = CLIPS[how](bound, grads)
    expected = exact_tree_norm(grads)
    if expected < np.finfo(np.float32).max:
        assert float(norm) == pytest.approx(float(expected), rel=1e-6)
    # A subnormal float16 has steps of 6e-8, which is what an entry may lose.
    info = jnp.finfo(DTYPES[kind])
    lost = float(info.eps) + np.sqrt(count) * float(info.smallest_subnormal) / bound
    assert bound * (1 - lost) * (1 - 4e-7) <= exact_tree_norm(clipped) <= bound


def test_mixed_dtypes_keep_theirs() -> None:
    grads = {kind: np.full(4, 3, dtype) for kind, dtype in DTYPES.items()}
    clipped = CLIPS["jit"](1.0, grads)[0]
    assert {kind: x.dtype for kind, x in clipped.items()} == {kind: x.dtype for kind, x in grads.items()}
    assert 0.98 < exact_tree_norm(clipped) <= 1


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_powers_beyond_the_range_of_float64_are_scaled(size: float) -> None:
    """Of float64 leaves already for p = 2; of float32 leaves for large p."""
    with jax.enable_x64(True):
        narrow = (size * np.random.default_rng(0).standard_normal(100)).astype(np.float32)
        wide = narrow.astype(np.float64) ** 9  # up to 1e270, and down to 1e-270
        norms = jax.jit(
            lambda narrow, wide: (
                [functional.global_norm(narrow, p) for p in (7, 20)]
                + [functional.global_norm({"a": wide, "b": narrow}, p) for p in (2, 3)]
            )
        )(narrow, wide)
    expected = [exact_norm(narrow, None, p) for p in (7, 20)]
    expected += [exact_norm(np.concatenate([wide, narrow.astype(np.float64)]), None, p) for p in (2, 3)]
    np.testing.assert_allclose(norms, np.asarray(expected, np.float64), rtol=1e-6)
