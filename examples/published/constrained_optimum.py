"""Projected gradient descent ends in the constrained optimum.

Least squares from the 64 pixels of scikit-learn's digits to their 10 classes, with the norm of every
column of the weights at most 0.4. The optimum is known: w = (A + λI)⁻¹ b with λ >= 0 and λ(|w| - 0.4) = 0,
and `scipy.optimize.brentq` finds λ.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.optimize import brentq
from sklearn.datasets import load_digits

import clipjax

from .row import Row, span

TITLE = "Projected descent reaches the constrained optimum"
SOURCE, ARXIV = "Karush-Kuhn-Tucker conditions", None

RADIUS = 0.4
STEPS, MOMENTUM = 2000, 0.9
TOLERANCES = {"float64": 1e-12, "float32": 1e-6}


def optimum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Solve the conditions column by column; returns the weights and the multipliers."""
    values, vectors = np.linalg.eigh(a)
    rotated = vectors.T @ b

    def norm(multiplier: float, column: np.ndarray) -> float:
        return float(np.linalg.norm(column / (values + multiplier)))

    multipliers = np.array(
        [
            brentq(lambda m, c=column: norm(m, c) - RADIUS, 1e-9, 1e3, xtol=1e-16, rtol=1e-15)
            for column in rotated.T
        ]
    )
    return vectors @ (rotated / (values[:, None] + multipliers)), multipliers


def loss_of(weights: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Half the mean squared error of a linear map."""
    return jnp.sum((x @ weights - y) ** 2) / (2 * len(x))


def descend(as_link: bool, x: jax.Array, y: jax.Array, rate: float) -> jax.Array:
    """Descend with the projection as the last link of the chain, or called on the new weights."""
    project = clipjax.max_norm(RADIUS)
    sgd = optax.sgd(rate, momentum=MOMENTUM, nesterov=True)
    tx = optax.chain(sgd, project) if as_link else sgd

    def step(carry: Any, _: None) -> tuple[Any, Any]:
        weights, state = carry
        updates, state = tx.update(jax.grad(loss_of)(weights, x, y), state, weights)
        weights = optax.apply_updates(weights, updates)
        return (weights if as_link else project(weights), state), None

    weights = jnp.zeros((x.shape[1], y.shape[1]), x.dtype)
    return jax.lax.scan(step, (weights, tx.init(weights)), None, STEPS)[0][0]


def outward(weights: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Measure the gradient's norm, and that of what `tangent_cone` leaves of it."""
    grads = jax.grad(loss_of)(weights, x, y)
    tx = clipjax.tangent_cone(RADIUS, axes=0)
    left, _ = tx.update(grads, tx.init(weights), weights)
    return clipjax.functional.global_norm(grads), clipjax.functional.global_norm(left)


def measure() -> list[Row]:
    """Measure the result."""
    images, labels = load_digits(return_X_y=True)
    pixels, classes = images / 16, np.eye(10)[labels]
    a, b = pixels.T @ pixels / len(pixels), pixels.T @ classes / len(pixels)
    best, multipliers = optimum(a, b)
    rate = float(1 / np.linalg.eigvalsh(a).max())
    # The gradient's terms, added without their signs: rounding leaves that much of it, by the dtype's unit.
    summed = pixels.T @ (pixels @ np.abs(best) + classes) / len(pixels)
    rows = []
    for dtype, tolerance in TOLERANCES.items():
        with jax.enable_x64(dtype == "float64"):
            x, y = pixels.astype(dtype), classes.astype(dtype)
            ends = [jax.jit(descend, static_argnums=0)(as_link, x, y, rate) for as_link in (True, False)]
            off = [
                float((np.linalg.norm(np.asarray(w, np.float64) - best, axis=0) / RADIUS).max()) for w in ends
            ]
            whole, left = map(float, jax.jit(outward)(ends[0], x, y))
        rounding = float(np.linalg.norm(summed) * np.finfo(dtype).eps / 2)
        rows.append(
            Row(
                f"{dtype}: in a chain and called, it ends where the conditions hold "
                f"(λ {span(multipliers.tolist(), '.2g')}); tangent leaves nothing",
                f"{off[0]:.1e} and {off[1]:.1e} of a column's norm away; tangent leaves {left:.1e} of a "
                f"gradient of {whole:.2g}",
                f"{tolerance:g} of the norm; of the gradient what its rounding leaves, {rounding:.1e}",
                max(off) <= tolerance and left <= rounding,
            )
        )
    return rows
