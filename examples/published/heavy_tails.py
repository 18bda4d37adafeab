"""Under noise without a variance, clipped SGD converges and plain SGD does not (Zhang 2020).

f = |x|²/2 in 10 dimensions, with Student's t noise of 1.5 degrees of freedom on every entry.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipjax

from .row import Row

TITLE = "Clipping survives heavy tails"
SOURCE, ARXIV = "Zhang et al. 2020", "1912.03194"

DIMENSIONS, FREEDOM, RATE, BOUND = 10, 1.5, 0.01, 5.0
STEPS, RUNS = 1000, 500


def last_values(tx: optax.GradientTransformation, noise: np.ndarray) -> np.ndarray:
    """Run SGD with `noise` (runs, steps, entries) from 1, ..., 1; returns f at the end of every run."""

    def run(noise: jax.Array) -> jax.Array:
        def step(carry: Any, noise: jax.Array) -> tuple[Any, Any]:
            x, state = carry
            update, state = tx.update(x + noise, state, x)
            return (optax.apply_updates(x, update), state), None

        x = jnp.ones(DIMENSIONS)
        (x, _), _ = jax.lax.scan(step, (x, tx.init(x)), noise)
        return jnp.sum(x**2) / 2

    return np.asarray(jax.jit(jax.vmap(run))(noise), np.float64)


def measure() -> list[Row]:
    """Measure the result."""
    # Drawn by NumPy: JAX's own Student-t takes a rejection loop for every entry.
    noise = np.random.default_rng(0).standard_t(FREEDOM, (RUNS, STEPS, DIMENSIONS)).astype(np.float32)
    plain = last_values(optax.sgd(RATE), noise)
    clipped = last_values(optax.chain(clipjax.clip_by_global_norm(BOUND), optax.sgd(RATE)), noise)
    return [
        Row(
            f"{RUNS} runs under Student-t noise of 1.5 degrees: the loss converges if clipped to 5",
            f"mean {clipped.mean():.3f}, largest {clipped.max():.2f}; unclipped mean {plain.mean():.3g}, "
            f"largest {plain.max():.3g}",
            "mean at least 20 times lower, largest below 1",
            bool(20 * clipped.mean() <= plain.mean() and clipped.max() < 1),
        )
    ]
