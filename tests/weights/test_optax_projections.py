"""`project`: any function of the weights, as those of `optax.projections`, by the call and as a link."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

import clipjax
from tests.support.trees import flat, same_bits
from tests.support.weights import like, step_with

P = optax.projections
FUNCTIONS = {
    "non_negative": P.projection_non_negative,
    "box": lambda w: P.projection_box(w, like(w, -0.5), like(w, 0.5)),
    "hypercube": lambda w: jax.tree.map(lambda x: P.projection_hypercube(x, scale=0.5), w),
    "simplex": P.projection_simplex,
    "l1_ball": lambda w: P.projection_l1_ball(w, 2.0),
    "l1_sphere": lambda w: P.projection_l1_sphere(w, 2.0),
    "l2_ball": lambda w: P.projection_l2_ball(w, 2.0),
    "l2_sphere": lambda w: P.projection_l2_sphere(w, 2.0),
    "linf_ball": lambda w: P.projection_linf_ball(w, 0.5),
    "halfspace": lambda w: P.projection_halfspace(w, like(w, 1.0), -1.0),
    "hyperplane": lambda w: P.projection_hyperplane(w, like(w, 1.0), 1.0),
}


def weights_and_gradients() -> Any:
    rng = np.random.default_rng(6)
    return tuple({"a": rng.standard_normal((4, 3)).astype(np.float32)} for _ in range(2))


@functools.cache
def of_all() -> Any:
    """For each function: what it returns, what its projection does, a step of a chain and its goal."""

    def of(function: Any, params: Any, grads: Any) -> Any:
        project = clipjax.project(function)
        after = step_with(optax.chain(optax.sgd(0.5), project), params, grads)
        expected = function(jax.tree.map(lambda p, g: p - 0.5 * g, params, grads))
        return function(params), project(params), after, expected

    return jax.jit(lambda *trees: {name: of(f, *trees) for name, f in FUNCTIONS.items()})(
        *weights_and_gradients()
    )


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_projections_of_optax(name: str) -> None:
    params, _ = weights_and_gradients()
    returned, projected, after, expected = of_all()[name]
    assert same_bits(projected, returned)
    np.testing.assert_allclose(flat(after), flat(expected), rtol=0, atol=1e-6)
    assert not np.allclose(flat(after), flat(params), atol=1e-3)
