"""Where curvature grows with the gradient, clipped gradient descent takes far fewer steps (Zhang 2019).

f = 2 cosh x has f'' <= L0 + L1 |f'| with L0 = 2 and L1 = 1. From x = 10 a constant rate must be small
enough for the steepest place; a clipped step may have the rate that is right for the bottom.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipjax

from .row import Row

TITLE = "Clipped gradient descent is faster on (L0, L1)-smooth functions"
SOURCE, ARXIV = "Zhang et al. 2019", "1905.11881"

L0, L1, START, TOLERANCE = 2.0, 1.0, 10.0, 1e-3
RATE = 1 / (10 * L0)
BOUND = min(1 / RATE, 1 / (10 * RATE * L1))
LIMIT = 20_000  # steps


def steps_needed(tx: optax.GradientTransformation) -> tuple[jax.Array, jax.Array]:
    """Count the steps until |f'| <= TOLERANCE; returns also whether the weight overflowed instead."""

    def go_on(carry: Any) -> jax.Array:
        x, _, step = carry
        # NaN compares false: a run that overflows stops.
        return (jnp.abs(slope(x)) > TOLERANCE) & jnp.isfinite(slope(x)) & (step < LIMIT)

    def step(carry: Any) -> Any:
        x, state, count = carry
        update, state = tx.update(slope(x), state, x)
        return optax.apply_updates(x, update), state, count + 1

    slope = jax.grad(lambda x: 2 * jnp.cosh(x))
    x = jnp.array(START)
    x, _, count = jax.lax.while_loop(go_on, step, (x, tx.init(x), jnp.array(0)))
    overflowed = ~jnp.isfinite(slope(x))
    return jnp.where(overflowed, LIMIT, count), overflowed


def on_the_straight(start: float, rate: float, bound: float) -> tuple[int, float]:
    """On x⁴ the clipped steps are all rate · bound long while 4x³ > bound.

    Returns:
      How many such steps there are, and the largest deviation of x from start - k · rate · bound.
    """
    steps = int(np.ceil((start - (bound / 4) ** (1 / 3)) / (rate * bound)))
    tx = optax.chain(clipjax.clip_by_global_norm(bound), optax.sgd(rate))

    def step(carry: Any, _: None) -> tuple[Any, Any]:
        x, state = carry
        update, state = tx.update(jax.grad(lambda x: x**4)(x), state, x)
        x = optax.apply_updates(x, update)
        return (x, state), x

    x = jnp.array(start)
    path = jax.jit(lambda x: jax.lax.scan(step, (x, tx.init(x)), None, steps)[1])(x)
    line = start - rate * bound * np.arange(1, steps + 1)
    return steps, float(np.abs(np.asarray(path) - line).max())


def measure() -> list[Row]:
    """Measure the result."""
    with jax.enable_x64(True):
        clip = optax.chain(clipjax.clip_by_global_norm(BOUND), optax.sgd(RATE))
        clipped = int(jax.jit(lambda: steps_needed(clip))()[0])
        rates = jnp.logspace(-6, 0, 60)
        constant = jax.jit(jax.vmap(lambda rate: steps_needed(optax.sgd(rate))[0]))(rates)
        best, best_rate = int(constant.min()), float(rates[constant.argmin()])
        overflows = bool(jax.jit(lambda: steps_needed(optax.sgd(RATE)))()[1])
        straight, deviation = on_the_straight(30.0, 0.01, 10.0)
    return [
        Row(
            "2 cosh x from 10: fewer steps to a slope of 0.001 than at any constant rate",
            f"{clipped} steps; best of 60 constant rates, {best_rate:.2g}: {best:,}; "
            f"unclipped at the same rate: {'overflows' if overflows else 'does not overflow'}",
            "162 steps, at least 10 times fewer than the best; unclipped overflows",
            clipped == 162 and best >= 10 * clipped and overflows,
        ),
        Row(
            "x⁴ from 30: every step has the length rate · bound while 4x³ > bound",
            f"{straight} steps, at most {deviation:.1e} off the line",
            "1e-12 off in float64",
            deviation <= 1e-12,
        ),
    ]
