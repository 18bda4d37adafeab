# /// script
# dependencies = ["gpjax==1.0.0"]
# ///
"""The fit of a Gaussian process with GPJax, in float64."""

import gpjax as gpx
import jax
import jax.numpy as jnp
import optax
from client import compare, log

import clipjax

jax.config.update("jax_enable_x64", True)
X = jnp.linspace(0, 1, 50).reshape(-1, 1)
DATA = gpx.Dataset(X=X, y=jnp.sin(10 * X))


def fit(tx):
    mean, kernel = gpx.mean_functions.Constant(), gpx.kernels.RBF()
    prior = gpx.gps.Prior(mean_function=mean, kernel=kernel)
    return gpx.fit(
        model=prior * gpx.likelihoods.Gaussian(),
        objective=lambda p, d: -gpx.objectives.conjugate_mll(p, d),
        train_data=DATA,
        optim=tx,
        num_iters=20,
        verbose=False,
    )


def losses():
    return fit(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))[1]


compare("gpjax", losses)


def logged(tx, rows):
    """Keep the metrics of a trainer that returns no state."""

    def update(grads, state, params=None, **extra):
        updates, state = tx.update(grads, state, params, **extra)
        jax.debug.callback(rows.append, clipjax.metrics(state))
        return updates, state

    return optax.GradientTransformationExtraArgs(tx.init, update)


tx = clipjax.bounded(
    optax.adam(0.1),
    clip=clipjax.clip_by_global_norm(1.0),
    project=clipjax.box(-0.2, 0.2, where="*/constant"),
    nonfinite="skip",
)
rows = []
model, history = fit(logged(tx, rows))
jax.effects_barrier()
log(rows[-1])
assert len(rows) == len(history)
assert abs(model.prior.mean_function.constant) <= 0.2
