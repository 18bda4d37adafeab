"""Without a state, as of Optax's stateless clips, the update is that of the first step."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

import clipjax
from tests.contract.cases import DEFAULTS, default, every_case, problem, run
from tests.support.trees import same_bits
from tests.support.walk import NEEDS_MORE, Case, is_projection

# Those that remember nothing.
STATELESS = {
    "clip_by_value",
    "clip_by_norm",
    "clip_by_global_norm",
    "clip_by_group_norm",
    "clip_by_rms",
    "clip_by_spectral_norm",
    "adaptive_grad_clip",
    "tangent_cone",
    "tangent_space",
    "zero_nonfinite",
}
PROJECTIONS = {case.name for case in DEFAULTS if is_projection(default(case))} - set(NEEDS_MORE)


@pytest.mark.parametrize("state", [None, optax.EmptyState()], ids=["None", "EmptyState"])
@every_case
def test_the_update_of_the_first_step_or_an_error(case: Case, state: Any) -> None:
    tx, (grads, params) = default(case), problem()
    if case.name in STATELESS | PROJECTIONS:
        updates, after = jax.jit(tx.update)(grads, state, params)
        assert same_bits(updates, run(tx, grads, params)[0])
        assert after == state
    elif case.name != "bounded":
        with pytest.raises(TypeError, match=rf"state: {case.name} takes the .*State that its init or last"):
            tx.update(grads, state, params)


def test_a_schedule_needs_a_state() -> None:
    grads, _ = problem()
    tx = clipjax.clip_by_global_norm(optax.constant_schedule(1.0))
    with pytest.raises(ValueError, match=r"max_norm is a schedule.*step"):
        tx.update(grads, None)


@pytest.mark.parametrize("bounding", ["chain", "bounded"])
def test_a_run_of_optax_goes_on_with_ours(bounding: str) -> None:
    """As from a checkpoint that was restored into the state of Optax's chain."""
    grads, params = problem()
    adam = optax.adam(1e-3)
    theirs = optax.chain(optax.clip_by_global_norm(1.0), adam)
    ours = clipjax.bounded(adam, clip=clipjax.clip_by_global_norm(1.0))
    if bounding == "chain":
        ours = optax.chain(clipjax.clip_by_global_norm(1.0), adam)
    state = theirs.init(params)
    for _ in range(2):
        _, state = theirs.update(grads, state, params)
    expected, after = theirs.update(grads, state, params)
    updates, went_on = ours.update(grads, state, params)
    jax.tree.map(lambda u, e: np.testing.assert_allclose(u, e, rtol=1e-5), updates, expected)
    assert jax.tree.structure(went_on) == jax.tree.structure(after)
    assert int(optax.tree.get(went_on, "count")) == 3
