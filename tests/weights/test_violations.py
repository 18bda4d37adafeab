"""What projections would still change, unit by unit."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clipjax.weights.box import box
from clipjax.weights.norms import max_norm, min_max_norm, unit_norm
from clipjax.weights.spectral import spectral_cap
from clipjax.weights.violations import violations

RNG = np.random.default_rng(0)


def non_negative(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.maximum(x, 0), tree)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("axes", [0, (0, 1), None, (0, 2)])
def test_units_of_norms(axes: Any, dtype: str) -> None:
    """Each unit outside is found, by its index, with its norm, and no other."""
    w = RNG.normal(size=(4, 5, 6))
    w[1, 2] = 0
    w = jnp.asarray(w, dtype)
    sizes = np.abs(np.asarray(w).astype(np.complex128))
    norms = np.sqrt(np.sum(sizes**2, axis=axes, keepdims=True))
    bound = float(np.median(norms)) * 0.9
    projection = max_norm(bound, axes={"w": axes})
    found = violations({"w": w}, projection)
    assert len(found) == (norms > bound).sum()
    for each in found:
        before = np.linalg.norm(eval(f"sizes{each.unit}"))  # as NumPy writes it
        assert each.before == pytest.approx(before)
        assert each.before > bound
        assert each.after == pytest.approx(
            bound, rel=2e-6 + (2**-7 if dtype == "bfloat16" else 0)
        )
    assert [v.change for v in found] == sorted((v.change for v in found), reverse=True)
    assert violations(projection.apply({"w": w}), projection) == []


def test_units_that_need_the_same_factor_are_told_apart() -> None:
    kernel = jnp.full((4, 3), 2.0)
    assert list(map(str, violations(kernel, max_norm(1.0)))) == [
        f"[:, {i}]: 4 -> 1" for i in range(3)
    ]
    (worst,) = violations({"bias": jnp.full(3, 9.0)}, box(-1.0, 1.0))
    assert (str(worst), worst.entries) == ("bias[0]: 9 -> 1", 3)


def test_other_projections_name_the_worst_entry_of_each_leaf() -> None:
    params = {
        "a": jnp.array([[1.0, -2.0], [-3.0, 4.0]]),
        "b": jnp.array([-0.5, 1.0, 1.0]),
        "c": jnp.ones(2),
    }
    found = violations(params, non_negative)
    assert {str(v): v.entries for v in found} == {
        "a[1, 0]: -3 -> 0": 2,
        "b[0]: -0.5 -> 0": 1,
    }
    w = RNG.normal(size=(2, 8, 8)).astype(np.float32)
    (outside,) = violations({"w": w}, spectral_cap(1.0, flatten=(1, 2)))
    assert outside.path == "w"
    assert outside.entries > 100


def test_the_worst_element_of_a_complex_leaf_is_the_one_that_moves_most() -> None:
    (found,) = violations(jnp.array([1j, 3 + 4j]), jnp.conj)
    assert (found.unit, found.before, found.after, found.entries) == ("[1]", 5, 5, 2)


def test_sequences_and_schedules() -> None:
    params = {"w": jnp.array([[3.0, -0.3], [4.0, 0.4]])}
    falling = max_norm(lambda step: 6.0 - step)
    assert violations(params, falling, step=0) == []
    for both in ([falling, non_negative], (falling, non_negative)):
        found = violations(params, both, step=4)
        assert list(map(str, found)) == ["w[0, 1]: -0.3 -> 0", "w[:, 0]: 5 -> 2"]
    assert list(map(str, violations(params, unit_norm()))) == [
        "w[:, 0]: 5 -> 1",
        "w[:, 1]: 0.5 -> 1",
    ]
    (low,) = violations(params, min_max_norm(1.0, 9.0))
    assert (low.unit, low.before, low.entries) == ("[:, 1]", pytest.approx(0.5), 2)


def test_what_is_not_finite_comes_first() -> None:
    w = np.ones((3, 4), np.float32)
    w[1, 2], w[0, 3], w[:, 0] = math.nan, math.inf, 9
    bias = np.array([1.0, math.nan], np.float32)
    found = violations({"w": w, "b": bias}, max_norm(5.0))
    assert [(v.path, v.unit) for v in found] == [
        ("b", "[1]"),
        ("w", "[:, 2]"),
        ("w", "[:, 3]"),
        ("w", "[:, 0]"),
    ]
    assert math.isnan(found[0].before)
    assert math.isinf(found[0].change)
    assert (
        violations({"w": np.full((2, 2), math.nan)}, lambda tree: tree)[0].unit
        == "[0, 0]"
    )


def test_leaves_without_units() -> None:
    params = {
        "empty": jnp.zeros((0, 3)),
        "steps": jnp.arange(3),
        "none": None,
        "scale": 7.0,
        "w": jnp.eye(2),
    }
    assert violations(params, max_norm(1.0)) == []
    assert list(map(str, violations(params, max_norm(1.0, axes={"scale": None})))) == [
        "scale: 7 -> 1"
    ]
