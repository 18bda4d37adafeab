"""`chain`: what Optax' does."""

from typing import Any

import jax
import numpy as np
import optax

import clipjax

CLIP, PROJECTION = clipjax.clip_by_global_norm(1.0), clipjax.max_norm(3.0)


def test_a_chain_is_that_of_optax() -> None:
    links = (
        CLIP,
        optax.adam(0.1),
        PROJECTION,
        clipjax.box(-1.0, 1.0),
        clipjax.record_norms(of="params"),
    )
    ours, theirs = clipjax.chain(*links), optax.chain(*links)
    params = {"w": np.full((4, 2), 2.0, np.float32)}

    @jax.jit
    def both(grads: Any) -> Any:
        return [tx.update(grads, tx.init(params), params) for tx in (ours, theirs)]

    first, second = both({"w": np.full((4, 2), 5.0, np.float32)})
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(np.testing.assert_array_equal, first, second)
