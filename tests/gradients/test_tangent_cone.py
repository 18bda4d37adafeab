"""`tangent_cone` beside the projection to the same radius."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import clipjax
from tests.support.trees import DTYPES

RNG = np.random.default_rng(0)


def test_what_max_norm_returns_is_on_the_sphere_of_the_cone() -> None:
    """It ends a margin below, and counts as there: a step outward is removed."""

    @jax.jit
    def kept(tree: Any) -> Any:
        weights = clipjax.max_norm(1.0).apply(tree)
        outward = jax.tree.map(jnp.negative, weights)
        half = jnp.bfloat16(1)
        radii = (1.0, 1, half, np.float16(1), lambda step: jnp.ones((), jnp.bfloat16))
        cones = [clipjax.tangent_cone(radius) for radius in radii]
        return [cone.update(outward, cone.init(tree), weights)[0] for cone in cones]

    drawn = RNG.normal(size=(300, 8))
    for left in kept({dtype: drawn.astype(jnp.dtype(dtype)) for dtype in DTYPES}):
        for dtype, x in left.items():
            most = np.abs(np.asarray(x).astype(np.float64)).max()
            assert most <= float(jnp.finfo(dtype).eps)
