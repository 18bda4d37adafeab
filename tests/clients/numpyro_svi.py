# /// script
# dependencies = ["numpyro==0.22.0", "orbax-checkpoint"]
# ///
"""Variational inference of a regression in NumPyro."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from client import check_equal, compare, log, restored
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import clipjax

rng = np.random.default_rng(0)
X = rng.normal(size=(64, 3)).astype(np.float32)
Y = X @ np.float32([1, -2, 5]) + 0.1


def model(x, y):
    weights = numpyro.sample("weights", dist.Normal(jnp.zeros(3), 10).to_event(1))
    numpyro.sample("y", dist.Normal(x @ weights, 0.5), obs=y)


def run(tx):
    optimizer = numpyro.optim.optax_to_numpyro(tx)
    svi = SVI(model, AutoNormal(model), optimizer, Trace_ELBO())
    result = svi.run(jax.random.key(0), 50, X, Y, progress_bar=False)
    return result, optimizer


def losses():
    clip = optax.clip_by_global_norm(1.0)
    return run(optax.chain(clip, optax.sgd(0.01)))[0].losses


compare("numpyro", losses)
tx = clipjax.bounded(
    optax.adam(0.5),
    clip=clipjax.clip_by_global_norm(10.0),
    project=clipjax.box(-3.0, 3.0, where="*loc"),
    nonfinite="skip",
)
result, optimizer = run(tx)
log(clipjax.metrics(result.state))
assert result.params["weights_auto_loc"].max() == 3
check_equal(result.state.optim_state, restored(result.state.optim_state))
