"""Metrics by their names, and counters that are full."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import clipjax

MOST = np.iinfo(np.int32).max


def of_metrics(names: Any) -> Any:
    """A transformation with a float, an int and a bool of each name."""

    def act(updates: Any, params: Any, step: Any, memory: Any) -> Any:
        found: dict[str, Any] = {}
        for i, name in enumerate(names):
            found[name] = updates * (i + 1)
            found[f"{name}/count"] = i + 2
            found[f"{name}/is_large"] = updates > i
        return updates, found, memory

    return clipjax.with_metrics("n", act)


NAMES = [
    ["a"],
    ["a", "encoder/*", "b"],
    [f"block_{i}/attention/kernel" for i in range(9)],
]


@pytest.mark.parametrize("names", NAMES, ids=lambda names: names[-1])
def test_each_metric_is_found_by_its_name(names: list[str]) -> None:
    tx = of_metrics(names)
    seeds = np.float32([0.5, 1.5])

    def two_steps(update: Any) -> Any:
        _, state = tx.update(update, tx.init(update))
        state = tx.update(update, state)[1]
        return state, clipjax.metrics(state)  # while it is traced

    state, found = jax.jit(jax.vmap(two_steps))(seeds)
    np.testing.assert_array_equal(state.step, [2, 2])
    bare = serialization.to_state_dict(state)
    for each in (found, clipjax.metrics(state), clipjax.metrics([bare])):
        assert len(each) == 3 * len(names) + 1
        np.testing.assert_array_equal(each["n/steps"], [2, 2])
        for i, name in enumerate(names):
            np.testing.assert_array_equal(each[f"n/{name}"], seeds * (i + 1))
            np.testing.assert_array_equal(each[f"n/{name}/count"], [2 * (i + 2)] * 2)
            fraction = each[f"n/{name}/is_large_fraction"]
            np.testing.assert_array_equal(fraction, seeds > i)


def test_a_recorder_without_leaves_has_metrics_inside_jit() -> None:
    """As of a label that no weight has."""
    parts = {"all": optax.identity(), "none": clipjax.record_norms("leaf")}
    tx = optax.partition(parts, {"w": "all"})
    weights = {"w": jnp.ones(2)}
    step = jax.jit(lambda s: clipjax.metrics(tx.update(weights, s, weights)[1]))
    assert {*step(tx.init(weights))} == {"record_norms/steps"}


def test_metrics_may_have_any_dtype_and_numbers_for_names() -> None:
    """Where JAX refuses to promote them, too."""
    kinds = ("bfloat16", "float16", "float32")

    def act(updates: Any, params: Any, step: Any, memory: Any) -> Any:
        found = {i: updates.astype(kind) for i, kind in enumerate(kinds)}
        return updates, found, memory

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        tx = optax.chain(
            clipjax.with_metrics("n", lambda x, *rest: act(x["a"], *rest)),
            optax.stateless(lambda _, params: params),
            clipjax.clip_by_global_norm(1.0),
            clipjax.record_norms("leaf"),
        )
        tree = {"a": jnp.float32(3), "b": jnp.float64(4)}
        _, state = jax.jit(tx.update)(tree, tx.init(tree), tree)
        found = jax.device_get(clipjax.metrics(state))
        # Losses are float64 there, beside norms of float32 leaves.
        skip = clipjax.skip_spikes(optax.identity())
        of_skip = jax.device_get(clipjax.metrics(skip.init({"a": tree["a"]})))
    assert of_skip["skip_spikes/loss"].dtype == np.float64
    assert [found[f"n/{i}"] for i in range(len(kinds))] == [3] * len(kinds)
    assert found["clip_by_global_norm/norm"] == 5
    assert found["record_norms/updates/b"] == pytest.approx(0.8)


def test_metrics_have_no_derivative() -> None:
    for tx, name in (
        (of_metrics("a"), "n/a"),
        (clipjax.clip_by_global_norm(1.0), "clip_by_global_norm/norm"),
        (clipjax.record_norms(), "record_norms/updates"),
    ):

        def metric(x: Any, tx: Any = tx, name: str = name) -> Any:
            return clipjax.metrics(tx.update(x, tx.init(x))[1])[name]

        assert jax.grad(metric)(3.0) == 0


def test_counters_of_states_stop_at_their_largest_value() -> None:
    tx = clipjax.clip_by_global_norm(1.0)

    @jax.jit
    def worn(grads: Any) -> Any:
        full = jax.tree.map(
            lambda x: jnp.full_like(x, MOST) if x.dtype == np.int32 else x,
            tx.init(grads),
        )
        return tx.update(grads, full)[1]

    found = clipjax.metrics(worn(np.float32([np.nan, np.nan])))
    for key in ("nonfinite_count", "steps"):
        assert found[f"clip_by_global_norm/{key}"] == MOST


def test_a_leaf_of_another_name_is_an_error_however_many_there_are() -> None:
    leaves = {f"{i:02}": jnp.ones(2) for i in range(60)}
    tx = clipjax.record_norms("leaf")
    other = {"new" if name == "59" else name: x for name, x in leaves.items()}
    with pytest.raises(ValueError, match="made with updates/59, got updates/new"):
        tx.update(other, tx.init(leaves))
