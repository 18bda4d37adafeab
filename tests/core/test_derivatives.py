"""Gradients flow through: equal to central differences in float64, finite at zero and far outside."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from clipjax import functional
from tests.support.oracles import INF, exact_norm
from tests.support.trees import flat

MEMBERS = {
    "global": lambda c: clipjax.clip_by_global_norm(c),
    "global p=3": lambda c: clipjax.clip_by_global_norm(c, ord=3),
    "global p=1": lambda c: clipjax.clip_by_global_norm(c, ord=1),
    "global inf": lambda c: clipjax.clip_by_global_norm(c, ord=INF),
    "leaves": lambda c: clipjax.clip_by_norm(c),
    "units": lambda c: clipjax.clip_by_norm(c, axes=clipjax.fan_in),
    "rms": lambda c: clipjax.clip_by_rms(c / 3),
    "value": lambda c: clipjax.clip_by_value(c / 3),
    "max_norm": lambda c: clipjax.max_norm(c),
}


def output(name: str, tree: Any, bound: Any, params: Any, weights: Any) -> jax.Array:
    """The weighted sum of what a member makes of a tree."""
    tx = MEMBERS[name](bound)
    updates = tx.update(tree, tx.init(tree), params)[0]
    return sum(jnp.sum(weights[key] * x) for key, x in updates.items())


@jax.jit
def derivatives(tree: Any, bound: Any, params: Any, weights: Any) -> Any:
    """Of every member: the output, and its derivatives with respect to the entries and the bound."""
    return {
        name: jax.value_and_grad(functools.partial(output, name), argnums=(0, 1))(
            tree, bound, params, weights
        )
        for name in MEMBERS
    }


def drawn(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"bias": rng.standard_normal(3), "kernel": rng.standard_normal((3, 2))}


@functools.cache
def derivatives_and_differences(bound: float) -> Any:
    """Both for all members at once, from one compiled program."""
    tree, params, weights = drawn(5), drawn(6), drawn(7)
    h = 1e-6
    with jax.enable_x64(True):

        def difference(up: Any, down: Any) -> dict[str, float]:
            (high, low) = (derivatives(*at, params, weights) for at in (up, down))
            return {name: (float(high[name][0]) - float(low[name][0])) / (2 * h) for name in MEMBERS}

        def shifted(key: str, index: Any, by: float) -> Any:
            leaf = tree[key].copy()
            leaf[index] += by
            return {**tree, key: leaf}, np.float64(bound)

        exact = jax.tree.map(np.asarray, derivatives(tree, np.float64(bound), params, weights))
        of_entries = {
            (key, index): difference(shifted(key, index, h), shifted(key, index, -h))
            for key, leaf in tree.items()
            for index in np.ndindex(leaf.shape)
        }
        of_bound = difference((tree, np.float64(bound + h)), (tree, np.float64(bound - h)))
    return exact, of_entries, of_bound


@pytest.mark.parametrize("bound", [0.5, 100.0], ids=["outside", "inside"])
@pytest.mark.parametrize("name", list(MEMBERS))
def test_derivatives_equal_central_differences(name: str, bound: float) -> None:
    """With respect to the entries, and to the bound."""
    exact, of_entries, of_bound = derivatives_and_differences(bound)
    _, (gradient, slope) = exact[name]
    for (key, index), numeric in of_entries.items():
        np.testing.assert_allclose(gradient[key][index], numeric[name], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(slope, of_bound[name], rtol=1e-6, atol=1e-7)


@functools.cache
def derivatives_at_zero(bound: float) -> Any:
    zeros, ones = ({k: np.full_like(v, fill, np.float32) for k, v in drawn(0).items()} for fill in (0, 1))
    return derivatives(zeros, np.float32(bound), zeros, ones)


@pytest.mark.parametrize("bound", [0.0, 1.0])
@pytest.mark.parametrize("name", list(MEMBERS))
def test_derivatives_are_finite_at_zero(name: str, bound: float) -> None:
    _, (gradient, slope) = derivatives_at_zero(bound)[name]
    assert np.isfinite(flat(gradient)).all()
    assert np.isfinite(slope)
    if bound > 0:
        np.testing.assert_array_equal(flat(gradient), 1.0)


@jax.jit
def of_an_output_far_outside(x: Any, bound: Any, weight: Any) -> Any:
    return jax.grad(lambda x, bound: weight * jnp.sum(clipjax.max_norm(bound, axes=0)(x)), argnums=(0, 1))(
        x, bound
    )


@pytest.mark.parametrize("weight", [0.1, 20.0])
@pytest.mark.parametrize("bound", [1e-2, 2.0, 1e8])
@pytest.mark.parametrize("shape", [(8, 3), (512, 300)], ids=["small", "large"])
def test_derivatives_far_outside_the_bound(shape: tuple[int, int], bound: float, weight: float) -> None:
    """The products and sums of the backward pass stay in the range of a float32."""
    x = np.full(shape, 1e37).astype(np.float32)
    x[0, 0] = 0
    norms = np.asarray(exact_norm(x, 0), np.float64)
    units = x.astype(np.float64) / norms
    of_x, of_bound = of_an_output_far_outside(x, np.float32(bound), np.float32(weight))
    np.testing.assert_allclose(of_bound, weight * units.sum(), rtol=1e-6)
    slope = weight * bound / norms
    exact = slope * (1 - units * units.sum(axis=0))
    # What cancels leaves a rounding of its terms.
    np.testing.assert_allclose(of_x, exact, rtol=1e-5, atol=1e-6 * slope.max() + np.finfo(np.float32).tiny)


# --------------------------------------------------------------------------------------------------
# Norms by themselves.

ORDS = (1, 2, 3, INF)


@jax.jit
def of_norms(x: Any) -> Any:
    """For each p: the derivatives of a joint norm of two leaves, and of the sum of the units' norms."""

    def joint(x: Any, p: float) -> jax.Array:
        return functional.global_norm([x[:, :1], x[:, 1:]], p)

    def of_units(x: Any, p: float) -> jax.Array:
        return functional.unitwise_norms(x, 0, p).sum()

    return {p: tuple(jax.grad(functools.partial(f, p=p))(x) for f in (joint, of_units)) for p in ORDS}


def expected_of_norm(x: np.ndarray, p: float) -> np.ndarray:
    """Where several entries tie for the largest, they share the derivative of the norm for p = inf."""
    norm = np.asarray(exact_norm(x, None, p), np.float64)
    if norm == 0:
        return np.zeros(x.shape)
    if p == INF:
        ties = np.abs(x) == norm
        return np.sign(x) * ties / ties.sum()
    return np.sign(x) * (np.abs(x) / norm) ** (p - 1)


@pytest.mark.parametrize("point", ["zero", "ties", "elsewhere"])
def test_derivatives_of_norms(point: str) -> None:
    x = {
        "zero": np.zeros((3, 2)),
        "ties": np.asarray([[3.0, -3.0], [-3.0, 1.0], [0.5, 1.0]]),
        "elsewhere": np.random.default_rng(0).standard_normal((3, 2)),
    }[point]
    for p, (joint, of_units) in of_norms(x.astype(np.float32)).items():
        assert np.isfinite(joint).all()
        assert np.isfinite(of_units).all()
        np.testing.assert_allclose(joint, expected_of_norm(x, p), rtol=1e-5, atol=1e-7)
        columns = np.stack([expected_of_norm(column, p) for column in x.T], axis=1)
        np.testing.assert_allclose(of_units, columns, rtol=1e-5, atol=1e-7)
