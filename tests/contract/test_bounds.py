"""A bound is a number, an array or a schedule; 0, infinity and below zero work; a bad one raises early."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.contract.cases import (
    BOUNDED,
    MAIN_BOUNDS,
    default,
    every_bound,
    every_case,
    like,
    marked,
    problem,
    step,
    update,
    with_identity,
)
from tests.support.trees import flat, same_bits
from tests.support.walk import (
    ARGUMENTS,
    SIGNED,
    TURNING,
    Case,
    build,
    is_projection,
    parameters,
    required,
)


@pytest.mark.parametrize("value", [-1, -0.5, math.nan, True, "1", None, 1j, np.array([1.0, -1.0])], ids=repr)
@every_bound(BOUNDED)
def test_bad_bounds_raise_when_built(case: Case, parameter: str, value: Any) -> None:
    negative = not isinstance(value, str | bool | complex | None) and np.min(value) < 0
    if negative and (case.name, parameter) in SIGNED:
        pytest.skip("a limit of entries may be negative")
    if value is None and parameters(case.name)[parameter].default is None:
        pytest.skip("None is the default")
    with pytest.raises((ValueError, TypeError)) as caught:
        build(case, **{parameter: value})
    message = str(caught.value)
    # clip_by_value calls its only argument `bound`.
    assert parameter in message or (parameter == "low" and "bound" in message)
    assert repr(value) in message


def of_entries(case: Case) -> bool:
    """Whether the bounds are limits of entries, whose order and signs are their own."""
    return {"low", "high"} <= set(required(case.name))


def possible(parameter: str, value: float) -> bool:
    """Whether the limits of entries are in order with this value among them."""
    limits = {**ARGUMENTS, parameter: value}
    return limits["low"] <= limits["high"] and not math.isinf(limits["low"])


@every_bound(MAIN_BOUNDS)
def test_zero_and_infinite_and_negative_bounds_work(case: Case, parameter: str) -> None:
    grads, params = problem()
    still, projects = like(grads, 0), is_projection(default(case))

    @jax.jit
    def with_traced(bound: Any) -> Any:
        tx = with_identity(case, **{parameter: bound})
        after = optax.apply_updates(params, step(tx, grads, params)[0])
        bounded = optax.apply_updates(params, step(tx, still, params)[0]) if projects else None
        return after, bounded if projects else step(tx, grads, params)[0]

    @jax.jit
    def with_known(grads: Any, params: Any) -> Any:
        """0 as every kind of bound; and, where they are possible, 1 and infinity."""
        kinds = {0: [0.0, jnp.float32(0), np.float64(0), lambda _: 0.0], 1: [1.0], math.inf: [math.inf]}
        return {
            str(value): [
                optax.apply_updates(params, step(with_identity(case, **{parameter: bound}), grads, params)[0])
                for bound in bounds
            ]
            for value, bounds in kinds.items()
            if not of_entries(case) or possible(parameter, value)
        }

    found = with_known(grads, params)
    assert found
    for value, results in found.items():
        expected = with_traced(float(value))[0]
        assert np.isfinite(flat(expected)).all()
        for after in results:
            # Known and traced bounds are different programs: XLA folds a constant into the factor.
            np.testing.assert_allclose(flat(after), flat(expected), rtol=2.5e-7, atol=1e-7)
            # Of one bound, 0 leaves nothing to round.
            assert value == "1" or of_entries(case) or same_bits(after, expected), value
    if of_entries(case):
        return
    # What only the running program knows to be below zero never flips a sign.
    result = flat(with_traced(-1.0)[1])
    assert np.isfinite(result).all()
    assert (result * flat(params if projects else grads) >= 0).all()
    assert np.isnan(flat(with_traced(math.nan)[1])).any(), "a traced NaN bound must show"


OF_NORMS = [pair for pair in MAIN_BOUNDS if not of_entries(pair[0])]


@every_bound(OF_NORMS)
def test_schedules_that_reach_zero_and_go_below(case: Case, parameter: str) -> None:
    def schedule(count: Any) -> Any:
        return 1.0 - count  # 1, 0, -1

    tx = with_identity(case, **{parameter: schedule})
    grads, params = problem()
    start = grads
    if is_projection(tx):
        grads, start = like(grads, 0), params
    state = tx.init(params)
    results = []
    for _ in range(4):
        updates, state = update(tx, grads, state, params)
        result = optax.apply_updates(params, updates) if is_projection(tx) else updates
        results.append(result)
        assert np.isfinite(flat(result)).all()
        assert case.name in TURNING or (flat(result) * flat(start) >= 0).all(), "a sign flipped"
    assert same_bits(results[1], results[2])  # a bound below zero is zero
    assert not same_bits(results[0], results[1])
    assert same_bits(results[2], results[3])
    if is_projection(tx):
        direct = jax.jit(tx.__call__)
        for count in range(3):
            called = direct(params, jnp.asarray(count))
            np.testing.assert_allclose(flat(called), flat(results[count]), rtol=1e-6, atol=1e-6)
        with pytest.raises(ValueError, match=rf"{parameter} is a schedule"):
            tx(params)


@marked([(pair, pair[0].name in ("clip_by_global_norm", "max_norm")) for pair in OF_NORMS], "case, parameter")
def test_schedules_need_no_jit(case: Case, parameter: str) -> None:
    grads, params = jax.tree.map(jnp.asarray, problem())
    below, zero = (
        step(with_identity(case, **{parameter: lambda _, value=value: value}), grads, params)[0]
        for value in (-1.0, 0.0)
    )
    assert same_bits(below, zero)


@every_case
def test_projections_need_params_as_a_link(case: Case) -> None:
    tx = default(case)
    grads, params = problem()
    if not is_projection(tx):
        pytest.skip("not a projection")
    with pytest.raises(ValueError, match="params"):
        tx.update(grads, tx.init(params))


def test_bounded_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match=re.escape("nonfinite must be one of")):
        clipjax.bounded(optax.sgd(1.0), nonfinite="no")
    with pytest.raises(TypeError, match="optimizer"):
        clipjax.bounded(1.0)
    with pytest.raises(ValueError, match=r"optimizer.*project="):
        clipjax.bounded(clipjax.max_norm(1.0))
    with pytest.raises(ValueError, match=r"clip.*project="):
        clipjax.bounded(optax.sgd(1.0), clip=clipjax.max_norm(1.0))
    with pytest.raises(TypeError, match="project"):
        clipjax.bounded(optax.sgd(1.0), project=clipjax.clip_by_norm(1.0))
    with pytest.raises(TypeError, match="optimizer"):
        clipjax.skip_nonfinite(None)
