"""A bound that follows a quantile of the norms, without a history (Andrew 2021).

In the paper a round sees the norms of many clients and moves log c by the rate, times how far the share
inside the bound is from the quantile. A step of `clip_by_quantile` sees one norm; a round is then as many
steps as it has clients, each at the rate divided by their number.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import clipjax

from .row import Row

TITLE = "The quantile rule tracks its quantile"
SOURCE, ARXIV = "Andrew et al. 2021", "1905.03871"

QUANTILES, STARTS = (0.1, 0.5, 0.9), (0.1, 100.0)
MEDIAN = 10**0.5  # as far, in logarithms, from the one start as from the other
RATE, ROUNDS, CLIENTS = 0.2, 200, 100


def last_bound(key: jax.Array, quantile: jax.Array, start: jax.Array) -> jax.Array:
    """Clip gradients of log-normal norms; returns the bound after the last round."""
    tx = clipjax.clip_by_quantile(quantile, learning_rate=RATE / CLIENTS, initial_max_norm=start)
    norms = MEDIAN * jnp.exp(jax.random.normal(key, (ROUNDS * CLIENTS, 1)))
    state, _ = jax.lax.scan(lambda state, g: (tx.update(g, state)[1], None), tx.init(norms[0]), norms)
    return clipjax.metrics(state)["clip_by_quantile/max_norm"]


def measure() -> list[Row]:
    """Measure the result."""
    quantile, start = (jnp.asarray(x.ravel()) for x in np.meshgrid(QUANTILES, STARTS, indexing="ij"))
    keys = jax.random.split(jax.random.key(0), len(start))
    found = np.asarray(jax.jit(jax.vmap(last_bound))(keys, quantile, start), np.float64)
    wanted = MEDIAN * np.exp(np.asarray(jax.scipy.stats.norm.ppf(quantile), np.float64))
    off = np.abs(found / wanted - 1)
    return [
        Row(
            "log-normal norms, q = 0.1, 0.5, 0.9, c from 0.1 and from 100: "
            "c reaches the quantile in 200 rounds",
            f"{', '.join(f'{x:.1%}' for x in off)} off",
            "within 10%",
            bool(off.max() <= 0.1),
        )
    ]
