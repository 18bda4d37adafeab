"""`tangent_cone` beside the projection to the same radius."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import clipjax

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_max_norm_returns_is_on_the_sphere_of_the_cone(dtype: str) -> None:
    """It ends a margin below the radius, and counts as on the sphere: a step outward is
    removed.
    """
    weights = clipjax.max_norm(1.0)(jnp.asarray(RNG.normal(size=(300, 8)), dtype))
    for radius in (
        1.0,
        1,
        jnp.bfloat16(1),
        np.float16(1),
        lambda step: jnp.ones((), jnp.bfloat16),
    ):
        cone = clipjax.tangent_cone(radius)
        kept, _ = cone.update(-weights, cone.init(weights), weights)
        assert jnp.max(jnp.abs(kept)) <= float(jnp.finfo(dtype).eps)
