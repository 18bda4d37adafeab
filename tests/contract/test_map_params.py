"""`optax.tree.map_params` maps Adam's moments, and no leaf of a state of clipjax.

It calls `init` with a placeholder instead of the weights, and takes that state for a
prefix of the real one. Where the names of metrics depend on the weights, the prefix has
one leaf for all metrics.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.contract.members import ROWS
from tests.support.programs import is_transformation
from tests.support.trees import draw

WEIGHTS = draw("normal", 0, {"a": (3, 5), "c": (4, 2), "d": (7,)}, ["float32"])


def norm_of_each_leaf(updates: Any, params: Any, step: Any, memory: Any) -> Any:
    norms = jax.tree.map(jnp.linalg.norm, updates)
    paths, _ = jax.tree.flatten_with_path(norms)
    named = {jax.tree_util.keystr(path): x for path, x in paths}
    return updates, named | {"leaves": float(len(paths))}, memory


MEMBERS = {
    row.id: row.make(0.6875)
    for row in ROWS
    if (is_transformation(row) or row.kind == "projection") and row.tree != "heads"
} | {
    "max_norm, scheduled": clipjax.max_norm(optax.constant_schedule(0.6875)),
    "record_norms, leaf": clipjax.record_norms("leaf"),
    "record_norms, 1": clipjax.record_norms(1),
    "record_norms, patterns": clipjax.record_norms(["c_*", "*"]),
    "record_norms, stacked": clipjax.record_norms("leaf", stacked="c_*"),
    "record_norms, keep": clipjax.record_norms("leaf", keep=8),
    "record_norms, of": clipjax.record_norms("leaf", of=("updates", "params")),
    "record_norms, probes": clipjax.record_norms("leaf", keep=2, probes={"layers": 3}),
    "with_metrics": clipjax.with_metrics("mine", norm_of_each_leaf),
    "named": clipjax.named("a", clipjax.record_norms("leaf")),
    "bounded, everything": optax.chain(
        clipjax.record_norms("leaf"),
        clipjax.skip_spikes(
            clipjax.bounded(
                optax.scale_by_adam(),
                clip=clipjax.clip_by_group_norm({"*": 1.0}),
                project=clipjax.max_norm(optax.constant_schedule(3.0)),
                nonfinite="skip",
                accumulate=2,
            )
        ),
    ),
}
# What is a tree like the weights: moments, mean gradients, and the norms of `adagc`.
LIKE_WEIGHTS = (".mu", ".nu", ".acc_grads", ".gammas")


@pytest.mark.parametrize("name", MEMBERS)
def test_what_is_like_the_weights_is_mapped_and_nothing_else(name: str) -> None:
    tx = optax.chain(MEMBERS[name], optax.scale_by_adam())
    ones = jax.tree.map(np.ones_like, tx.init(WEIGHTS))
    mapped = optax.tree.map_params(tx, lambda x: 2 * x, ones)
    assert jax.tree.structure(mapped) == jax.tree.structure(ones)
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(ones), jax.tree.leaves(mapped), strict=True
    )
    for (path, old), new in pairs:
        is_mapped = any(part in jax.tree_util.keystr(path) for part in LIKE_WEIGHTS)
        np.testing.assert_array_equal(new, 2 * old if is_mapped else old)

    taps = {"layers": clipjax.tap(3, probe=True)}
    given = {"taps": taps} if "probes" in name else {}

    def next_state(state: Any) -> Any:
        return tx.update(WEIGHTS, state, WEIGHTS, **given)[1]

    after = jax.eval_shape(next_state, mapped)
    assert jax.tree.structure(after) == jax.tree.structure(ones)


def test_metrics_of_a_mapped_state_have_their_own_names() -> None:
    """Also inside `jit`, after those of another model were read there."""
    tx, read = clipjax.record_norms("leaf"), jax.jit(clipjax.metrics)

    @jax.jit
    def log(state: Any) -> Any:
        return read(optax.tree.map_params(tx, lambda x: x, state))

    for names in (("encoder", "decoder"), ("generator", "critic")):
        grads = {name: np.full(4, float(i)) for i, name in enumerate(names, 1)}
        _, state = tx.update(grads, tx.init(grads))
        norms = {f"record_norms/updates/{x}": 2 * i for i, x in enumerate(names, 1)}
        for each in (read, log):
            assert each(state) == norms | {"record_norms/steps": 1}
