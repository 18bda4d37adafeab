"""What trainers read and write by name in an optimizer's state."""

from typing import Any

import jax
import numpy as np
import optax

import clipjax

W = np.array([[3.0, 4.0], [0.0, 12.0]], np.float32)
PARAMS, GRADS = {"w": np.ones_like(W)}, {"w": W}
SGD = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
CLIP, PROJECTION = clipjax.clip_by_global_norm(1.0), clipjax.max_norm(1e3)
WRAPPERS: dict[str, Any] = {
    "chain": optax.chain(CLIP, SGD, PROJECTION),
    "bounded": clipjax.bounded(SGD, clip=CLIP),
    "zero": clipjax.bounded(SGD, clip=CLIP, project=PROJECTION, nonfinite="zero"),
    "skip": clipjax.bounded(SGD, clip=CLIP, nonfinite="skip"),
    "accumulate": clipjax.bounded(SGD, clip=CLIP, nonfinite="skip", accumulate=1),
    "skip_nonfinite": clipjax.skip_nonfinite(optax.chain(CLIP, SGD)),
    "skip_spikes": clipjax.skip_spikes(optax.chain(CLIP, SGD)),
    "record_norms": optax.chain(
        clipjax.record_norms("leaf", keep=2),
        clipjax.bounded(SGD, clip=CLIP, nonfinite="skip"),
    ),
}


def test_a_rate_is_found_and_set_by_name_in_every_state() -> None:
    @jax.jit
    def steps(rate: Any) -> Any:
        found = {}
        for name, tx in WRAPPERS.items():
            state = optax.tree.set(tx.init(PARAMS), learning_rate=rate)
            updates, state = tx.update(GRADS, state, PARAMS)
            found[name] = updates["w"], optax.tree.get(state, "learning_rate")
        return found

    for rate in np.float32([0.25, 0.5]):
        for name, (update, read) in steps(rate).items():
            np.testing.assert_allclose(update, -rate * W / 13, 1e-5, err_msg=name)
            assert read == rate, name
    state = WRAPPERS["skip"].init(PARAMS)
    assert state.memory.inner[-1].hyperparams["learning_rate"] == 1
