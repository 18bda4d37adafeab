# /// script
# dependencies = ["kauldron==1.4.4"]
# ///
"""A trainer of Kauldron, with its losses and its checkpoints."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from client import compare, folder, log
from flax import linen as nn
from kauldron import kd

import clipjax


class Net(nn.Module):
    x: kd.kontext.Key = "batch.x"

    @nn.compact
    def __call__(self, x):
        return {"out": nn.Dense(1)(nn.relu(nn.Dense(16, name="hidden")(x)))}


def data():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 8)), rng.normal(size=(64, 1))
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def trainer(tx, path, **settings):
    return kd.train.Trainer(
        seed=0,
        workdir=path,
        train_ds=kd.data.InMemoryPipeline(loader=data, batch_size=16),
        model=Net(),
        train_losses={"l2": kd.losses.L2(preds="preds.out", targets="batch.y")},
        optimizer=tx,
        **settings,
    )


def losses():
    clip = optax.clip_by_global_norm(0.5)
    tx = kd.optim.named_chain(clip=clip, sgd=optax.sgd(0.1, 0.9))
    made, found = trainer(tx, folder()), []
    state = made.init_state()
    batches = made.train_ds.device_put(made.sharding.batch)
    for batch in itertools.islice(batches, 8):
        state, aux = made.trainstep.step(state, batch, return_losses=True)
        found += aux.compute().loss_values.values()
    return found


compare("kauldron", losses)

tx = clipjax.bounded(
    optax.adam(0.01),
    clip=clipjax.clip_by_global_norm(0.5),
    project=clipjax.max_norm(0.9, axes={"kernel": 0}),
    nonfinite="skip",
)
path = folder()
saved = kd.ckpts.Checkpointer(save_interval_steps=4)
state, _ = trainer(tx, path, num_train_steps=8, checkpointer=saved).train()
log(clipjax.metrics(state))
kernel = state.params["hidden"]["kernel"]
assert jnp.linalg.norm(kernel, axis=0).max() <= 0.9
again = trainer(tx, path, num_train_steps=8, checkpointer=saved)
kept = again.checkpointer.restore(again.init_state())
# It saves at step 8, and takes one step more.
assert jax.tree.structure(kept.opt_state) == jax.tree.structure(state.opt_state)
assert clipjax.metrics(kept)["skip_nonfinite/steps"] == 8
