# /// script
# dependencies = ["netket==3.23.0", "orbax-checkpoint"]
# ///
"""A ground state of NetKet, with real and with complex parameters, in float64."""

import jax.numpy as jnp
import netket as nk
import optax
from client import check_equal, compare, log, restored

import clipjax


def driver(tx, dtype=float):
    space = nk.hilbert.Spin(0.5, 6)
    energy = nk.operator.Ising(space, nk.graph.Chain(6), h=1.0)
    network = nk.models.RBM(alpha=2, param_dtype=dtype)
    state = nk.vqs.FullSumState(space, network, seed=0)
    return nk.VMC(energy, tx, variational_state=state)


def losses(dtype):
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))
    history = nk.logging.RuntimeLog()
    driver(tx, dtype).run(10, out=history, show_progress=False)
    return history.data["Energy"]["Mean"].real


compare("netket", lambda: losses(float))
compare("netket", lambda: losses(complex))
for dtype in (float, complex):
    tx = clipjax.bounded(
        optax.adam(0.05),
        clip=clipjax.clip_by_global_norm(1.0),
        project=clipjax.max_norm(0.1, axes={"kernel": 0}),
        nonfinite="skip",
    )
    vmc = driver(tx, dtype)
    vmc.run(10, out=nk.logging.RuntimeLog(), show_progress=False)
    log(clipjax.metrics(vmc._optimizer_state))
    kernel = vmc.state.parameters["Dense"]["kernel"]
    assert jnp.linalg.norm(kernel, axis=0).max() <= 0.1
    kept = (vmc.state.parameters, vmc._optimizer_state)
    check_equal(kept, restored(kept))
