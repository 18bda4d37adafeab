"""The limits of projections: arrays and schedules, traced limits out of order, what is no limit; metrics."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import optax
import pytest

import clipjax
from tests.support.oracles import exact_norm
from tests.support.trees import same_bits
from tests.support.weights import like, step_with


def f32(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32)


def test_limits_of_entries_may_be_arrays_and_schedules() -> None:
    w = f32([[0.5, 5.0], [-3.0, 20.0]])
    project = clipjax.box(f32([-1.0, 0.0]), f32([1.0, 10.0]))
    scheduled = clipjax.box(lambda n: -1.0 - n, lambda n: 1.0 + n)

    @jax.jit
    def of(w: Any, step: Any) -> Any:
        state = project.update(like(w, 0), project.init(w), w)[1]
        return project(w), clipjax.metrics(state), scheduled(w, step)

    # The second is inside, and of the same shape: no leaf is compiled twice.
    for weights, clipped in ((w, 1), (f32([[0.5, 5.0], [0.5, 5.0]]), 0)):
        after, seen, at_one = of(weights, 1)
        assert seen["box/clipped_fraction"] == clipped
        assert seen["box/norm"] == np.abs(weights).max()
        assert seen["box/scale"] == np.abs(after).max() / np.abs(weights).max()
        if clipped:
            np.testing.assert_array_equal(after, [[0.5, 5.0], [-1.0, 10.0]])
            np.testing.assert_array_equal(at_one, [[0.5, 2.0], [-2.0, 2.0]])
    with pytest.raises(
        ValueError, match=r"high must broadcast to shape \(3,\), for the array; got an array of shape \(2,\)"
    ):
        jax.eval_shape(project.__call__, np.zeros(3, np.float32))


def test_limits_of_norms_and_rates_may_be_arrays_and_schedules() -> None:
    kernel = f32([[3.0, 0.3], [4.0, 0.4]])
    each = clipjax.min_max_norm(f32([1.0, 2.0]), np.asarray([[2.0, 2.0]]))
    half = clipjax.min_max_norm(lambda n: 1.0 * n, lambda n: 2.0 * n, rate=lambda n: 0.5 * n)
    over = clipjax.min_max_norm(1.0, 2.0, rate=lambda n: 1.0 + n)  # a rate above 1 is 1

    @jax.jit
    def called(w: Any, step: Any) -> Any:
        return each(w), half(w, step), over(w, step), clipjax.min_max_norm(1.0, 2.0)(w)

    by_unit, on_the_way, beyond, there = called(kernel, 1)
    np.testing.assert_allclose(np.linalg.norm(by_unit, axis=0), [2.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(on_the_way, axis=0), [3.5, 0.75], rtol=1e-6)
    assert same_bits(beyond, there)

    @jax.jit
    def step(w: Any, state: Any) -> Any:
        updates, state = half.update(like(w, 0), state, w)
        return optax.apply_updates(w, updates), state

    state, norms = half.init(kernel), []
    for _ in range(3):
        after, state = step(kernel, state)
        norms.append(np.linalg.norm(after, axis=0))
    np.testing.assert_allclose(norms, [[5.0, 0.5], [3.5, 0.75], [4.0, 2.0]], rtol=1e-6)


@pytest.mark.parametrize("make", [clipjax.min_max_norm, clipjax.box], ids=["min_max_norm", "box"])
def test_the_upper_limit_holds_where_a_traced_lower_one_is_above_it(make: Any) -> None:
    w = f32([[0.1], [0.2]])
    after = jax.jit(lambda low, high: make(low, high)(w))(3.0, 1.0)
    assert exact_norm(after, 0) <= 1 if make is clipjax.min_max_norm else (np.asarray(after) == 1).all()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: clipjax.min_max_norm(2.0, 1.0), "low must not be above high, got low=2.0 and high=1.0"),
        (lambda: clipjax.min_max_norm(-1.0, 1.0), "low must be at least 0, got -1.0"),
        (lambda: clipjax.min_max_norm(math.inf, math.inf), "low must be finite, got inf"),
        (lambda: clipjax.min_max_norm(0.0, 1.0, rate=1.5), "rate must be at most 1, got 1.5"),
        (lambda: clipjax.min_max_norm(0.0, 1.0, rate=-0.5), "rate must be at least 0, got -0.5"),
        (lambda: clipjax.min_max_norm(0.0, 1.0, rate=math.nan), "rate must not be NaN, got nan"),
        (lambda: clipjax.min_max_norm(0.0, 1.0, rate="1"), "rate must be a number.*got '1'"),
        (lambda: clipjax.min_max_norm(0.0, 1.0, axes=1.5), "axes must be ints.*got 1.5"),
        (lambda: clipjax.unit_norm(axes="kernel"), "axes must be ints.*got 'kernel'"),
        (lambda: clipjax.box(1.0, -1.0), "low must not be above high, got low=1.0 and high=-1.0"),
        (lambda: clipjax.box(np.array([0.0, 2.0]), 1.0), "low must not be above high, got low=array"),
    ],
)
def test_bad_arguments_raise_when_built(make: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        make()


# --------------------------------------------------------------------------------------------------
# Metrics, and what the link rounds.


def test_metrics_of_units() -> None:
    w = f32([[3.0, 0.3, 0.9], [4.0, 0.4, 1.2]])  # norms 5, 0.5, 1.5
    project = clipjax.min_max_norm(1.0, 2.0)

    @jax.jit
    def of(w: Any) -> Any:
        (measured,) = project.measure({"kernel": w}, None)
        assert measured.path == "kernel"
        return clipjax.metrics(project.update(like(w, 0), project.init(w), w)[1]), project(w), measured[1:4]

    seen, done, measured = of(w)
    assert seen["min_max_norm/norm"] == 5
    np.testing.assert_allclose(seen["min_max_norm/scale"], 0.4, rtol=1e-6)
    np.testing.assert_allclose(seen["min_max_norm/violation"], 3, rtol=1e-6)
    assert seen["min_max_norm/clipped_fraction"] == 1
    value, low, high = map(np.ravel, measured)
    np.testing.assert_allclose(value, [5, 0.5, 1.5], rtol=1e-7)
    np.testing.assert_allclose(low, 1, rtol=1e-6)
    np.testing.assert_array_equal(high, 2)
    seen = of(done)[0]
    assert seen["min_max_norm/clipped_fraction"] == seen["min_max_norm/violation"] == 0


def test_metrics_of_entries() -> None:
    w = {"a": f32([-4.0, 0.5]), "b": f32([9.0])}
    projects = {
        "box": clipjax.box(0.0, 1.0, where="a"),
        "non_negative": clipjax.non_negative(where="a"),
    }

    @jax.jit
    def of_each(w: Any) -> Any:
        return {k: clipjax.metrics(p.update(like(w, 0), p.init(w), w)[1]) for k, p in projects.items()}

    for name, seen in of_each(w).items():
        assert seen[f"{name}/norm"] == seen[f"{name}/violation"] == 4
        np.testing.assert_allclose(seen[f"{name}/scale"], 0.125)
        assert seen[f"{name}/clipped_fraction"] == 1
        (measured,) = projects[name].measure(w, None)
        np.testing.assert_array_equal(measured.value, w["a"])
        np.testing.assert_array_equal(measured.low, 0)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_step_that_is_flushed_to_zero_is_no_nan(sign: int) -> None:
    """Between numbers this small the difference is subnormal: the link takes a normal step inwards."""
    for after in both_links(f32([[sign * 2e-38], [1.0]]), f32([[0.0], [0.1]])):
        after = np.asarray(after, np.float64)
        assert abs(after[0, 0]) <= 2e-38
        assert 1 - 1e-6 <= exact_norm(after) <= 1


both_links = jax.jit(lambda w, u: [step_with(p, w, u) for p in (clipjax.max_norm(1.0), clipjax.unit_norm())])
