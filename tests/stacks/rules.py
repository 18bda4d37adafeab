"""What training stacks do to gradients, restated in NumPy's float64: the oracles of docs/stacks.md.

Written from what their files do, which the page names; a tree is a dict from paths to arrays here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

Tree = dict[str, np.ndarray]


def tree(values: Any) -> Tree:
    """A pytree as a dict from its paths to float64 arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(values)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x, np.float64) for p, x in leaves}


def steps(values: Any) -> list[Tree]:
    """The trees of a run, whose arrays have one entry for each step."""
    found = tree(values)
    return [{path: x[i] for path, x in found.items()} for i in range(len(next(iter(found.values()))))]


def norm(values: Tree) -> float:
    return math.sqrt(sum(float(np.sum(x * x)) for x in values.values()))


def assert_close(ours: Sequence[Tree], theirs: Sequence[Tree], rtol: float = 1e-4) -> None:
    """Both do the same at every step, to `rtol` of the largest entry of the run."""
    size = max(np.abs(x).max() for expected in theirs for x in expected.values())
    assert len(ours) == len(theirs)
    assert size > 0
    for i, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert set(found) == set(expected)
        for path, x in expected.items():
            np.testing.assert_allclose(found[path], x, rtol=rtol, atol=rtol * size, err_msg=f"{i}: {path}")


def zeros(values: Tree) -> Tree:
    return {path: np.zeros_like(x) for path, x in values.items()}


def scaled(values: Tree, factor: float) -> Tree:
    return {path: factor * x for path, x in values.items()}


def clipped(grads: Tree, max_norm: float, eps: float = 0.0) -> Tree:
    """All of them times max_norm / (norm + eps), where that is below 1."""
    size = norm(grads) + eps
    return scaled(grads, max_norm / size) if size > max_norm else grads


def adam(
    learning_rate: float, weight_decay: float = 0.0, shape_update: Callable[[Tree], Tree] = lambda u: u
) -> Callable[[Tree, Tree], Tree]:
    """AdamW with its usual numbers; `shape_update` sees the update before the learning rate."""
    count, first, second = 0, {}, {}

    def step(grads: Tree, params: Tree) -> Tree:
        nonlocal count
        count += 1
        update = {}
        for path, g in grads.items():
            first[path] = 0.9 * first.get(path, 0.0) + 0.1 * g
            second[path] = 0.999 * second.get(path, 0.0) + 0.001 * g * g
            m, v = first[path] / (1 - 0.9**count), second[path] / (1 - 0.999**count)
            update[path] = m / (np.sqrt(v) + 1e-8) + weight_decay * params[path]
        return scaled(shape_update(update), -learning_rate)

    return step


def is_outlier(past: list[float], value: float, factor: float, window: int, ddof: int, least: float) -> bool:
    """Above the mean of the last values by more than `factor` standard deviations, or not comparable."""
    values = np.asarray(past[-window:])
    std = math.sqrt(np.sum((values - values.mean()) ** 2) / max(1, len(values) - ddof))
    return not value - values.mean() <= factor * max(std, least)


def maxtext_skips(losses: Sequence[float], norms: Sequence[float], window: int = 128) -> list[bool]:
    """Of its loss or its norm, at its turn the 64th or later, whatever it was then joins the window."""
    return [
        i + 1 >= max(2, window // 2)
        and (
            is_outlier(list(losses[:i]), losses[i], 6.0, window, 1, 0.0)
            or is_outlier(list(norms[:i]), norms[i], 6.0, window, 1, 0.0)
        )
        for i in range(len(losses))
    ]


def levanter_skips(losses: Sequence[float], norms: Sequence[float], window: int = 128) -> list[bool]:
    """As MaxText's, from the 65th step on, with the deviation of a population, at least 1e-6."""
    return [
        i >= max(2, window // 2)
        and (
            is_outlier(list(losses[:i]), losses[i], 6.0, window, 0, 1e-6)
            or is_outlier(list(norms[:i]), norms[i], 6.0, window, 0, 1e-6)
        )
        for i in range(len(losses))
    ]


def axlearn_skips(norms: Sequence[float], multiplier: float = 20.0, decay: float = 0.99) -> list[bool]:
    """Not finite, or not below so many times the moving average of the norms of the steps taken."""
    mean, count, skips = 1.0, 0, []
    for size in norms:
        skips.append(not (math.isfinite(size) and size < multiplier * mean))
        if not skips[-1]:
            kept = decay * (1 - decay**count) / (1 - decay ** (count + 1))
            mean, count = kept * mean + (1 - kept) * size, count + 1
    return skips


def levanter_rms_clip(threshold: float, stacked: Sequence[str]) -> Callable[[Tree], Tree]:
    """Each leaf over max(1, RMS / threshold); of `stacked` leaves each layer, the first axis, by itself."""

    def one(x: np.ndarray) -> np.ndarray:
        return x / max(1.0, math.sqrt(np.mean(x * x)) / threshold)

    return lambda values: {
        path: np.stack([one(layer) for layer in x]) if path in stacked else one(x)
        for path, x in values.items()
    }


def megatron_scales(overflows: Sequence[bool], scale: float, hysteresis: int, interval: int) -> list[float]:
    """The loss scale after each step: halved once `hysteresis` overflows came since it last grew."""
    left, good, scales = hysteresis, 0, []
    for overflow in overflows:
        if overflow:
            good, left = 0, left - 1
            scale = max(scale / 2, 1.0) if left <= 0 else scale
        else:
            good += 1
            if good == interval:
                good, left, scale = 0, hysteresis, 2 * scale
        scales.append(scale)
    return scales
