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
    ["a", "x, y"],
    ["層" * 30, "b"],
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
    # Names are data, which a checkpoint without a template keeps.
    text, floats, counts = state.metrics["n"]
    restored = {"text": text, "floats": floats, "counts": counts}
    bare = {"step": state.step, "metrics": {"n": restored}}
    for each in (found, clipjax.metrics(state), clipjax.metrics([bare])):
        assert len(each) == 3 * len(names) + 1
        np.testing.assert_array_equal(each["n/steps"], [2, 2])
        for i, name in enumerate(names):
            np.testing.assert_array_equal(each[f"n/{name}"], seeds * (i + 1))
            np.testing.assert_array_equal(each[f"n/{name}/count"], [2 * (i + 2)] * 2)
            fraction = each[f"n/{name}/is_large_fraction"]
            np.testing.assert_array_equal(fraction, seeds > i)


def test_names_are_no_structure_until_they_are_known() -> None:
    """`optax.tree.map_params` compares a state with that of a tree without leaves."""
    tx = of_metrics(["a"])
    named, other = (of_metrics([name]).init(np.float32(1)) for name in ("a", "b"))
    unknown = jax.tree.map(jnp.copy, named)
    unknown.metrics["n"].names = ()
    assert jax.tree.structure(named) == jax.tree.structure(unknown)
    assert jax.tree.structure(named) != jax.tree.structure(other)
    step = jax.jit(lambda state: clipjax.metrics(tx.update(np.float32(2), state)[1]))
    assert step(unknown)["n/a"] == 2
    with pytest.raises(ValueError, match="state: inside jit"):
        jax.jit(clipjax.metrics)(unknown)
    with pytest.raises(ValueError, match="metrics of n: the state was made with b"):
        tx.update(np.float32(1), other)


def test_a_restored_state_has_the_names_in_its_text() -> None:
    """Also where another state of its structure was read under `jit` before."""
    states = {}
    for name in ("a", "b c"):
        tx = of_metrics([name])
        states[name] = tx.update(np.float32(2), tx.init(np.float32(1)))[1]
    read = jax.jit(clipjax.metrics)
    assert read(states["a"])["n/a"] == 2
    other = states["b c"]
    restored = serialization.from_bytes(other, serialization.to_bytes(other))
    bare = serialization.msgpack_restore(serialization.to_bytes(other))
    assert jax.tree.structure(restored) == jax.tree.structure(other)
    changed = optax.tree.set(other, floats=other.metrics["n"].floats)
    inside = jax.jit(lambda state: clipjax.metrics(optax.tree.set(state, step=1)))
    for found in (
        read(other),
        read(restored),
        read(changed),
        inside(other),
        clipjax.metrics(bare),
    ):
        assert found["n/b c"] == 2


def test_a_recorder_without_leaves_has_metrics_inside_jit() -> None:
    """As of a label that no weight has."""
    parts = {"all": optax.identity(), "none": clipjax.record_norms("leaf")}
    tx = optax.partition(parts, {"w": "all"})
    weights = {"w": jnp.ones(2)}
    step = jax.jit(lambda s: clipjax.metrics(tx.update(weights, s, weights)[1]))
    assert {*step(tx.init(weights))} == {"record_norms/steps"}


def test_names_have_one_line() -> None:
    """Lines separate names in the text, so that keys of trees get spaces."""
    with pytest.raises(ValueError, match="must be one line of text"):
        of_metrics(["a\nb"]).init(np.float32(1))
    tx = clipjax.record_norms("leaf")
    assert "record_norms/updates/a b" in clipjax.metrics(tx.init({"a\nb": jnp.ones(1)}))
    with pytest.raises(ValueError, match="groups: two norms would be called"):
        tx.init({"a\nb": jnp.ones(1), "a b": jnp.ones(1)})


def test_floats_of_all_dtypes_share_an_array() -> None:
    """Where JAX refuses to promote them, too; and a name may be a number."""
    kinds = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32")

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


def test_a_table_has_the_names_of_its_text() -> None:
    one, other = (of_metrics(name).init(0.0).metrics["n"] for name in "ab")
    assert one._replace(text=other.text).known_names == other.known_names

    def with_other_floats(table: Any) -> Any:
        found = table._replace(floats=2 * table.floats)
        assert found.known_names == one.known_names
        return found

    jax.jit(with_other_floats)(one)


def test_metrics_have_no_derivative() -> None:
    for tx, name in (
        (of_metrics("a"), "n/a"),
        (clipjax.clip_by_global_norm(1.0), "clip_by_global_norm/norm"),
        (clipjax.record_norms(), "record_norms/updates"),
    ):

        def metric(x: Any, tx: Any = tx, name: str = name) -> Any:
            return clipjax.metrics(tx.update(x, tx.init(x))[1])[name]

        assert jax.grad(metric)(3.0) == 0


def test_counters_stop_at_their_largest_value() -> None:
    def act(updates: Any, params: Any, step: Any, memory: Any) -> Any:
        return updates, dict(updates), memory

    kinds = ("int8", "uint8", "int16", "uint16", "int32", "uint32")
    # Of each count what it was, what is added, and what it becomes.
    counts = {f"plus_{kind}": (2, np.dtype(kind).type(100), 102) for kind in kinds} | {
        "to_the_end": (MOST - 1, np.int32(1), MOST),
        "at_the_end": (MOST, np.int32(1), MOST),
        "beyond": (MOST - 3, np.int32(7), MOST),
        "below_0": (2, np.int32(-3), -1),
        "too_large": (2, np.uint32(3_000_000_000), MOST),
    }
    updates = {name: more for name, (_, more, _) in counts.items()}
    tx = clipjax.with_metrics("n", act)
    state = jax.jit(tx.init)(updates)
    kept = state.metrics["n"]
    before = [counts[name][0] for name in kept.names[1]]
    kept = kept._replace(counts=np.int32(before))
    state = state._replace(metrics={"n": kept})
    found = clipjax.metrics(jax.jit(tx.update)(updates, state)[1])
    for name, (*_, wanted) in counts.items():
        assert found[f"n/{name}"] == wanted, name


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
