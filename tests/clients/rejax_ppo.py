# /// script
# dependencies = ["rejax==0.1.3", "orbax-checkpoint"]
# ///
"""PPO of rejax on a cart pole, whose clip has a traced bound."""

import jax
import jax.numpy as jnp
import optax
from client import check_equal, compare, log, restored
from flax.training.train_state import TrainState
from rejax import PPO

import clipjax

# rejax, or what it uses, asks for what JAX no longer has.
jax.tree_map = jax.tree.map


def make():
    return PPO.create(
        env="CartPole-v1",
        num_envs=4,
        num_steps=16,
        num_epochs=2,
        num_minibatches=2,
        max_grad_norm=0.01,
        agent_kwargs={"hidden_layer_sizes": (16,)},
    )


def train(algorithm, state, steps=3):
    step, found = jax.jit(lambda algorithm, ts: algorithm.train_iteration(ts)), []
    for _ in range(steps):
        state = step(algorithm, state)
        found.append(optax.tree.norm(state.critic_ts.params))
    return state, found


def losses():
    algorithm = make()
    return train(algorithm, algorithm.init_state(jax.random.key(0)))[1]


compare("rejax", losses)

tx = clipjax.bounded(
    optax.adam(0.01),
    clip=clipjax.clip_by_global_norm(0.5),
    project=clipjax.max_norm(0.9, axes={"kernel": 0}),
    nonfinite="skip",
)
algorithm = make()
state = algorithm.init_state(jax.random.key(0))
states = (state.actor_ts, state.critic_ts)
actor, critic = (
    TrainState.create(apply_fn=(), params=each.params, tx=tx) for each in states
)
state = state.replace(actor_ts=actor, critic_ts=critic)
state, _ = train(algorithm, state)
log(clipjax.metrics(state.actor_ts))
for kernel in jax.tree.leaves(state.actor_ts.params):
    assert kernel.ndim < 2 or jnp.linalg.norm(kernel, axis=0).max() <= 0.9
kept = [(each.params, each.opt_state) for each in (state.actor_ts, state.critic_ts)]
check_equal(kept, restored(kept))
