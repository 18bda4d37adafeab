"""Updates of the size of the weights, and the two links as AdamH."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.support.oracles import norm

RNG = np.random.default_rng(0)
AXES = {"whole": None, "units": 0, "experts": (2, 3), "*": "auto"}
REDUCED = {"whole": (0, 1), "units": (0,), "experts": (2, 3), "auto": (0, 1)}
SHAPES = {"whole": (7, 9), "units": (65, 6), "experts": (2, 3, 8, 5), "auto": (30, 40)}
SHAPES |= {"bias": (4,)}


def draw(spread: float = 1.0) -> dict[str, np.ndarray]:
    return {
        k: np.float32(RNG.normal(size=s) * np.exp(spread * RNG.normal()))
        for k, s in SHAPES.items()
    }


def onto(x: Any, wanted: Any, name: str) -> Any:
    """Give x the norm of `wanted`, by the formula in float64."""
    x, wanted = np.asarray(x, np.float64), np.asarray(wanted, np.float64)
    axes = REDUCED.get(name)
    return x if axes is None else x * norm(wanted, axes) / norm(x, axes)


def test_each_unit_has_the_norm_of_its_weights() -> None:
    weights, updates = draw(3.0), draw(3.0)
    tx = clipjax.relative_update(axes=AXES)
    scaled, state = jax.jit(tx.update)(updates, tx.init(weights), weights)
    ratios = []
    for name, x in scaled.items():
        want = onto(updates[name], weights[name], name)
        np.testing.assert_allclose(x, want, rtol=1e-6)
        if name in REDUCED:
            each = (np.float64(tree[name]) for tree in (updates, weights))
            size, of_weights = (norm(x, REDUCED[name]) for x in each)
            ratios.append((size / of_weights).max())
    found = clipjax.metrics(state)
    np.testing.assert_allclose(found["relative_update/norm"], max(ratios), rtol=1e-6)
    assert found["relative_update/nonfinite_count"] == 0


def test_it_equals_the_trust_ratio_of_optax() -> None:
    weights, updates = draw(2.0), draw(2.0)
    weights["whole"] *= 0
    updates["units"] *= 0
    pair = clipjax.relative_update(axes=None), optax.scale_by_trust_ratio()
    ours, theirs = (
        jax.jit(tx.update)(updates, tx.init(weights), weights)[0] for tx in pair
    )
    for name in SHAPES:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-6)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, 1e20])
def test_what_is_not_finite_spreads_in_its_unit(value: float) -> None:
    ones = {"w": jnp.ones((2, 3))}
    bad = {"w": ones["w"].at[0, 1].set(value)}
    tx = clipjax.relative_update(axes=0)
    for updates, weights in ((bad, ones), (ones, bad)):
        scaled, state = tx.update(updates, tx.init(ones), weights)
        assert jnp.isnan(scaled["w"]).all(axis=0).tolist() == [False, True, False]
        assert jnp.isfinite(scaled["w"]).all(axis=0).tolist() == [True, False, True]
        assert clipjax.metrics(state)["relative_update/nonfinite_count"] == 1


def test_adamh_is_the_formula() -> None:
    """W <- R normalize(W - rate R normalize(u)), with Adam's direction u."""
    weights, rate = draw(0.0), 0.02
    tx = optax.chain(
        optax.scale_by_adam(0.9, 0.99, eps=0.0),
        clipjax.relative_update(axes=AXES),
        optax.scale_by_learning_rate(rate),
        clipjax.keep_norm(axes=AXES),
    )
    step = jax.jit(tx.update)
    params, state = jax.tree.map(jnp.asarray, weights), tx.init(weights)
    exact = {k: np.float64(w) for k, w in weights.items()}
    first, second = (dict.fromkeys(exact, 0.0) for _ in range(2))
    for i in range(1, 21):
        grads = draw()
        updates, state = step(grads, state, params)
        params = optax.apply_updates(params, updates)
        for k, w in exact.items():
            g = np.float64(grads[k])
            first[k] = 0.9 * first[k] + 0.1 * g
            second[k] = 0.99 * second[k] + 0.01 * g * g
            u = (first[k] / (1 - 0.9**i)) / np.sqrt(second[k] / (1 - 0.99**i))
            exact[k] = onto(w - rate * onto(u, w, k), w, k)
    for k, w in exact.items():
        np.testing.assert_allclose(params[k], w, rtol=2e-5, atol=2e-5)
