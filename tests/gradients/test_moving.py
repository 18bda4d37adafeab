"""What follows moving averages of each leaf: the largest entry, and the norm with its square."""

from __future__ import annotations

import functools
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import pytest

import clipjax
from tests.support.norm_rules import PARAMS, SHAPES, STEPS
from tests.support.oracles import exact_norm, ulp
from tests.support.trees import same_bits

RULES = {
    "max": clipjax.clip_by_moving_max(),
    "fast max": clipjax.clip_by_moving_max(0.6),
    "norm": clipjax.normalize_by_moving_norm(),
    "norm alone": clipjax.normalize_by_moving_norm(0.0, 0.5, eps=0.0),
    "both": optax.chain(clipjax.clip_by_moving_max(0.9), clipjax.normalize_by_moving_norm(eps=0.0)),
}
DECAYS = {"max": 0.999, "fast max": 0.6, "both": 0.9}
MOMENTS = {"norm": (0.7, 0.9, 1e-8), "norm alone": (0.0, 0.5, 0.0), "both": (0.7, 0.9, 0.0)}


def moving_max(grads: list[np.ndarray], decay: float) -> list[np.ndarray]:
    """The paper's recursion, of one leaf, in float64; what is not taken in is 0 and NaN."""
    total, t, out = np.longdouble(0), 0, []
    for grad in grads:
        largest = np.max(np.abs(grad))
        if largest > 0:
            t += 1
            total = decay * total + (1 - decay) * largest
        threshold = total / (1 - np.longdouble(decay) ** t) if t else 0
        out.append(np.where(np.abs(grad) > threshold, grad / max(largest, 1e-300) * threshold, grad))
    return out


def moving_norm(grads: list[np.ndarray], b1: float, b2: float, eps: float) -> list[np.ndarray]:
    m, v, t, out = np.longdouble(0), np.longdouble(0), 0, []
    for grad in grads:
        norm = np.sqrt(np.sum(grad.astype(np.longdouble) ** 2))
        if norm == 0:
            out.append(grad)
            continue
        t += 1
        m, v = b1 * m + (1 - b1) * norm, b2 * v + (1 - b2) * norm**2
        ratio = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        out.append(grad / norm * ratio)
    return out


def expected(name: str, leaf: np.ndarray) -> np.ndarray:
    grads = list(leaf.astype(np.float64))
    grads = moving_max(grads, DECAYS[name]) if name in DECAYS else grads
    return np.stack(moving_norm(grads, *MOMENTS[name]) if name in MOMENTS else grads)


@functools.partial(jax.jit, static_argnums=0)
def follow(name: str, stacked: Any) -> tuple[Any, Any]:
    """The updates of all steps, and the last state."""
    tx = RULES[name]

    def one(state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state)
        return state, updates

    state, updates = jax.lax.scan(one, tx.init(jax.tree.map(lambda x: x[0], stacked)), stacked)
    return updates, state


