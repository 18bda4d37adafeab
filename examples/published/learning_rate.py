"""Max-norm permits a learning rate that would otherwise ruin the network (Srivastava 2014).

Scikit-learn's digits, 300 of them to train on and 1497 to test; two hidden layers of 256 ReLU units;
momentum 0.95, and a rate that decays linearly to 0 over 600 steps of 50 images.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import numpy as np
import optax

import clipjax

from .digits import accuracies, split
from .row import Row

TITLE = "Max-norm permits a huge learning rate"
SOURCE, ARXIV = "Srivastava et al. 2014", None

TRAIN, BATCH, STEPS, SEEDS, RADIUS = 300, 50, 600, 10, 1.0


class Network(nn.Module):
    """Two hidden layers; with dropout of a fifth of the pixels and half of the units, on request."""

    dropout: bool

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Map pixels `(batch, 64)` to logits `(batch, 10)`."""
        still = not (self.dropout and train)
        x = nn.Dropout(0.2, deterministic=still)(x)
        for _ in range(2):
            x = nn.relu(nn.Dense(256)(x))
            x = nn.Dropout(0.5, deterministic=still)(x)
        return nn.Dense(10)(x)


def errors(rate: float, dropout: bool, bounded: bool) -> np.ndarray:
    """Measure the test error of every seed, in percent."""
    sgd = optax.sgd(optax.linear_schedule(rate, 0, STEPS), momentum=0.95)
    tx = optax.chain(sgd, clipjax.max_norm(RADIUS)) if bounded else sgd
    data = split(TRAIN)
    return 100 * (1 - accuracies(Network(dropout), tx, data, batch=BATCH, steps=STEPS, seeds=SEEDS))


def shown(values: np.ndarray) -> str:
    """Write a mean and its standard error."""
    return f"{values.mean():.2f} ± {standard_error(values):.2f}%"


def standard_error(values: np.ndarray) -> float:
    """The standard error of the mean."""
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def measure() -> list[Row]:
    """Measure the result."""
    plain, bounded = errors(0.3, False, False), errors(0.3, False, True)
    dropped, both = errors(0.1, True, False), errors(0.1, True, True)
    noise = float(np.hypot(standard_error(dropped), standard_error(both)))
    return [
        Row(
            "rate 0.3: training fails without max-norm, and works with it (radius 1)",
            f"error {shown(plain)} without, {shown(bounded)} with it",
            "at least 50% without, at most 6% with it",
            bool(plain.mean() >= 50 and bounded.mean() <= 6),
        ),
        Row(
            "rate 0.1: dropout with max-norm errs less than dropout alone",
            f"error {shown(dropped)} alone, {shown(both)} with max-norm",
            "less, by at least 4 standard errors",
            bool(dropped.mean() - both.mean() >= 4 * noise),
        ),
    ]
