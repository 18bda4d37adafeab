"""Limits of entries at the ends of the numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from clipjax._core import entries
from clipjax._core.leaves import Leaf
from tests.support.programs import stepped


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_subnormal_entries_inside_stay(dtype: str) -> None:
    """XLA on a CPU takes them for 0, on whichever side of 0 they are."""
    with jax.enable_x64(True):
        least = float(jnp.finfo(dtype).smallest_subnormal)
        exact = [-1.0, -3 * least, -0.0, 0.0, least, 5 * least, 2.0, np.nan]
        exact = np.tile(exact, 53)[:-4]  # with a rest that is not vectorized
        kind = jnp.dtype(dtype)

        @jax.jit
        def clipped(x: jax.Array) -> list[jax.Array]:
            leaf = Leaf((), x)
            limits = ((0.0, 1.0), (-1.0, 0.0), (-1.0, 1.0), (None, 0.0), (None, least))
            found = [entries.clip_entries(leaf, *each) for each in limits]
            return [clipjax.non_negative().apply(x), *found]

        limits = ((0, np.inf), (0, 1), (-1, 0), (-1, 1), (0, 0), (-least, least))
        for y, (low, high) in zip(clipped(exact.astype(kind)), limits, strict=True):
            wanted = np.clip(exact, low, high).astype(kind)
            np.testing.assert_array_equal(np.float64(y), np.float64(wanted))
            inside = (exact >= low) & (exact <= high)
            before, after = exact.astype(kind)[inside], np.asarray(y)[inside]
            assert before.tobytes() == after.tobytes()


@pytest.mark.parametrize("least", [-5.0, -0.5])
def test_the_norm_after_is_that_of_the_end_farther_from_0(least: float) -> None:
    tx = clipjax.clip_by_value(low=-1.0, high=2.0)
    _, state = stepped(tx, np.float32([3.0, 0.5, least]))
    metrics = clipjax.metrics(state)
    assert metrics["clip_by_value/norm"] == max(3.0, -least)
    assert metrics["clip_by_value/norm_after"] == 2.0


def test_a_bound_of_nan_makes_nan() -> None:
    x = np.float32([-3, 0, 0.5, 3])

    @jax.jit
    def clipped(bound: jax.Array) -> list[jax.Array]:
        limits = ((bound, 1.0), (-1.0, bound), (-bound, bound))
        return [clipjax.box(*each).apply(x) for each in limits]

    for sign in (1, -1):
        for y in clipped(np.copysign(np.float32(np.nan), sign)):
            assert np.isnan(y).all()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_bounds_of_8_bits_are_rounded_inward(dtype: str) -> None:
    """The first has no infinity: an infinite bound is its largest number."""
    x = np.float32([-448, -3, -0.3, 0, 0.3, 3, 448]).astype(jnp.dtype(dtype))

    @jax.jit
    def clipped(x: jax.Array) -> list[jax.Array]:
        limits = ((-0.3, 0.3), (-np.inf, 0.7), (-1e6, 1e6))
        return [clipjax.box(*each).apply(x) for each in limits]

    # 0.3 is between 0.28125 or 0.25 and 0.3125; 0.7 between 0.6875 or 0.625 and 0.75.
    least, most = (0.28125, 0.6875) if dtype == "float8_e4m3fn" else (0.25, 0.625)
    exact = np.asarray(x).astype(float)
    for y, (low, high) in zip(
        clipped(x), ((-least, least), (-np.inf, most), (-np.inf, np.inf)), strict=True
    ):
        np.testing.assert_array_equal(y.astype(float), np.clip(exact, low, high))


def test_a_whole_number_above_the_largest_float16_is_rounded_inward() -> None:
    x = np.float16([np.inf, 65504, -np.inf])

    @jax.jit
    def clipped(bound: jax.Array) -> jax.Array:
        return clipjax.functional.clip_by_value(x, bound)

    for bound in (65505, 65520, 65535):
        y = clipped(jnp.asarray(bound, np.uint16))
        np.testing.assert_array_equal(y, [65504, 65504, -65504])


@pytest.mark.parametrize("shape", [(), (1,)])
def test_metrics_agree_with_a_bound_that_is_no_float32(shape: tuple[int, ...]) -> None:
    """The float32 nearest to 0.1 is above it."""
    x, bound = np.float32([0.1]), np.full(shape, 0.1)
    for tx in (clipjax.clip_by_value(bound), clipjax.clip_by_value(-bound, bound)):
        clipped, state = stepped(tx, x)
        assert clipped[0] < x[0]
        metrics = clipjax.metrics(state)
        assert metrics["clip_by_value/clipped_fraction"] == 1
        assert metrics["clip_by_value/norm_after"] == clipped[0]

    def loss(x: jax.Array, tap: jax.Array) -> jax.Array:
        return jnp.sum(0.1 * clipjax.clip_gradient_by_value(x, bound, tap=tap))

    seen = jax.grad(loss, argnums=1)(x, clipjax.tap())
    assert clipjax.tapped(seen)["clipped_fraction"] == 1


def test_what_is_at_a_bound_is_not_clipped() -> None:
    """Of bounds that are arrays, and of two limits; small entries, too."""
    x = np.float32([0.25, -0.5])
    txs = [clipjax.clip_by_value(np.float32([0.25, bound])) for bound in (0.5, 0.4)] + [
        clipjax.clip_by_value(low=-0.5, high=high) for high in (0.25, 0.2)
    ]

    @jax.jit
    def metrics(x: jax.Array) -> list[dict[str, jax.Array]]:
        return [clipjax.metrics(tx.update(x, tx.init(x))[1]) for tx in txs]

    for found, (clipped, after) in zip(
        metrics(x), [(0, 0.5), (1, 0.4), (0, 0.5), (1, 0.5)], strict=True
    ):
        assert found["clip_by_value/clipped_fraction"] == clipped
        assert found["clip_by_value/norm"] == 0.5
        np.testing.assert_allclose(found["clip_by_value/norm_after"], after)
