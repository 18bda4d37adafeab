# /// script
# dependencies = ["keras==3.15.1", "orbax-checkpoint"]
# ///
"""Keras' `fit` with its own clip and constraint, beside a loop with clipjax."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from client import check, check_equal, folder, log, restored

import clipjax

rng = np.random.default_rng(0)
X = rng.normal(size=(256, 8)).astype(np.float32)
Y = rng.normal(size=(256, 1)).astype(np.float32)


def make(**constraint):
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(16, activation="relu", name="hidden", **constraint)
    norm = keras.layers.BatchNormalization()
    return keras.Sequential(
        [keras.Input((8,)), hidden, norm, keras.layers.Dense(1, name="out")]
    )


def with_keras():
    model = make(kernel_constraint=keras.constraints.MaxNorm(1.0, axis=0))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5)
    model.compile(optimizer, loss="mse")
    # A batch of all, so that the loss is that in front of the step.
    return model.fit(X, Y, 256, epochs=10, verbose=0).history["loss"]


def with_clipjax(tx, epochs=10):
    model = make()
    weights = {v.path: v.value for v in model.trainable_variables}
    others = [v.value for v in model.non_trainable_variables]

    @jax.jit
    def step(weights, others, state):
        def loss_fn(weights):
            ordered = [weights[v.path] for v in model.trainable_variables]
            out, new = model.stateless_call(ordered, others, X, training=True)
            return jnp.mean((out - Y) ** 2), new

        (loss, others), grads = jax.value_and_grad(loss_fn, has_aux=True)(weights)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), others, state, loss

    losses, state = [], tx.init(weights)
    for _ in range(epochs):
        weights, others, state, loss = step(weights, others, state)
        losses.append(loss)
    for variable in model.trainable_variables:
        variable.assign(weights[variable.path])
    for variable, value in zip(model.non_trainable_variables, others, strict=True):
        variable.assign(value)
    return model, state, losses


tx = clipjax.bounded(
    optax.sgd(0.1, 0.9),
    clip=clipjax.clip_by_global_norm(0.5),
    project=clipjax.max_norm(1.0, axes={"hidden/kernel": 0}),
    nonfinite="skip",
)
model, state, losses = with_clipjax(tx)
check("keras", with_keras(), losses, rtol=1e-5)  # Keras divides by the norm + 1e-7
log(clipjax.metrics(state))
norms = jnp.linalg.norm(model.get_layer("hidden").kernel.value, axis=0)
assert norms.max() <= 1

check_equal(state, restored(state))
path = folder().with_suffix(".keras")
model.save(path)
check_equal(model.get_weights(), keras.models.load_model(path).get_weights())
