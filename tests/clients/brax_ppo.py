# /// script
# dependencies = ["brax==0.14.2", "orbax-checkpoint"]
# ///
"""PPO of Brax, and its `gradient_update_fn`, which takes an optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from brax import envs
from brax.training import gradients, networks
from brax.training.agents.ppo import train as ppo
from client import check_equal, compare, log, restored

import clipjax

# Brax uses what JAX no longer has.
jax.device_put_replicated = lambda tree, devices: jax.tree.map(
    lambda x: jnp.stack([x] * len(devices)), tree
)


def losses():
    found = []
    ppo.train(
        envs.get_environment("fast"),
        num_timesteps=2048,
        num_envs=16,
        episode_length=32,
        unroll_length=8,
        batch_size=16,
        num_minibatches=4,
        num_evals=3,
        max_grad_norm=0.5,
        progress_fn=lambda step, seen: found.extend(
            seen[name] for name in seen if name.endswith("_loss")
        ),
    )
    return found


compare("brax", losses)

# Its loops give `update` no parameters, so that a projection is applied directly.
X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
network = networks.MLP([16, 2])
tx = clipjax.bounded(
    optax.adam(0.01), clip=clipjax.clip_by_global_norm(0.5), nonfinite="skip"
)
project = clipjax.max_norm(1.0)


def loss_fn(params, x):
    return jnp.mean((network.apply(params, x) - 1) ** 2)


update = gradients.gradient_update_fn(loss_fn, tx, pmap_axis_name=None)


@jax.jit
def step(params, state, x):
    _, params, state = update(params, x, optimizer_state=state)
    return project.apply(params), state


params = network.init(jax.random.key(0), X)
state = tx.init(params)
for i in range(10):
    params, state = step(params, state, np.full_like(X, np.nan) if i == 5 else X)
seen = clipjax.metrics(state)
log(seen)
assert seen["skip_nonfinite/skipped"] == 1
check_equal((params, state), restored((params, state)))
