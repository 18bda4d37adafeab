"""Counters that are full, metrics before the first step, and trees with holes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipjax
from clipjax._core.transformation import saturating_add

MOST = np.iinfo(np.int32).max


def test_counters_stop_at_their_largest_value() -> None:
    assert saturating_add(jnp.int32(MOST - 1), jnp.array(True)) == MOST
    assert saturating_add(jnp.int32(MOST), jnp.array(True)) == MOST
    assert saturating_add(jnp.int32(MOST - 3), jnp.int32(7)) == MOST
    assert saturating_add(jnp.int32(2), jnp.int32(-3)) == -1
    assert saturating_add(jnp.int32(2), jnp.uint32(3_000_000_000)) == MOST
    for kind in (jnp.int8, jnp.uint8, jnp.int16, jnp.uint16, jnp.int32, jnp.uint32):
        assert saturating_add(jnp.int32(2), kind(100)) == 102
    tx = clipjax.clip_by_global_norm(1.0)
    state = jax.tree.map(
        lambda x: jnp.full_like(x, MOST) if x.dtype == np.int32 else x,
        tx.init(jnp.ones(2)),
    )
    _, state = tx.update(jnp.full(2, jnp.nan), state)
    found = clipjax.metrics(state)
    assert (
        found["clip_by_global_norm/nonfinite_count"]
        == found["clip_by_global_norm/steps"]
        == MOST
    )


def test_metrics_before_the_first_step_are_numbers() -> None:
    tx = clipjax.bounded(
        optax.adam(0.1),
        clip=[clipjax.clip_by_global_norm(1.0), clipjax.zclip()],
        nonfinite="skip",
    )
    assert all(np.isfinite(x) for x in clipjax.metrics(tx.init(jnp.ones(2))).values())


def test_metrics_are_read_without_transfers() -> None:
    tx = clipjax.clip_by_global_norm(1.0)
    _, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    with jax.transfer_guard("disallow"):
        found = clipjax.metrics(state)
    assert found["clip_by_global_norm/clipped_fraction"] == 1


def test_parameters_without_updates_are_left_out() -> None:
    params = {"frozen": jnp.ones(3), "w": jnp.array([[3.0], [4.0]])}
    updates = {"frozen": None, "w": jnp.array([[3.0], [4.0]])}
    for tx in (
        clipjax.adaptive_grad_clip(0.1),
        clipjax.max_norm(1.0),
        clipjax.tangent_cone(1.0),
    ):
        result, _ = tx.update(updates, tx.init(params), params)
        assert result["frozen"] is None
        assert result["w"].shape == (2, 1)


def test_a_step_inside_the_bound_does_not_count_as_clipped() -> None:
    grads = jnp.array([[3.0], [4.0]])
    for make in (
        clipjax.clip_by_global_norm,
        clipjax.clip_by_norm,
        clipjax.clip_by_rms,
        clipjax.clip_by_value,
    ):
        tx = make(jnp.float32(5.0))
        _, state = tx.update(grads, tx.init(grads))
        _, state = tx.update(2 * grads, state)
        found = clipjax.metrics(state)
        assert (
            next(x for key, x in found.items() if key.endswith("/clipped_fraction"))
            == 0.5
        )


def test_a_transformation_that_occurs_again_gets_a_number() -> None:
    tx = optax.chain(*(clipjax.clip_by_global_norm(bound) for bound in (4.0, 2.0, 1.0)))
    _, state = tx.update(jnp.array([8.0]), tx.init(jnp.ones(1)))
    found = clipjax.metrics(state)
    norms = [found[f"clip_by_global_norm{again}/norm"] for again in ("", "_1", "_2")]
    np.testing.assert_allclose(norms, [8.0, 4.0, 2.0], rtol=2e-6)


def test_a_number_does_not_hide_another_transformation_of_that_name() -> None:
    links = [
        clipjax.with_metrics(
            name, lambda u, p, s, m, x=x: (u, {"x": jnp.float32(x)}, m)
        )
        for x, name in enumerate(("a", "a_1", "a"))
    ]
    found = clipjax.metrics(
        optax.chain(*(optax.stateless(lambda u, _: u), *links)).init(jnp.ones(1))
    )
    assert {key for key in found if key.endswith("/x")} == {"a/x", "a_1/x", "a_2/x"}


TREE = {
    "encoder": {
        "layer_0": {"w": np.array([[3.0, 4.0]], np.float32)},
        "layer_1": {"w": np.array([[6.0, 8.0]], np.float32)},
    },
    "head": {"w": np.full((2, 2), 1.5, np.float32), "b": np.array([2.0], np.float16)},
    "count": np.array([7]),
}


CLIP, PROJECTION = clipjax.clip_by_global_norm(1.0), clipjax.max_norm(3.0)


def after(tx: Any, updates: Any = None, params: Any = None, steps: int = 1) -> Any:
    """The state after some steps."""
    state, updates = (
        tx.init(TREE if params is None else params),
        TREE if updates is None else updates,
    )
    for _ in range(steps):
        _, state = jax.jit(tx.update)(
            updates, state, TREE if params is None else params
        )
    return state


def test_metrics_are_found_in_any_nest_and_repeated_names_get_numbers() -> None:
    inner = optax.chain(
        CLIP, clipjax.clip_by_norm(1.0), optax.chain(CLIP, optax.adam(0.1))
    )
    tx = optax.chain(
        clipjax.clip_by_global_norm(2.0),
        optax.masked(clipjax.skip_nonfinite(inner), clipjax.matching("w")),
        optax.MultiSteps(
            optax.chain(clipjax.record_norms(), PROJECTION), 1
        ).gradient_transformation(),
    )
    found = clipjax.metrics({"step": 3, "optimizer": [after(tx, steps=2), None]})
    names = [
        "clip_by_global_norm",
        "clip_by_global_norm_1",
        "clip_by_global_norm_2",
        "clip_by_norm",
    ]
    names += ["record_norms", "skip_nonfinite"]
    assert sorted({key.partition("/")[0] for key in found}) == names
    assert all(isinstance(x, jax.Array) and x.shape == () for x in found.values())
    norm = np.sqrt(
        sum(
            (x.astype(np.float64) ** 2).sum()
            for x in jax.tree.leaves(TREE)
            if x.dtype.kind == "f"
        )
    )
    expected = {
        "norm": norm,
        "norm_after": 2.0,
        "scale": 2 / norm,
        "clipped_fraction": 1,
        "nonfinite_count": 0,
    }
    for key, value in expected.items():
        np.testing.assert_allclose(
            found[f"clip_by_global_norm/{key}"], value, rtol=3e-6
        )
    assert {key for key in found if key.startswith("clip_by_norm/")} == {
        f"clip_by_norm/{key}" for key in (*expected, "steps")
    }
    np.testing.assert_allclose(found["clip_by_global_norm_2/norm"], 1.0, rtol=3e-6)
    assert found["clip_by_norm/steps"] == 2


def test_a_clip_of_a_user_has_metrics_and_a_memory() -> None:
    def act(updates: Any, params: Any, step: Any, memory: Any) -> Any:
        largest = jnp.max(jnp.abs(updates))
        most = jnp.maximum(memory["most"], largest)
        metrics = {
            "norm": largest,
            "entries": jnp.sum(jnp.abs(updates) > 2),
            "clipped": largest > 2,
            "step": step,
        }
        return (
            jnp.clip(updates, -2, 2),
            metrics | {"half": largest.astype(jnp.bfloat16)},
            {"most": most},
        )

    tx = clipjax.with_metrics(
        "mine", act, lambda params: {"most": jnp.zeros((), params.dtype)}
    )
    update, state = jax.jit(tx.update), tx.init(np.zeros(3, np.float32))
    for value in (1.0, 3.0, 5.0, np.inf):
        updates, new = update(np.array([value, 4.0, 0.0], np.float32), state)
        assert jax.tree.map(jnp.result_type, new) == jax.tree.map(
            jnp.result_type, state
        )
        state = new
    np.testing.assert_array_equal(updates, [2, 2, 0])
    found = {key: float(x) for key, x in clipjax.metrics(state).items()}
    assert found == {
        "mine/norm": np.inf,
        "mine/half": np.inf,
        "mine/entries": 7,  # of all steps
        "mine/step": 6,
        "mine/clipped_fraction": 1,
        "mine/nonfinite_count": 1,
        "mine/steps": 4,
    }
    assert state.memory["most"] == np.inf
