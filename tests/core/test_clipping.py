"""Factors at the ends of the numbers."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import clipjax
from clipjax._core.clipping import factor_to, smallest
from clipjax._core.norms import largest, norm
from clipjax.weights.max_norm import _factor_between

INF, NAN = float("inf"), float("nan")


def test_an_infinite_norm_is_not_inside_an_infinite_bound() -> None:
    assert np.isnan(factor_to(INF, jnp.float32(INF)))
    assert np.isnan(_factor_between(jnp.float32(INF), np.float32, 0.0, INF, 1.0))
    tx = clipjax.clip_by_global_norm(INF)
    clipped, _ = tx.update(jnp.array([INF, 1.0]), tx.init(jnp.zeros(2)))
    assert np.isnan(clipped).all()


def test_the_smallest_factor_is_nan_if_one_is() -> None:
    assert np.isnan(smallest([jnp.array([0.5, NAN]), jnp.array([1.0])]))
    assert smallest([jnp.array([0.5, 1.0]), jnp.array([0.25])]) == 0.25
    assert smallest([]) == 1
    tx = clipjax.clip_by_norm(jnp.array([1.0, 2.0]), axes=0)
    grads = jnp.array([[NAN, 4.0]])
    _, state = tx.update(grads, tx.init(grads))
    assert np.isnan(clipjax.metrics(state)["clip_by_norm/scale"])


def test_the_norm_after_is_the_largest_where_units_have_bounds_of_their_own() -> None:
    grads = jnp.array([[5.0, 0.0], [0.0, 2.0]])
    for make, least in ((clipjax.clip_by_norm, 1.0), (clipjax.clip_by_rms, 0.5**0.5)):
        tx = make(least * jnp.array([10.0, 1.0]), axes=0)
        found = clipjax.metrics(tx.update(grads, tx.init(grads))[1])
        (after,) = (x for key, x in found.items() if key.endswith("/norm_after"))
        np.testing.assert_allclose(
            after, 5 * least, rtol=2e-6
        )  # of the unit that is inside


def test_nan_is_the_largest() -> None:
    """A maximum may lose NaN, so it counts as infinite."""
    assert largest([jnp.array([1.0, NAN]), jnp.array(2.0)]) == INF
    assert largest([jnp.array(NAN)]) == INF
    assert norm(jnp.array([1.0, NAN, 2.0]), None, INF) == INF
    assert largest([]) == 0
