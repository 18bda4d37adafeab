# /// script
# dependencies = ["jax-privacy==2.0.0", "orbax-checkpoint"]
# ///
"""DP-SGD: the clipped sum of JAX Privacy, and that of the page on large models."""

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from client import check, check_equal, compare, log, restored
from jax_privacy import noise_addition

import clipjax
from clipjax import functional

rng = np.random.default_rng(0)
X = rng.normal(size=(64, 8)).astype(np.float32)
Y = rng.normal(size=(64, 1)).astype(np.float32)
X[0] *= 1000


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["hidden"]["kernel"])
    return jnp.mean((hidden @ params["out"]["kernel"] - y) ** 2)


def clip_example(grads):
    return functional.clip_by_global_norm(grads, 0.1)[0]


of_theirs = jax_privacy.clipped_grad(loss_fn, l2_clip_norm=0.1, batch_argnums=(1, 2))
micro = optax.microbatching.micro_grad(
    loss_fn, batch_argnums=(1, 2), microbatch_size=8, transform_fn=clip_example
)
noise = noise_addition.gaussian_privatizer(stddev=0.1, prng_key=jax.random.key(0))


def train(sum_of_clipped, tx, steps=10):
    keys = jax.random.split(jax.random.key(0))
    params = {
        "hidden": {"kernel": jax.random.normal(keys[0], (8, 16))},
        "out": {"kernel": jax.random.normal(keys[1], (16, 1))},
    }

    @jax.jit
    def step(params, state, noise_state):
        total = sum_of_clipped(params, X, Y)
        noisy, noise_state = noise.update(total, noise_state, params)
        mean = jax.tree.map(lambda g: g / len(X), noisy)
        updates, state = tx.update(mean, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, noise_state, loss_fn(params, X[1:], Y[1:])

    state, noise_state, losses = tx.init(params), noise.init(params), []
    for _ in range(steps):
        params, state, noise_state, loss = step(params, state, noise_state)
        losses.append(loss)
    return params, state, losses


def of_ours(*args):
    return micro(*args)[0]


of_both = (train(each, optax.sgd(1.0))[2] for each in (of_theirs, of_ours))
check("jax-privacy", *of_both)


def losses():
    tx = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(1.0))
    return train(of_theirs, tx)[2]


compare("jax-privacy", losses)
tx = clipjax.bounded(
    optax.adam(0.1),
    clip=clipjax.clip_by_global_norm(0.01),
    project=clipjax.max_norm(2.0),
    nonfinite="skip",
)
params, state, _ = train(of_theirs, tx)
log(clipjax.metrics(state))
assert jnp.linalg.norm(params["hidden"]["kernel"], axis=0).max() <= 2
check_equal((params, state), restored((params, state)))
