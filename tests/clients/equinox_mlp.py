"""A network in Equinox' style, saved by its `tree_serialise_leaves`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from client import check_equal, compare, folder, log

import clipjax
from clipjax.equinox import unit_axes

rng = np.random.default_rng(0)
X = rng.normal(size=(10, 16, 1, 8, 8)).astype(np.float32)
Y = rng.normal(size=(10, 16, 1)).astype(np.float32)


class Net(eqx.Module):
    conv: eqx.nn.Conv2d
    mlp: eqx.nn.MLP

    def __init__(self, key):
        of_conv, of_mlp = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(1, 4, 3, key=of_conv)
        self.mlp = eqx.nn.MLP(4 * 36, 1, 16, 2, key=of_mlp)

    def __call__(self, x):
        return self.mlp(jax.nn.relu(self.conv(x)).ravel())


def loss_fn(net, x, y):
    return jnp.mean((jax.vmap(net)(x) - y) ** 2)


def train(tx, batches):
    @eqx.filter_jit
    def step(net, state, x, y):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(net, x, y)
        arrays = eqx.filter(net, eqx.is_inexact_array)
        updates, state = tx.update(grads, state, arrays)
        return eqx.apply_updates(net, updates), state, loss

    net, losses = Net(jax.random.key(0)), []
    state = tx.init(eqx.filter(net, eqx.is_inexact_array))
    for x, y in batches:
        net, state, loss = step(net, state, x, y)
        losses.append(loss)
    return net, state, losses


batches = list(zip(X, Y, strict=True))
compare(
    "equinox",
    lambda: train(
        optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, 0.9)), batches
    )[2],
)

tx = clipjax.bounded(
    optax.adam(0.01),
    clip=clipjax.clip_by_global_norm(1.0),
    project=clipjax.max_norm(0.5, axes=unit_axes(Net(jax.random.key(0)))),
    nonfinite="skip",
)
batches[5] = (np.full_like(X[5], np.nan), Y[5])
net, state, losses = train(tx, batches)
seen = clipjax.metrics(state)
log(seen)
assert seen["skip_nonfinite/skipped"] == 1
norms = jnp.linalg.norm(net.conv.weight.reshape(4, -1), axis=1)
assert norms.max() <= 0.5

path = folder().with_suffix(".eqx")
eqx.tree_serialise_leaves(path, (net, state))
again = eqx.tree_deserialise_leaves(path, train(tx, [])[:2])
check_equal(eqx.filter((net, state), eqx.is_array), eqx.filter(again, eqx.is_array))
