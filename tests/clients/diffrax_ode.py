# /// script
# dependencies = ["diffrax==0.7.2"]
# ///
"""A neural differential equation of Diffrax, saved by Equinox."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from client import check_equal, compare, folder, log

import clipjax
from clipjax.equinox import unit_axes

TIMES = jnp.linspace(0, 3, 16)
DATA = jnp.stack([jnp.cos(TIMES), -jnp.sin(TIMES)], axis=1)
FIELD = eqx.nn.MLP(2, 2, 16, 1, key=jax.random.key(0))


def loss_fn(field):
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, args: field(y)),
        diffrax.Tsit5(),
        t0=0,
        t1=3,
        dt0=0.1,
        y0=DATA[0],
        saveat=diffrax.SaveAt(ts=TIMES),
    )
    return jnp.mean((solution.ys - DATA) ** 2)


def train(tx, steps=10):
    @eqx.filter_jit
    def step(field, state):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(field)
        arrays = eqx.filter(field, eqx.is_inexact_array)
        updates, state = tx.update(grads, state, arrays)
        return eqx.apply_updates(field, updates), state, loss

    field, losses = FIELD, []
    state = tx.init(eqx.filter(field, eqx.is_inexact_array))
    for _ in range(steps):
        field, state, loss = step(field, state)
        losses.append(loss)
    return field, state, losses


def losses():
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, 0.9))
    return train(tx)[2]


compare("diffrax", losses)
tx = clipjax.bounded(
    optax.adam(0.01),
    clip=clipjax.clip_by_global_norm(1.0),
    project=clipjax.max_norm(0.5, axes=unit_axes(FIELD)),
    nonfinite="skip",
)
field, state, _ = train(tx)
log(clipjax.metrics(state))
assert jnp.linalg.norm(field.layers[0].weight, axis=1).max() <= 0.5

path = folder().with_suffix(".eqx")
eqx.tree_serialise_leaves(path, (field, state))
again = eqx.tree_deserialise_leaves(path, train(tx, steps=0)[:2])
field_and_state = eqx.filter((field, state), eqx.is_array)
check_equal(field_and_state, eqx.filter(again, eqx.is_array))
