"""A network in Haiku's style, with batch norm."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from client import check_equal, compare, log, restored

import clipjax

rng = np.random.default_rng(0)
X = rng.normal(size=(10, 16, 8, 8, 1)).astype(np.float32)
Y = rng.normal(size=(10, 16, 1)).astype(np.float32)


@hk.transform_with_state
def network(x):
    x = hk.Conv2D(4, 3)(x)
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training=True))
    return hk.nets.MLP([16, 1])(hk.Flatten()(x))


def train(tx, batches):
    @jax.jit
    def step(params, variables, state, x, y):
        def loss_fn(params):
            out, new = network.apply(params, variables, None, x)
            return jnp.mean((out - y) ** 2), new

        (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), new, state, loss

    params, variables = network.init(jax.random.key(0), X[0])
    state, losses = tx.init(params), []
    for x, y in batches:
        params, variables, state, loss = step(params, variables, state, x, y)
        losses.append(loss)
    return params, state, losses


batches = list(zip(X, Y, strict=True))
compare(
    "dm-haiku",
    lambda: train(
        optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, 0.9)), batches
    )[2],
)

tx = clipjax.bounded(
    optax.adam(0.01),
    clip=clipjax.clip_by_global_norm(1.0),
    project=clipjax.max_norm(0.5, axes={"w": clipjax.fan_in}),
    nonfinite="skip",
)
batches[5] = (np.full_like(X[5], np.nan), Y[5])
params, state, losses = train(tx, batches)
seen = clipjax.metrics(state)
log(seen)
assert seen["skip_nonfinite/skipped"] == 1
norms = jnp.linalg.norm(params["conv2_d"]["w"].reshape(-1, 4), axis=0)
assert norms.max() <= 0.5
check_equal((params, state), restored((params, state)))
