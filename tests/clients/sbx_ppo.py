# /// script
# dependencies = ["sbx-rl==0.28.0"]
# ///
"""PPO of SBX on a pendulum, saved by SBX."""

import jax
import jax.numpy as jnp
import optax
from client import check_equal, compare, folder, log
from sbx import PPO

import clipjax


def make(**settings):
    return PPO(
        "MlpPolicy", "Pendulum-v1", n_steps=64, batch_size=32, seed=0, **settings
    )


def losses():
    model, found = make(max_grad_norm=0.5), []
    for _ in range(3):
        model.learn(64, reset_num_timesteps=False)
        seen = model.logger.name_to_value
        found += [seen["train/value_loss"], seen["train/pg_loss"]]
    return found


compare("sbx-rl", losses)


def optimizer(learning_rate):
    return clipjax.bounded(
        optax.adam(learning_rate),
        clip=clipjax.clip_by_global_norm(0.5),
        project=clipjax.max_norm(0.9, axes={"kernel": 0}),
        nonfinite="skip",
    )


model = make(
    max_grad_norm=jnp.inf,
    learning_rate=0.01,
    policy_kwargs={"optimizer_class": optimizer},
)
model.learn(128)
seen = clipjax.metrics(model.policy.actor_state)
log(seen)
model.learn(64, reset_num_timesteps=False)
for kernel in jax.tree.leaves(model.policy.actor_state.params):
    assert kernel.ndim < 2 or jnp.linalg.norm(kernel, axis=0).max() <= 0.9

path = folder()
model.save(path)
again = PPO.load(path)
for name in ("actor_state", "vf_state"):
    before, after = (getattr(each.policy, name) for each in (model, again))
    check_equal((before.params, before.opt_state), (after.params, after.opt_state))
