"""`adaptive_grad_clip`: which axes it reduces where it is given none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax


@pytest.mark.parametrize("shape", [(2, 4, 3), (2, 3, 3, 4, 3)])
def test_agc_refuses_ranks_that_may_be_stacks(shape: tuple[int, ...]) -> None:
    """Layers of a stack would share a norm: a gradient of 0.005 beside one of 100
    became 1e-6.
    """
    tree = {"blocks": {"kernel": jnp.ones(shape)}}
    grads = {
        "blocks": {
            "kernel": jnp.stack([jnp.full(shape[1:], x) for x in (100.0, 0.005)])
        }
    }
    axes = tuple(range(1, len(shape) - 1))
    tx = clipjax.adaptive_grad_clip(axes=axes)
    clipped, _ = tx.update(grads, tx.init(tree), tree)
    one = clipjax.adaptive_grad_clip(axes=clipjax.fan_in_or_all)
    alone = jax.tree.map(lambda x: x[1], (grads, tree))
    expected, _ = one.update(alone[0], one.init(alone[1]), alone[1])
    np.testing.assert_allclose(
        clipped["blocks"]["kernel"][1], expected["blocks"]["kernel"], rtol=1e-6
    )


def test_agc_reduces_kernels_of_convolutions_and_whole_biases() -> None:
    """Ranks 2 and 4 have units, and less is one, as in the paper."""
    tree = {
        "conv": jnp.ones((3, 3, 2, 4)),
        "dense": jnp.ones((5, 4)),
        "bias": jnp.ones(4),
    }
    for x, y in zip(
        *(
            jax.tree.leaves(tx.update(tree, tx.init(tree), tree)[0])
            for tx in (
                clipjax.adaptive_grad_clip(),
                clipjax.adaptive_grad_clip(axes=clipjax.fan_in_or_all),
            )
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)
