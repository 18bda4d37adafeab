"""Histories of metrics from a training loop, a scan or a log, as arrays over the steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from clipjax._core.arguments import shown
from clipjax.monitoring.norm_log import NormLog, key_of_norm

History: TypeAlias = Sequence[Mapping[str, Any]] | Mapping[str, Any]


class Norms(NamedTuple):
    """Norms over the steps."""

    what: str  # what was measured: "norm of the gradient" or "norm of the weights"
    steps: np.ndarray  # the number of each step
    values: np.ndarray  # the norm at each step
    beside: dict[str, np.ndarray]  # other metrics of the same norm: norm_after, threshold, skipped


def norms_over_steps(history: Any, name: str | None) -> Norms:
    """Read the norms of the given name, or the only ones."""
    of_gradient = "norm of the gradient"
    if isinstance(history, NormLog):
        values = _some(history.norms)
        return Norms(of_gradient, history.dropped + 1 + np.arange(len(values)), values, {})
    rows = isinstance(history, Sequence) and len(history) > 0 and isinstance(history[0], Mapping)
    if not (isinstance(history, Mapping) or rows):
        try:
            of_states = any(hasattr(x, "_fields") for x in (history, *history))
            values = np.asarray("a state" if of_states else jax.device_get(history), np.float64)
        except (TypeError, ValueError):
            raise TypeError(
                f"history must be norms, a NormLog, or clipjax.metrics of each step, got {shown(history)}"
            ) from None
        if values.ndim != 1:
            raise ValueError(f"history: norms must have shape (steps,), got {values.shape}")
        return Norms(of_gradient, 1 + np.arange(len(values)), _some(values), {})
    found = columns(history)
    key = key_of_norm(found, name)
    of_all = key.split("/", maxsplit=1)[0]
    keys = {other: re.sub("/norm(?=/|$)", f"/{other}", key) for other in ("norm_after", "threshold")}
    keys |= {other: f"{of_all}/{other}" for other in ("steps", "skipped")}
    beside = {other: found[at] for other, at in keys.items() if at in found and at != key}
    what = "norm of the weights" if f"{of_all}/violation" in found else of_gradient
    steps = beside.pop("steps", 1 + np.arange(len(found[key])))
    return Norms(what, steps, found[key], beside)


def norms_of_groups(metrics: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return norms by group: the recorded ones, else all norms in the metrics, else the mapping itself."""
    for pattern in ("record_norms/updates/(.+)", ".+/norm/(.+)", "(.+)/norm"):
        matches = {key: re.fullmatch(pattern, key) for key in metrics}
        if found := {match[1]: metrics[key] for key, match in matches.items() if match}:
            return found
    return dict(metrics)


def columns(history: History) -> dict[str, np.ndarray]:
    """Return the values of each metric over the steps, in float64."""
    if not isinstance(history, Mapping):
        names = list(_some(history)[0])  # in their original order; JAX would sort them
        rows = jax.device_get(list(history))
        return {name: np.asarray([row[name] for row in rows], np.float64) for name in names}
    fetched = jax.device_get(list(history.values()))
    return {name: np.atleast_1d(np.asarray(x, np.float64)) for name, x in zip(history, fetched, strict=True)}


def _some(values: Any) -> Any:
    """Return the values of the steps; raise if there are none."""
    if len(values) == 0:
        raise ValueError("history: it contains no steps")
    return values


def fitting(name: str, values: Any, like: np.ndarray) -> np.ndarray:
    """Return an argument as an array that has one entry for each step."""
    array = np.asarray(jax.device_get(values))
    if array.shape != like.shape:
        raise ValueError(f"{name} must have the shape of the norms, {like.shape}, got {array.shape}")
    return array
