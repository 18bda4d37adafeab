"""Limits of entries at the ends of the numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from tests.support.programs import stepped


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
