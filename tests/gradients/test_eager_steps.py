"""A step without jit compiles nothing that an earlier one has compiled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest

import clipjax

STEPS = {
    "skip_nonfinite": clipjax.skip_nonfinite(optax.adam(1e-3)),
    "skip_spikes": clipjax.skip_spikes(optax.adam(1e-3), window=4, max_consecutive=3),
    "bounded": clipjax.bounded(
        optax.adam(1e-3),
        clip=clipjax.clip_by_global_norm(1.0),
        project=clipjax.max_norm(1.0),
        nonfinite="skip",
    ),
    "adagc": optax.chain(clipjax.adagc(warmup_steps=1, axes=0), optax.sgd(1.0)),
    "moving": optax.chain(clipjax.clip_by_moving_max(), clipjax.normalize_by_moving_norm()),
    "autoclip": optax.chain(clipjax.autoclip(window=4), optax.sgd(1.0)),
}


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """What JAX compiles, as it does."""
    found: list[str] = []

    def listen(event: str, _: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(about))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("loss", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_later_steps_compile_nothing(name: str, loss: bool, compiled: list[str]) -> None:
    tx = STEPS[name]

    def step(value: float, state: Any) -> Any:
        grads, extra = jax.tree.map(lambda p: value * p, params), {"loss": value} if loss else {}
        return tx.update(grads, state, params, **extra)[1]

    params = {"kernel": np.ones((3, 2), np.float32)}
    state = tx.init(params)
    for value in (1.0, math.nan, 2.0):  # a step that counts, one that may not, and one after it
        state = step(value, state)
    assert compiled or loss, "the event has another name now"
    compiled.clear()
    for value in (3.0, math.nan, math.inf, 4.0):
        state = step(value, state)
    assert not compiled
