"""The block of docs/frameworks.md that compiles for a TPU, which takes the TPU's compiler, runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import clipjax
from benchmarks.platforms import missing, topology, without_cache
from tests.support import ROOT
from tests.support.pages import blocks


@pytest.mark.tpu_compile
def test_the_step_compiles_as_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    if reason := missing("v5e"):
        pytest.skip(reason)
    topology("v5e")  # sets what the compiler needs where there is no TPU
    (block,) = [x.content for x in blocks(ROOT / "docs/frameworks.md") if "get_topology_desc" in x.content]
    tx = clipjax.bounded(
        optax.adam(1e-1),
        clip=clipjax.clip_by_global_norm(1.0),
        project=clipjax.max_norm(1.0),
        nonfinite="skip",
    )

    @jax.jit
    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optax.apply_updates(params, updates), state

    params = {"kernel": jnp.ones((4, 2)), "bias": jnp.zeros(2)}
    shapes = jax.eval_shape(lambda: (params, tx.init(params)))
    with without_cache():
        exec(block, {"jax": jax, "step": step, "shapes": shapes})
    assert "temp_size_in_bytes" in capsys.readouterr().out
