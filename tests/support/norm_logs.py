"""Logs of gradient norms to test with."""

from __future__ import annotations

from typing import Any

import numpy as np

import clipjax


def filled(norms: Any, **options: Any) -> clipjax.NormLog:
    log = clipjax.NormLog(**options)
    log.extend(np.asarray(norms))
    return log


def some(count: int = 500, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    norms = np.exp(0.5 * rng.standard_normal(count)).astype(np.float32)
    norms[rng.random(count) < 0.02] *= 100
    return norms
