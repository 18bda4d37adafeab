"""Axes that are written in two ways."""

from __future__ import annotations

import copy
import pickle

import jax.numpy as jnp
import pytest

from clipjax import SKIP, functional


@pytest.mark.parametrize("axes", [(0, 0), (0, -2), (-1, 1)])
def test_an_axis_named_twice_raises(axes: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"axes: .* names an axis twice for leaf 'w' of shape \(2, 3\)"
    ):
        functional.clip_by_norm({"w": jnp.ones((2, 3))}, 1.0, axes=axes)


def test_skip_stays_itself_in_copies() -> None:
    assert copy.deepcopy(SKIP) is pickle.loads(pickle.dumps(SKIP)) is SKIP
