"""Inside the bound nothing moves, bit for bit; projecting twice is projecting once."""

from __future__ import annotations

import math
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import pytest

from tests.contract.cases import (
    DEFAULTS,
    FLOATS,
    VARIANTS,
    covering,
    default,
    every_variant,
    every_variant_and_dtype,
    like,
    metric,
    problem,
    project,
    run,
    with_entry,
    with_identity,
)
from tests.support.trees import floats, same_bits
from tests.support.walk import (
    MEASURING,
    NORMALIZING,
    STEPPING,
    TURNING,
    Case,
    bound_parameters,
    is_projection,
    is_smooth,
    required,
)

PROJECTIONS = [case for case in DEFAULTS if is_projection(default(case))]


@every_variant
def test_the_update_works(case: Case) -> None:
    """Guards the others: with these gradients and weights there is something to do."""
    grads, params = problem()
    grads = with_entry(grads, math.nan)
    updates = run(with_identity(case), grads, params)[0]
    assert same_bits(updates, grads) == (case.name in MEASURING)


def delicate(dtype: Any) -> dict[str, Any]:
    """Small entries that a multiplication by 1 keeps, but not one by a reciprocal, or an addition."""
    info = ml_dtypes.finfo(dtype)
    # XLA on CPU flushes the subnormals of float32 and bfloat16 in any arithmetic; float16's are
    # computed in float32, where they are normal.
    smallest = info.smallest_subnormal if dtype == np.float16 else info.smallest_normal
    values = np.array([-0.0, 0.0, smallest, -smallest, 3 * smallest, 1e-4], dtype)
    return {
        "dense": {"bias": values[[0, 4, 5]], "kernel": np.concatenate([values, -values]).reshape(4, 3)},
        "scale": values[3],
    }


def nothing_moves(case: Case, tx: Any, dtype: Any) -> None:
    tree = delicate(dtype)
    if is_projection(tx) or case.name in STEPPING:  # which do not move where the optimizer does not
        start = tree
        if is_projection(tx):
            start = project(tx, tree)
            for _ in range(200 if "rate" in case.options else 0):  # goes a part of the way at a time
                start = project(tx, start)
            assert same_bits(project(tx, start), start), "the projection is not idempotent"
        after = optax.apply_updates(start, run(tx, like(start, 0), start)[0])
        for a, b in zip(floats(after), floats(start), strict=True):
            np.testing.assert_array_equal(a, b)
    else:
        # Weights far inside their own bound, where there is one, have nothing to say.
        weights = like(tree, 0 if "project" in case.options or case.name in TURNING else 1)
        updates, state = run(tx, tree, weights)
        back = jax.tree.map(lambda u, g: np.asarray(u).astype(g.dtype), updates, tree)
        assert same_bits(back, tree)
        assert metric(state, "clipped_fraction", "nonfinite_count") == 0


@every_variant_and_dtype
def test_inside_the_bound_nothing_moves(case: Case, dtype: Any) -> None:
    if case.name in NORMALIZING:
        pytest.skip("it has no bound to be inside of")
    if is_smooth(case):
        pytest.skip("smooth: what is inside moves too, but for an infinite bound")
    bounds = {}
    if "high" in case.options and not is_projection(default(case)):  # the first bound is the lower limit
        bounds = {"bound": -1.0, "high": 1.0}
    nothing_moves(case, with_identity(case, **bounds), dtype)


def wide_open(case: Case) -> dict[str, float]:
    named = [key for key in bound_parameters(case.name) if key in required(case.name)]
    return {key: math.inf for key in named if key not in ("low", "high")}


@covering(
    "case, dtype",
    [case for case in VARIANTS if wide_open(case)],
    FLOATS[:2],
    keeps=lambda case: not case.options,
)
def test_inside_an_infinite_bound_nothing_moves(case: Case, dtype: Any) -> None:
    nothing_moves(case, with_identity(case, **wide_open(case)), dtype)


@pytest.mark.parametrize("case", PROJECTIONS, ids=str)
def test_a_projection_leaves_the_updates_of_weights_inside_alone(case: Case) -> None:
    tx = default(case)
    params = project(tx, jax.tree.map(lambda x: np.float32(0.01) * x, problem()[1]))
    grads = jax.tree.map(lambda x: np.float32(1e-4) * np.asarray(x), params)
    after = optax.apply_updates(params, grads)
    if same_bits(project(tx, after), after):
        assert same_bits(run(tx, grads, params)[0], grads)
