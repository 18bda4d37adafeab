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
from tests.support.oracles import exact_tree_norm
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
    return clipped, state.seen.norm


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
