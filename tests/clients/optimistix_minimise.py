"""A minimization of Optimistix with Optax's optimizers."""

import equinox as eqx
import jax.numpy as jnp
import optax
import optimistix as optx
from client import check_equal, compare, log, restored

import clipjax

START = {"w": jnp.array([-1.2, 1.0, 2.0, -1.0])}


def rosenbrock(y, args):
    w = y["w"]
    return jnp.sum(100 * (w[1:] - w[:-1] ** 2) ** 2 + (1 - w[:-1]) ** 2)


def minimise(tx, steps):
    solver = optx.OptaxMinimiser(tx, rtol=1e-8, atol=1e-8)
    return optx.minimise(rosenbrock, solver, START, max_steps=steps, throw=False)


def losses():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.01))
    found = [minimise(tx, steps) for steps in (1, 10, 20)]
    return [rosenbrock(each.value, None) for each in found]


compare("optimistix", losses)
tx = clipjax.bounded(
    optax.adam(0.1),
    clip=clipjax.clip_by_global_norm(1.0),
    project=clipjax.max_norm(1.5, axes={"w": None}),
    nonfinite="skip",
)
found = minimise(tx, 100)
state = found.state.opt_state
log(clipjax.metrics(state))
assert jnp.linalg.norm(found.value["w"]) <= 1.5
state = eqx.filter(state, eqx.is_array)
check_equal(state, restored(state))
