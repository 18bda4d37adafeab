"""Large leaves, which come one after the other on a CPU: the same numbers, and no leaf touches another."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import clipjax
from clipjax import _limits, _reductions, _turns
from tests.support.oracles import exact_norm, ulp
from tests.support.trees import same_bits, within_one_ulp

# Each just large enough, with a size along which slices do not come out even.
SHAPES = {"a": (512, 301), "b": (517, 257), "c": (2, 600, 131), "d": (5,)}
BF16 = ml_dtypes.bfloat16
AXES = {"a": 0, "b": 0, "c": 1}

STEPS = {
    "value": clipjax.clip_by_value(1.0),
    "limits": clipjax.clip_by_value(-0.5, 1.0),
    "norm": clipjax.clip_by_norm(1.0),
    "units": clipjax.clip_by_norm(1.0, axes=AXES),
    "cubes": clipjax.clip_by_norm(1.0, ord=3),
    "link": clipjax.chain(optax.sgd(0.5), clipjax.max_norm(1.0, axes=AXES)),
    "between": clipjax.chain(optax.sgd(0.5), clipjax.min_max_norm(1.0, 1e3, axes=AXES)),
    "unit": clipjax.chain(optax.sgd(0.5), clipjax.unit_norm(axes=AXES)),
    "unchecked": optax.chain(optax.sgd(0.5), clipjax.max_norm(1.0, axes=AXES)),
}


def tree(seed: int, dtype: Any = np.float32, scale: float = 1.0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray((scale * rng.standard_normal(s)).astype(dtype)) for k, s in SHAPES.items()}


def run(tx: Any, grads: Any, params: Any) -> tuple[Any, dict[str, Any]]:
    @jax.jit
    def step(grads: Any, params: Any) -> Any:
        updates, state = tx.update(grads, tx.init(params), params)
        return updates, clipjax.metrics(state)

    return step(grads, params)


@pytest.fixture
def side_by_side(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Switches turns and slices off."""

    def switch() -> None:
        for module in (_turns, _reductions):
            monkeypatch.setattr(module, "is_large", lambda x: False)

    return switch


def test_these_leaves_are_large() -> None:
    if jax.default_backend() == "cpu" and jax.local_device_count() == 1:
        assert [k for k, x in tree(0).items() if _turns.is_large(x)] == ["a", "b", "c"]
    assert _limits.in_turn is _turns.in_turn


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, np.float32) for name in (*STEPS, "global")),
        ("value", ml_dtypes.bfloat16),
        ("link", np.float16),
    ],
)
def test_the_same_numbers_as_side_by_side(name: str, dtype: Any, side_by_side: Any) -> None:
    tx = STEPS.get(name) or clipjax.clip_by_global_norm(1.0)
    grads, params = tree(1, dtype), tree(2, dtype)
    in_turn, seen = run(tx, grads, params)
    side_by_side()
    expected, metrics = run(tx, grads, params)
    for key in SHAPES:
        # float64 sums in another order differ in their last bits, and so a rounding in float32.
        assert within_one_ulp(in_turn[key], expected[key])
    assert seen.keys() == metrics.keys()
    for key in seen:
        np.testing.assert_allclose(seen[key], metrics[key], rtol=2e-7)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("name", ["value", "norm", "units", "link", "unit"])
def test_a_bad_leaf_stays_alone(name: str, bad: float) -> None:
    grads, params = tree(1), tree(2)
    good, _ = run(STEPS[name], grads, params)
    broken, _ = run(STEPS[name], grads | {"a": grads["a"].at[3, 0].set(bad)}, params)
    assert all(same_bits(broken[key], good[key]) for key in ("b", "c", "d"))
    assert not same_bits(broken["a"], good["a"])


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(np.float32, 1e-3), (np.float32, 100.0), (ml_dtypes.bfloat16, 1.0), (np.float16, 1.0)],
)
def test_the_link_keeps_its_bound(dtype: Any, scale: float) -> None:
    grads, params = tree(3, dtype), tree(4, dtype, scale)
    after = jax.jit(optax.apply_updates)(params, run(STEPS["link"], grads, params)[0])
    for key, axis in AXES.items():
        norms = exact_norm(after[key], axis)
        assert norms.max() <= 1
        moved = np.asarray(params[key], np.float64) - 0.5 * np.asarray(grads[key], np.float64)
        outside = exact_norm(moved, axis) > 1.01
        start = np.maximum(exact_norm(params[key], axis), 1.0)
        assert np.all((norms >= 1 - 4 * ulp(start, dtype))[outside])
        assert outside.any()
    assert same_bits(after["d"], optax.apply_updates(params, {k: -0.5 * g for k, g in grads.items()})["d"])


def test_inside_the_bound_nothing_moves() -> None:
    grads, params = tree(5, scale=1e-6), tree(6, scale=1e-6)
    for name in ("value", "norm", "units"):
        assert same_bits(run(STEPS[name], grads, params)[0], grads)
    for name, scale in (("link", 1.0), ("between", 1e6)):
        params = tree(6, scale=scale * 1e-6)
        updates = run(STEPS[name], grads, params)[0]
        assert same_bits(updates, jax.tree.map(lambda g: -0.5 * g, grads))


def test_a_complex_link_leaves_what_is_inside_to_the_last_bit() -> None:
    grads = jax.tree.map(jax.lax.complex, tree(5), tree(6))
    params = jax.tree.map(lambda x, y: 1e-6 * jax.lax.complex(x, y), tree(7), tree(8))
    grads = jax.tree.map(lambda g: (1e-6 * g).at[0].set(-0.0 - 0.0j), grads)
    tx = clipjax.chain(optax.identity(), clipjax.max_norm(1.0, axes=AXES))
    assert same_bits(run(tx, grads, params)[0], grads)


@pytest.mark.parametrize("name", ["value", "link", "global"])
def test_derivatives_and_maps(name: str, side_by_side: Any) -> None:
    tx = STEPS.get(name) or clipjax.clip_by_global_norm(1.0)
    grads, params = tree(7), tree(8)

    def loss(grads: Any, params: Any) -> jax.Array:
        updates, _ = tx.update(grads, tx.init(params), params)
        return sum(jnp.sum(jnp.sin(u)) for u in jax.tree.leaves(updates))

    def both() -> tuple[Any, Any]:
        stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), (grads, params))
        mapped = jax.jit(jax.vmap(lambda g, p: tx.update(g, tx.init(p), p)[0]))(*stacked)
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(grads, params), mapped

    in_turn = both()
    side_by_side()
    expected = both()
    for a, b in zip(jax.tree.leaves(in_turn), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)
