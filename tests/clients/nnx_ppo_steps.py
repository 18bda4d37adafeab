# /// script
# dependencies = ["nnx-ppo==0.3.0"]
# ///
"""PPO of nnx-ppo, whose state holds an `nnx.Optimizer`, and its checkpoints."""

import jax
import optax
from client import check_equal, compare, folder, log
from flax import nnx
from nnx_ppo.algorithms import checkpointing, ppo
from nnx_ppo.networks.factories import make_mlp_actor_critic
from nnx_ppo.test_dummies.mock_env import MockEnv

import clipjax
from clipjax.flax import unit_axes

ENV = MockEnv(obs_size=4, action_size=2)
step = nnx.jit(
    lambda state: ppo.ppo_step(
        ENV, state, 16, 8, 0.95, 0.99, 0.2, True, False, n_epochs=2, n_minibatches=2
    )
)


def make(**settings):
    rngs = nnx.Rngs(0)
    networks = make_mlp_actor_critic(4, 2, [16], [16], rngs)
    return ppo.new_training_state(ENV, networks, 16, seed=0, **settings)


def train(state, steps=3):
    found = []
    for _ in range(steps):
        state, seen = step(state)
        found += jax.tree.leaves({x: seen[x] for x in seen if x.startswith("losses")})
    return state, found


compare("nnx-ppo", lambda: train(make(gradient_clipping=0.5))[1])


def with_clipjax():
    state = make()
    tx = clipjax.bounded(
        optax.adam(0.01),
        clip=clipjax.clip_by_global_norm(0.5),
        project=clipjax.max_norm(1.0, axes=unit_axes(state.networks)),
        nonfinite="skip",
    )
    return state.replace(optimizer=nnx.Optimizer(state.networks, tx, wrt=nnx.Param))


state, _ = train(with_clipjax())
log(clipjax.metrics(state.optimizer))
path = folder()
checkpointing.make_checkpoint_fn(path)(state, 3)
again = with_clipjax()
checkpointing.load_checkpoint(path / "step_0000000003", again.networks, again.optimizer)
check_equal(nnx.state(state.optimizer), nnx.state(again.optimizer))