def drawn(scale: float, dtype: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """Gradients whose sizes vary by factors, with spikes, and some that are 0."""
    rng = np.random.default_rng(seed)
    found = {}
    for key, shape in SHAPES.items():
        sizes = scale * np.exp(0.5 * rng.standard_normal(STEPS)) * np.where(rng.random(STEPS) < 0.1, 20, 1)
        sizes[[0, 7, 8]] = 0
        values = rng.standard_normal((STEPS, *shape)) * sizes.reshape(-1, *[1] * len(shape))
        found[key] = values.astype(dtype)
    return found


IN_DTYPES = [
    *((name, scale, np.float32) for name in RULES for scale in (1e-30, 1.0, 1e30)),
    *((name, 1.0, dtype) for name in ("fast max", "norm") for dtype in (ml_dtypes.bfloat16, np.float16)),
]


@pytest.mark.parametrize(("name", "scale", "dtype"), IN_DTYPES)
def test_it_follows_its_oracle(name: str, scale: float, dtype: Any) -> None:
    stacked = drawn(scale, dtype)
    updates, state = jax.tree.map(np.asarray, follow(name, stacked))
    eps = float(ml_dtypes.finfo(dtype).eps)
    for key, leaf in stacked.items():
        oracle, got = expected(name, leaf), updates[key].astype(np.float64)
        moved = np.abs(oracle - leaf.astype(np.float64)) > 1e-3 * np.abs(oracle)
        assert moved.reshape(STEPS, -1).any(axis=1).sum() >= 5
        smallest = float(ml_dtypes.finfo(dtype).smallest_normal)
        np.testing.assert_allclose(got, oracle, rtol=max(3 * eps, 3e-6), atol=2 * smallest)
        assert same_bits(updates[key][[0, 7, 8]], leaf[[0, 7, 8]]), "zeros"
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_no_entry_is_above_the_threshold_and_what_is_below_keeps_its_bits(dtype: Any) -> None:
    tx = RULES["fast max"]
    update, leaf = jax.jit(tx.update), drawn(1.0, dtype, 1)["kernel"]
    state, moved = tx.init(leaf[0]), 0
    for grad in leaf[1:]:
        updates, state = jax.tree.map(np.asarray, update(grad, state))
        before, after = (np.abs(x.astype(np.float64)) for x in (grad, updates))
        bound = float(state.threshold)
        assert (after <= bound).all()
        if before.max() > bound:  # the largest ends at the threshold, and those above it below
            moved += 1
            assert after[before == before.max()].min() >= bound - 4 * ulp(bound, dtype)
        kept = before <= bound * (1 - 1e-6)
        np.testing.assert_array_equal(updates[kept].view(np.uint8), grad[kept].view(np.uint8))
    assert moved > 20


def test_large_leaves_are_as_small_ones() -> None:
    """They are measured and rescaled in another way."""
    rng = np.random.default_rng(0)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        leaf = rng.standard_normal((2, 1 << 20)).astype(dtype)
        leaf[1] *= 3
        updates, _ = follow("fast max", leaf)
        eps = float(ml_dtypes.finfo(dtype).eps)
        np.testing.assert_allclose(
            np.asarray(updates, np.float64), expected("fast max", leaf), rtol=max(3 * eps, 3e-6)
        )


def test_complex_entries_are_compared_by_their_size() -> None:
    usual = np.array([3 + 4j, 1 - 1j, 0], np.complex64)
    stacked = np.stack([usual, 10 * usual[[0, 2, 1]], usual])
    updates, state = jax.tree.map(np.asarray, follow("fast max", stacked))
    oracle = moving_max(list(stacked), 0.6)
    np.testing.assert_allclose(updates, np.stack(oracle), rtol=1e-6)
    assert np.abs(updates[1].astype(np.complex128)).max() <= state.maxima[0] * 10
    assert same_bits(updates[2], stacked[2])


@pytest.mark.parametrize("size", [1e-30, 0.3, 1e30])
def test_steady_gradients_are_left_alone_or_get_the_norm_1(size: float) -> None:
    stacked = jax.tree.map(lambda x: np.repeat(np.float32(size) * x[5:6], 60, axis=0), drawn(1.0, np.float32))
    assert same_bits(follow("max", stacked)[0], stacked)
    for leaf in follow("norm alone", stacked)[0].values():
        norms = np.array([exact_norm(x) for x in np.asarray(leaf)], np.float64)
        assert (norms <= 1 + 1e-7).all()  # the averages are float32 numbers
        np.testing.assert_allclose(norms, 1, rtol=1e-6)


def test_a_spike_gets_less_than_its_size() -> None:
    steady = np.ones((100, 4), np.float32)
    steady[90] *= 1e6
    updates = np.asarray(follow("norm", steady)[0])
    np.testing.assert_allclose(exact_norm(updates[90]), 0.3 / np.sqrt(0.1), rtol=1e-3)
    assert exact_norm(updates[91]) < 1
    assert np.abs(follow("max", steady)[0][90]).max() < 1e6 / 80


def test_no_past_makes_a_norm_much_larger_than_1() -> None:
    """The most that the weights of the two averages allow, by the inequality of Cauchy and Schwarz."""
    ages = np.arange(60)[::-1]
    worst = ((0.7 / 0.9) ** ages).astype(np.float32).reshape(-1, 1)
    last = float(np.asarray(follow("norm", worst)[0])[-1, 0])
    assert 1.40 < last < 1.41


def test_a_leaf_that_begins_to_learn_late_is_not_held_near_zero() -> None:
    late = np.concatenate([np.zeros((50, 3), np.float32), np.ones((10, 3), np.float32)])
    assert same_bits(follow("max", late)[0], late)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["max", "norm"])
def test_a_bad_entry_makes_its_leaf_nan_and_others_go_on(name: str, bad: float) -> None:
    stacked = drawn(1.0, np.float32)
    stacked["bias"][20, 1] = bad
    updates, state = follow(name, stacked)
    assert np.isnan(updates["bias"][20]).all()
    for x in (updates["bias"][21:], updates["kernel"], *jax.tree.leaves(state)):
        assert np.isfinite(x).all()
    assert (state.taken == STEPS - 4).all()  # three zeros, and the bad step, which no leaf takes in


@pytest.mark.parametrize("name", ["clip_by_moving_max", "normalize_by_moving_norm"])
def test_other_leaves_than_it_started_with_are_an_error(name: str) -> None:
    tx = getattr(clipjax, name)()
    with pytest.raises(ValueError, match=rf"{name}.* 1 .*2"):
        jax.eval_shape(tx.update, {"a": np.ones(2, np.float32)}, tx.init(PARAMS))
