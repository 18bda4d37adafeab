"""Clips whose threshold follows past norms: sequences of gradients, how to run them, and the oracles.

The oracles are written down from the papers and from how the authors' code behaves, as plain Python over a
list of norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

SHAPES = {"bias": (3,), "kernel": (4, 3)}
PARAMS = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
STEPS = 160


def sequence(seed: int, steps: int = STEPS) -> np.ndarray:
    """Norms that drift and vary by a factor, at some scale, with spikes."""
    rng = np.random.default_rng(seed)
    norms = np.exp(
        rng.uniform(-6, 6) + 0.3 * rng.standard_normal(steps) + np.linspace(0, rng.uniform(-1, 1), steps)
    )
    spikes = rng.random(steps) < 0.08
    spikes[0] = seed % 2
    return norms * np.where(spikes, rng.uniform(2, 50, steps), 1)


def leaves_of_norm(norms: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """A sequence of trees, stacked, whose global norms are as given; float32."""
    norms, rng = np.asarray(norms), np.random.default_rng(seed)
    parts = {name: rng.standard_normal((len(norms), *shape)) for name, shape in SHAPES.items()}
    flat = np.concatenate([p.reshape(len(norms), -1) for p in parts.values()], axis=1)
    factor = norms / np.linalg.norm(flat, axis=1)
    return {
        name: (p * factor.reshape(-1, *[1] * (p.ndim - 1))).astype(np.float32) for name, p in parts.items()
    }


def measured(stacked: Any) -> np.ndarray:
    """The global norm of each tree of a stack, in float64."""
    parts = [np.asarray(x).astype(np.float64).reshape(len(x), -1) for x in jax.tree.leaves(stacked)]
    return np.linalg.norm(np.concatenate(parts, axis=1), axis=1)


def leaf_norms(stacked: Any) -> np.ndarray:
    """The norm of each leaf of each tree of a stack, in float64: an array (steps, leaves)."""
    return np.stack([measured([leaf]) for leaf in jax.tree.leaves(stacked)], axis=1)


class Run(NamedTuple):
    """What a transformation did over a sequence of steps."""

    norms: np.ndarray  # before, in float64
    updates: Any  # of each step, stacked
    thresholds: np.ndarray  # of each step, in float64
    state: Any  # the last

    @property
    def clipped(self) -> np.ndarray:
        """The norms after, in float64."""
        return measured(self.updates)

    @property
    def steps_clipped(self) -> int:
        return int(self.state[0].clipped)


def runner(rules: Mapping[str, Any], params: Any = PARAMS) -> Callable[[Any], dict[str, Run]]:
    """One compiled program that runs all these transformations side by side over a stack of gradients."""

    @jax.jit
    def program(stacked: Any) -> Any:
        def one(states: Any, grads: Any) -> Any:
            done = {name: tx.update(grads, states[name], params) for name, tx in rules.items()}
            after = {name: state for name, (_, state) in done.items()}
            return after, {name: (updates, after[name].threshold) for name, (updates, _) in done.items()}

        return jax.lax.scan(one, {name: tx.init(params) for name, tx in rules.items()}, stacked)

    def follow(stacked: Any) -> dict[str, Run]:
        before, (states, steps) = measured(stacked), jax.tree.map(np.asarray, program(stacked))
        return {
            name: Run(before, updates, thresholds.astype(np.float64), states[name])
            for name, (updates, thresholds) in steps.items()
        }

    return follow


# --------------------------------------------------------------------------------------------------
# The oracles: what each norm is clipped to.


def autoclip(norms: np.ndarray, percentile: float = 10, window: int = 1000) -> list[float]:
    return [
        min(n, np.percentile(norms[max(0, i + 1 - window) : i + 1], percentile)) for i, n in enumerate(norms)
    ]


def zclip(
    norms: np.ndarray,
    z_threshold: float = 2.5,
    decay: float = 0.97,
    warmup_steps: int = 25,
    max_norm: float | None = None,
    mode: str = "adaptive",
    clip_factor: float = 1.0,
    eps: float = 1e-6,
    update_on_spike: bool = True,
) -> list[float]:
    cap = math.inf if max_norm is None else max_norm
    buffer: list[float] = []
    mean = var = None
    out = []
    for n in norms:
        if mean is None:
            buffer.append(n)
            if len(buffer) >= warmup_steps:
                mean = sum(buffer) / len(buffer)
                var = sum((x - mean) ** 2 for x in buffer) / len(buffer)
            out.append(min(n, cap))
            continue
        std = math.sqrt(var)
        target = None
        if mode == "percentile":
            if n > mean + z_threshold * std:
                target = mean + z_threshold * std
        else:
            z = (n - mean) / (std + eps)
            if z > z_threshold:
                target = (
                    mean if mode == "mean" else (mean + z_threshold * std / (z / z_threshold)) * clip_factor
                )
        out.append(min(n, target if target is not None else n, cap))
        if target is None or update_on_spike:
            x = n if target is None else target
            mean = decay * mean + (1 - decay) * x
            var = decay * var + (1 - decay) * (x - mean) ** 2
    return out


def lognormal(
    norms: np.ndarray,
    std_factor: float = 2.0,
    decay: float = 0.95,
    max_norm: float | None = None,
    eps: float = 1e-8,
) -> list[float]:
    mean = square = 0.0
    out = []
    for t, n in enumerate(norms):
        log, d = math.log(n + eps), min(decay, t / (t + 1))
        mean = d * mean + (1 - d) * log
        square = d * square + (1 - d) * log**2
        std = math.sqrt(max(eps, square - mean**2))
        factor = 1.0 if n < math.exp(mean + std_factor * std) else math.exp(mean) / n
        out.append(n * (factor if max_norm is None else min(factor, max_norm / n)))
    return out


def quantile(
    norms: np.ndarray, quantile: float = 0.5, learning_rate: float = 0.2, initial_max_norm: float = 1.0
) -> list[float]:
    bound, out = initial_max_norm, []
    for n in norms:
        out.append(min(n, bound))
        bound *= math.exp(-learning_rate * ((n <= bound) - quantile))
    return out


def adagc(
    leaves: np.ndarray,
    relative_bound: float = 1.04,
    decay: float = 0.99,
    warmup_steps: int = 100,
    max_norm: float = 1.0,
    warmup_norms: str = "before",
) -> np.ndarray:
    """Over an array (steps, leaves) of norms."""
    gamma = [math.inf] * leaves.shape[1]
    out = []
    for t, norms in enumerate(leaves):
        total = math.sqrt(sum(n * n for n in norms))
        clipped = [n * min(1, max_norm / total) for n in norms]
        if t < warmup_steps:
            gamma = [
                min(g, n) for g, n in zip(gamma, norms if warmup_norms == "before" else clipped, strict=True)
            ]
        else:
            gamma = [n if g == math.inf else g for g, n in zip(gamma, norms, strict=True)]
            clipped = [min(n, relative_bound * g) for g, n in zip(gamma, norms, strict=True)]
            gamma = [decay * g + (1 - decay) * c for g, c in zip(gamma, clipped, strict=True)]
        out.append(clipped)
    return np.array(out)
