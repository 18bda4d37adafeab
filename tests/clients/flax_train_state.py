"""NNX weights in a `TrainState` on a mesh, as in Flax's example of a large decoder."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from client import check_equal, compare, log, restored
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import clipjax
from clipjax.flax import unit_axes

AXES = ("data", "model")
MESH = jax.make_mesh((2, 2), AXES, axis_types=(AxisType.Auto,) * 2)
jax.set_mesh(MESH)
WORDS = np.random.default_rng(0).integers(64, size=(8, 4, 12))


def split(*axes):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 16, embedding_init=split(None, "model"), rngs=rngs)
        self.hidden = nnx.Linear(16, 32, kernel_init=split(*AXES), rngs=rngs)
        self.out = nnx.Linear(32, 64, kernel_init=split("model", "data"), rngs=rngs)

    def __call__(self, words):
        return self.out(nnx.relu(self.hidden(self.embed(words))))


class State(TrainState):
    graphdef: nnx.GraphDef


def train(tx, words=WORDS):
    @jax.jit
    def make():
        graphdef, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)
        own = {"apply_fn": None, "graphdef": graphdef}
        state = jax.tree.map(jnp.asarray, State.create(params=params, tx=tx, **own))
        return jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state))

    def step(state, words):
        def loss_fn(params):
            logits = nnx.merge(state.graphdef, params)(words[:, :-1])
            cross_entropy = optax.softmax_cross_entropy_with_integer_labels
            return cross_entropy(logits, words[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    state = make()
    placed = nnx.get_named_sharding(state, MESH)
    data = NamedSharding(MESH, PartitionSpec("data"))
    shardings = {"in_shardings": (placed, data), "out_shardings": (placed, None)}
    jitted, losses = jax.jit(step, donate_argnums=0, **shardings), []
    for batch in words:
        state, loss = jitted(state, batch)
        losses.append(loss)
    return state, losses


def losses():
    clip = optax.clip_by_global_norm(0.1)
    return train(optax.chain(clip, optax.adamw(0.01)))[1]


compare("flax", losses)

tx = clipjax.bounded(
    optax.adamw(0.01),
    clip=[clipjax.adagc(), clipjax.clip_by_global_norm(0.1)],
    project=clipjax.max_norm(0.5, axes=unit_axes(Net(nnx.Rngs(0)))),
    nonfinite="skip",
)
state, _ = train(tx)
log(clipjax.metrics(state))
kernel = state.params["hidden"]["kernel"][...]
assert kernel.sharding.spec == PartitionSpec(*AXES)
assert jnp.linalg.norm(kernel, axis=0).max() <= 0.5
check_equal(state.opt_state, restored(state.opt_state))
