"""States of all members with a memory, restored to a mesh as the page says."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import clipjax
from tests.contract.members import FIRST, usual

PAGE = Path(__file__).parents[2] / "docs" / "many-devices.md"


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_a_restored_state_takes_the_same_steps() -> None:
    clips = [usual(row.name) for row in FIRST.values() if row.remembers]
    clips += [clipjax.adagc(axes=0), clipjax.record_norms("leaf")]
    bound = clipjax.max_norm(optax.constant_schedule(3.0))
    every = clipjax.skip_spikes(
        clipjax.bounded(optax.adam(1e-3), clip=clips, project=bound, accumulate=2)
    )
    page: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)[0], page)
    params, grads = page["params"], page["params"]

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = every.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    target = jax.tree.map(page["on_mesh"], every.init(params))
    state = target
    for _ in range(3):
        params, state = step(params, state, grads)

    # As Orbax restores: to the devices of the target, and to no others.
    restored = jax.tree.map(
        lambda x, like: jax.device_put(np.asarray(x), like.sharding),
        state,
        target,
    )
    assert all(x.committed and len(x.devices()) == 8 for x in jax.tree.leaves(restored))
    expected, found = (step(params, each, grads) for each in (state, restored))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
