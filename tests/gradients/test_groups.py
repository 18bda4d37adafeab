"""`clip_by_group_norm`: what its metrics say of several groups."""

import numpy as np

import clipjax
from tests.support.programs import stepped


def test_the_scale_of_groups_is_the_smallest() -> None:
    grads = {"a": np.float32([4.0]), "b": np.float32([0.5]), "c": np.float32([8.0])}
    _, state = stepped(clipjax.clip_by_group_norm(dict.fromkeys("abc", 1.0)), grads)
    np.testing.assert_allclose(
        clipjax.metrics(state)["clip_by_group_norm/scale"], 1 / 8, rtol=2e-6
    )
