"""Scikit-learn's digits, and the training of several seeds side by side."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


class Data(NamedTuple):
    """Pixels in [0, 1] as float32 `(n, 64)`, labels `(n,)`."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def split(train: int) -> Data:
    """Take `train` images to train on, the rest to test; the same ones every time."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = (images[order] / 16).astype(np.float32), labels[order]
    return Data(x[:train], y[:train], x[train:], y[train:])


def accuracies(
    network: nn.Module, tx: optax.GradientTransformation, data: Data, *, batch: int, steps: int, seeds: int
) -> np.ndarray:
    """Train one network for each seed; returns their accuracies on the test images.

    Args:
      network: a module of `(pixels, *, train)`; it may draw from the stream "dropout".
      tx: bounds and optimizer.
      data: what to train and test on.
      batch: images per step, drawn without replacement.
      steps: how many.
      seeds: how many.
    """

    def loss_of(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
        logits = network.apply(params, x, train=True, rngs={"dropout": key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
        params, state = carry
        of_batch, of_dropout = jax.random.split(key)
        rows = jax.random.choice(of_batch, len(data.train_y), (batch,), replace=False)
        x, y = jnp.asarray(data.train_x)[rows], jnp.asarray(data.train_y)[rows]
        updates, state = tx.update(jax.grad(loss_of)(params, x, y, of_dropout), state, params)
        return (optax.apply_updates(params, updates), state), None

    def run(key: jax.Array) -> jax.Array:
        of_start, of_steps = jax.random.split(key)
        params = network.init(of_start, data.train_x[:1], train=False)
        carry = (params, tx.init(params))
        (params, _), _ = jax.lax.scan(step, carry, jax.random.split(of_steps, steps))
        return jnp.mean(network.apply(params, data.test_x, train=False).argmax(-1) == data.test_y)

    keys = jax.random.split(jax.random.key(0), seeds)
    return np.asarray(jax.jit(jax.vmap(run))(keys), np.float64)
