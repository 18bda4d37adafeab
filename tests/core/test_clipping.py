"""Factors and norms at the ends of the numbers."""

from typing import Any

import jax
import numpy as np

import clipjax
from clipjax import functional
from clipjax._core.norms import largest, smallest
from tests.support.programs import stepped

INF, NAN = float("inf"), float("nan")


def test_the_norm_of_many_equal_leaves_is_exact() -> None:
    """One after the other, their roundings would add up to 2e-6 of the norm."""
    values = np.float32([*np.linspace(0.1, 0.99, 9), 1.834])
    leaves = [values[:, None]] * 300

    bounds = np.float32(0.7 * values * np.sqrt(300))

    @jax.jit
    def clipped(leaves: Any) -> Any:
        clipped, norms = jax.vmap(functional.clip_by_global_norm)(leaves, bounds)
        return norms, clipped[0]

    norms, once = clipped(leaves)
    np.testing.assert_allclose(norms, np.float64(values) * np.sqrt(300), rtol=3e-7)
    after = np.float64(once[:, 0]) * np.sqrt(300)
    assert (after <= bounds).all()
    np.testing.assert_allclose(after, bounds, rtol=2e-6)


def test_in_float64_a_norm_ends_just_below_its_bound() -> None:
    x = np.random.default_rng(0).standard_normal((50, 40))
    with jax.enable_x64(True):
        once = jax.jit(lambda x: functional.clip_by_norm(x, 0.7, axes=0))(x)
        assert once.dtype == np.float64
        norms = np.longdouble(np.asarray(once))
    norms = np.sqrt((norms**2).sum(axis=0))
    assert (norms <= 0.7).all()
    np.testing.assert_allclose(np.float64(norms), 0.7, rtol=1e-13)


def test_an_infinite_norm_is_not_inside_an_infinite_bound() -> None:
    clipped, _ = stepped(clipjax.clip_by_global_norm(INF), np.float32([INF, 1.0]))
    assert np.isnan(clipped).all()


def test_a_norm_that_is_not_finite_is_no_goal_for_a_norm_of_0() -> None:
    zeros = np.zeros((2, 3), np.float32)
    for bad in (NAN, INF):
        old = zeros + np.float32([[bad], [1.0]])
        kept = clipjax.keep_norm(axes=1).apply(zeros, old)
        assert np.isnan(kept).all(axis=1).tolist() == [True, False]
        assert not kept[1].any()


def test_the_smallest_factor_is_nan_if_one_is() -> None:
    tx = clipjax.clip_by_norm(np.float32([1.0, 2.0]), axes=0)

    @jax.jit
    def scales(trees: Any) -> Any:
        states = [tx.update(tree, tx.init(tree))[1] for tree in trees]
        return [clipjax.metrics(state)["clip_by_norm/scale"] for state in states]

    inside = {"b": np.float32([[1.0, 0.5]])}
    spoiled, small, none = scales(
        (
            inside | {"a": np.float32([[NAN, 4.0]])},
            inside | {"a": np.float32([[2.0, 8.0]])},
            {},
        )
    )
    assert np.isnan(spoiled)
    np.testing.assert_allclose(small, 0.25, rtol=2e-6)
    assert none == 1


def test_the_norm_after_is_the_largest_where_units_have_bounds_of_their_own() -> None:
    grads = np.float32([[5.0, 0.0], [0.0, 2.0]])
    for make, least in ((clipjax.clip_by_norm, 1.0), (clipjax.clip_by_rms, 0.5**0.5)):
        _, state = stepped(make(np.float32([10.0, 1.0]) * least, axes=0), grads)
        found = clipjax.metrics(state)
        (after,) = (x for key, x in found.items() if key.endswith("/norm_after"))
        # Of the unit that is inside.
        np.testing.assert_allclose(after, 5 * least, rtol=2e-6)


def test_nan_is_the_largest() -> None:
    """A maximum may lose NaN, so it counts as infinite."""
    of_numbers = [np.float32(1.0), np.float32([NAN, 2.0]), np.float32(NAN)]
    for some in (of_numbers[:2], of_numbers[::2]):
        assert (largest(some), smallest(some)) == (INF, -INF)

    @jax.jit
    def norms(trees: Any) -> Any:
        return [functional.global_norm(tree, ord=np.inf) for tree in trees]

    of_leaves = functional.leaf_norms({"a": np.float32([1.0, NAN])}, ord=np.inf)
    assert of_leaves == {"a": INF}

    x, two = np.float32([1.0, NAN, 2.0]), np.float32([2.0])
    assert norms([{"a": x, "b": two}, {"a": x[1]}, {"a": two, "b": x}, {}]) == [
        INF,
        INF,
        INF,
        0,
    ]
