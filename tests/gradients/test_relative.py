"""`adaptive_grad_clip`: which axes it reduces where it is given none."""

import jax
import numpy as np
import pytest

import clipjax
from tests.support.programs import stepped
from tests.support.trees import fan_in_or_all


@pytest.mark.parametrize("shape", [(2, 4, 3), (2, 3, 3, 4, 3)])
def test_layers_of_a_stack_share_no_norm(shape: tuple[int, ...]) -> None:
    """A gradient of 0.005 beside one of 100 became 1e-6."""
    sizes = np.float32([100.0, 0.005]).reshape(-1, *[1] * (len(shape) - 1))
    tree = {"kernel": np.ones(shape, np.float32)}
    grads = {"kernel": sizes * tree["kernel"]}
    axes = tuple(range(1, len(shape) - 1))
    clipped, _ = stepped(clipjax.adaptive_grad_clip(axes=axes), grads, params=tree)
    one = clipjax.adaptive_grad_clip(axes=fan_in_or_all)
    alone, weights = jax.tree.map(lambda x: x[1], (grads, tree))
    expected, _ = stepped(one, alone, params=weights)
    np.testing.assert_allclose(clipped["kernel"][1], expected["kernel"], rtol=1e-6)


def test_kernels_of_convolutions_and_whole_biases_are_reduced() -> None:
    """Ranks 2 and 4 have units, and less is one, as in the paper."""
    shapes = {"conv": (3, 3, 2, 4), "dense": (5, 4), "bias": (4,)}
    tree = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    usual, told = (
        stepped(tx, tree, params=tree)[0]
        for tx in (
            clipjax.adaptive_grad_clip(),
            clipjax.adaptive_grad_clip(axes=fan_in_or_all),
        )
    )
    jax.tree.map(np.testing.assert_array_equal, usual, told)
