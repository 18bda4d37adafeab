"""What the tests of projections share: a link's step, limits in float64, units of a norm, singular values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.support.trees import DTYPES

KINDS = sorted(DTYPES)
every_kind = pytest.mark.parametrize("kind", KINDS)


def step_with(tx: Any, params: Any, update: Any, state: Any = None) -> Any:
    """The parameters after one step of a link."""
    updates, _ = tx.update(update, tx.init(params) if state is None else state, params)
    return optax.apply_updates(params, updates)


def wide_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Jit a function whose first argument are float64 limits, which stand for Python floats."""
    compiled = jax.jit(function)

    def call(limits: tuple[float, ...], *args: Any) -> Any:
        with jax.enable_x64(True):
            return compiled(tuple(np.float64(x) for x in limits), *args)

    return call


def units(kind: str, norm: float, shape: tuple[int, int] = (16, 4)) -> np.ndarray:
    """Columns of one norm, each in a direction of its own."""
    w = np.random.default_rng(1).standard_normal(shape)
    return (norm * w / np.linalg.norm(w, axis=0)).astype(DTYPES[kind])


def like(tree: Any, value: float) -> Any:
    return jax.tree.map(lambda x: jnp.full_like(x, value), tree)


def exact(x: Any) -> np.ndarray:
    """An array in float64, or complex128."""
    array = np.asarray(x)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def singular_values(x: Any) -> np.ndarray:
    return np.linalg.svd(exact(x), compute_uv=False)


def largest_singular_value(x: Any) -> float:
    return float(singular_values(x).max())


def capped(w: Any, bound: float) -> np.ndarray:
    """A matrix with its singular values capped, in float64."""
    u, s, vh = np.linalg.svd(exact(w), full_matrices=False)
    return (u * np.minimum(s, bound)) @ vh


def with_spectrum(rng: Any, shape: tuple[int, int], spectrum: Any) -> np.ndarray:
    """A matrix of random singular vectors and the given singular values, repeated as often as needed."""
    u, _, vh = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
    return (u * np.resize(np.asarray(spectrum, np.float64), min(shape))) @ vh
