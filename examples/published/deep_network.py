"""Adaptive gradient clipping trains deep networks without normalization (Brock 2021).

Scikit-learn's digits; 12 hidden layers of 64 ReLU units; batches of 512, Nesterov momentum 0.9, 300
steps. The last layer is not clipped, as in the paper.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import numpy as np
import optax

import clipjax

from .digits import accuracies, split
from .row import Row, span

TITLE = "Adaptive gradient clipping trains deep networks without normalization"
SOURCE, ARXIV = "Brock et al. 2021", "2102.06171"

TRAIN, BATCH, STEPS, SEEDS = 1437, 512, 300, 6
CLIPPINGS = (0.01, 0.04, 0.16)


class Network(nn.Module):
    """Twelve hidden layers, and nothing between them but ReLU."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Map pixels `(batch, 64)` to logits `(batch, 10)`."""
        del train
        for _ in range(12):
            x = nn.relu(nn.Dense(64, kernel_init=nn.initializers.he_normal())(x))
        return nn.Dense(10, name="head")(x)


def found(rate: float, clipping: float | None) -> np.ndarray:
    """Measure the test accuracy of every seed."""
    tx = optax.sgd(rate, momentum=0.9, nesterov=True)
    if clipping is not None:
        axes = {"head/*": clipjax.SKIP, "*": clipjax.fan_in_or_whole}
        tx = optax.chain(clipjax.adaptive_grad_clip(clipping, axes=axes), tx)
    return accuracies(Network(), tx, split(TRAIN), batch=BATCH, steps=STEPS, seeds=SEEDS)


def measure() -> list[Row]:
    """Measure the result."""
    plain = found(0.1, None)
    slow, fast = ({c: found(rate, c) for c in CLIPPINGS} for rate in (0.1, 0.4))
    works = [c for c in CLIPPINGS if fast[c].min() >= 0.9]

    def shown(by_clipping: dict[float, np.ndarray]) -> str:
        return "; ".join(f"λ = {c:g}: {span(a.tolist(), '.3f')}" for c, a in by_clipping.items())

    return [
        Row(
            f"rate 0.1: without it no network of {SEEDS} learns, with λ from 0.01 to 0.16 all do",
            f"accuracy without {span(plain.tolist(), '.3f')}; {shown(slow)}",
            "at most 0.44 without; at least 0.956 with it",
            bool(plain.max() <= 0.44 and min(a.min() for a in slow.values()) >= 0.956),
        ),
        Row(
            "rate 0.4: only λ = 0.01 works",
            f"accuracy {shown(fast)}",
            f"at least 0.9 in all {SEEDS}, for λ = 0.01 alone",
            works == [0.01],
        ),
    ]
