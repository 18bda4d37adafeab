"""Bounds that change from step to step: schedules, and hyperparameters in the state."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

import clipjax
from tests.support.updates import (
    CLIP,
    RATE,
    assert_close,
    clipped,
    descend,
    in_float64,
    projected,
    train,
    tree,
)


def bound(step: Any) -> Any:
    return 2.0 / (1 + step)


def radius(step: Any) -> Any:
    return 1.5 - 0.25 * step


def test_schedules_as_bounds() -> None:
    tx = clipjax.bounded(
        optax.sgd(RATE), clip=clipjax.clip_by_global_norm(bound), project=clipjax.max_norm(radius)
    )
    params = tree(100, 2.0)
    expected = in_float64(params)
    grads = [tree(i, 3.0) for i in range(4)]
    for i, (after, _) in enumerate(train(tx, params, grads)):
        expected = projected(descend(expected, clipped(grads[i], bound(i))), radius(i))
        assert_close(after, expected, radius(i))
        assert not clipjax.verify(after, tx, step=i)


@pytest.mark.parametrize("scheduled", [False, True], ids=["changed", "scheduled"])
def test_hyperparameters_that_are_injected(scheduled: bool) -> None:
    """A bound in the state: set by hand, or by a schedule, without compiling again."""

    @optax.inject_hyperparams
    def make(rate: Any, bound: Any, radius: Any) -> Any:
        return clipjax.bounded(
            optax.sgd(rate),
            clip=clipjax.clip_by_global_norm(bound),
            project=clipjax.max_norm(radius),
            nonfinite="skip",
        )

    tx = make(rate=RATE, bound=CLIP, radius=radius if scheduled else radius(0))
    params = tree(100, 2.0)
    expected, state = in_float64(params), tx.init(params)
    update = jax.jit(tx.update)
    for i in range(4):
        if not scheduled:
            state.hyperparams["radius"] = np.asarray(radius(i), np.float32)
        updates, state = update(tree(i, 3.0), state, params)
        params = {k: params[k] + np.asarray(u) for k, u in updates.items()}
        expected = projected(descend(expected, clipped(tree(i, 3.0))), radius(i))
        assert_close(params, expected, radius(i))
    assert update._cache_size() == 1
