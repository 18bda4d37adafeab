"""Metrics before the first step, and trees with holes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import clipjax
from tests.support.programs import stepped
from tests.support.trees import NESTED

CLIP, PROJECTION = clipjax.clip_by_global_norm(1.0), clipjax.max_norm(3.0)


def test_metrics_before_the_first_step_are_numbers() -> None:
    clips = [clipjax.clip_by_global_norm(1.0), clipjax.zclip()]
    tx = clipjax.bounded(optax.adam(0.1), clip=clips, nonfinite="skip")
    found = clipjax.metrics(jax.jit(tx.init)(np.ones(2, np.float32)))
    assert all(np.isfinite(x) for x in found.values())


def test_metrics_are_read_without_transfers() -> None:
    _, state = stepped(clipjax.clip_by_global_norm(1.0), np.ones(2, np.float32))
    with jax.transfer_guard("disallow"):
        found = clipjax.metrics(state)
    assert found["clip_by_global_norm/clipped_fraction"] == 1


def test_parameters_without_updates_are_left_out() -> None:
    w = np.float32([[3.0], [4.0]])
    params, updates = {"frozen": np.ones(3), "w": w}, {"frozen": None, "w": w}
    for tx in (
        clipjax.adaptive_grad_clip(0.1),
        clipjax.max_norm(1.0),
        clipjax.tangent_cone(1.0),
    ):
        result, _ = jax.eval_shape(tx.update, updates, tx.init(params), params)
        assert result["frozen"] is None
        assert result["w"].shape == (2, 1)


def test_a_step_inside_the_bound_does_not_count_as_clipped() -> None:
    grads = np.float32([[3.0], [4.0]])
    for make in (
        clipjax.clip_by_global_norm,
        clipjax.clip_by_norm,
        clipjax.clip_by_rms,
        clipjax.clip_by_value,
    ):
        _, state = stepped(make(np.float32(5.0)), grads, 2 * grads)
        found = clipjax.metrics(state)
        (share,) = (x for k, x in found.items() if k.endswith("/clipped_fraction"))
        assert share == 0.5


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
    _, state = stepped(tx, NESTED, NESTED, params=NESTED)
    found = clipjax.metrics({"step": 3, "optimizer": [state, None]})
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
            for x in jax.tree.leaves(NESTED)
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


def test_a_clip_of_a_user_gets_all_that_update_gets_by_name() -> None:
    def act(updates: Any, params: Any, step: Any, memory: Any, **extra: Any) -> Any:
        assert extra.keys() <= {"loss", "value"}
        return updates, {"loss": jnp.float32(extra.get("loss", 0))}, memory

    tx = clipjax.with_metrics("mine", act)
    given = {"loss": 3.0, "value": 2.0}
    _, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)), None, **given)
    assert clipjax.metrics(state)["mine/loss"] == 3


def test_a_clip_of_a_user_derives_the_norm_after_it() -> None:
    def act(updates: Any, params: Any, step: Any, memory: Any) -> Any:
        scale = jnp.float32(0.5)
        metrics = {"norm": jnp.linalg.norm(updates), "scale": scale, "clipped": True}
        return scale * updates, metrics, memory

    tx = optax.chain(clipjax.with_metrics("mine", act), clipjax.clip_by_norm(9.0))
    _, state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.ones(2)))
    found = clipjax.metrics(state)
    assert found["mine/norm_after"] == found["clip_by_norm/norm_after"] == 2.5
    assert found["mine/clipped_fraction"].dtype == np.float32

    def count(updates: Any, params: Any, step: Any, memory: Any) -> Any:
        return updates, {"norm": 3, "scale": jnp.float32(1.0)}, memory

    tx = clipjax.with_metrics("mine", count)  # an int is a sum over steps
    _, state = tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    names = {key.removeprefix("mine/") for key in clipjax.metrics(state)}
    assert names == {"norm", "scale", "steps"}


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
