"""Clipping biases stochastic gradients, however small the rate (Koloskova 2023).

f = x²/2, whose gradient comes with a noise of mean 0: a with probability p, else -pa/(1-p). If only the
large sample is clipped, SGD ends around p(a-c)/(1-p) and not around 0, where the clipped mean is 0.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipjax

from .row import Row

TITLE = "Clipping biases stochastic gradients"
SOURCE, ARXIV = "Koloskova et al. 2023", "2305.01588"

P, A = 0.1, 9.0
BOUNDS = np.array([2.0, 3.0, 5.0, 8.0, 20.0])
RATE, STEPS, RUNS = 0.01, 4000, 1000


def expected(bound: np.ndarray) -> np.ndarray:
    """Where the mean of the clipped gradient is 0."""
    return P * np.maximum(A - bound, 0) / (1 - P)


def mean_weight(key: jax.Array, bound: jax.Array) -> jax.Array:
    """Run SGD with its gradient clipped to `bound`; returns the mean weight over the second half."""
    tx = optax.chain(clipjax.clip_by_global_norm(bound), optax.sgd(RATE))

    def step(carry: Any, large: jax.Array) -> tuple[Any, Any]:
        x, state = carry
        noise = jnp.where(large, A, -P * A / (1 - P))
        update, state = tx.update(x + noise, state, x)
        x = optax.apply_updates(x, update)
        return (x, state), x

    x = jnp.zeros(())
    large = jax.random.bernoulli(key, P, (STEPS,))
    return jax.lax.scan(step, (x, tx.init(x)), large)[1][STEPS // 2 :].mean()


def measure() -> list[Row]:
    """Measure the result."""
    keys = jax.random.split(jax.random.key(0), RUNS)
    over_runs = jax.vmap(mean_weight, in_axes=(0, None))
    means = np.asarray(jax.jit(jax.vmap(over_runs, in_axes=(None, 0)))(keys, jnp.asarray(BOUNDS)), np.float64)
    found, error = means.mean(axis=1), means.std(axis=1, ddof=1) / np.sqrt(RUNS)
    away = np.abs(found - expected(BOUNDS)) / error
    return [
        Row(
            "SGD clipped to c = 2, 3, 5, 8, 20 settles at p(a-c)/(1-p): "
            + ", ".join(f"{x:.3f}" for x in expected(BOUNDS)),
            ", ".join(f"{x:.3f}" for x in found) + f"; at most {away.max():.1f} standard errors away",
            "within 4 standard errors",
            bool(away.max() <= 4),
        )
    ]
