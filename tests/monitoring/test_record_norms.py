"""`record_norms` measures what is asked for, and changes nothing."""

from __future__ import annotations

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.serialization import msgpack_restore, to_bytes

import clipjax
from tests.support.oracles import exact_tree_norm
from tests.support.programs import adam, compiled, cost_of
from tests.support.trees import same_bits


def tree(seed: int, scale: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def leaf(*shape: int) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    layers = {f"layer_{i}": {"kernel": leaf(4, 3), "bias": leaf(3)} for i in range(2)}
    return {"encoder": layers, "head": {"kernel": leaf(3, 2)}, "steps": np.arange(2, dtype=np.int32)}


def under(tree: Any, *names: str) -> Any:
    for name in names:
        tree = tree[name]
    return [x for x in jax.tree.leaves(tree) if x.dtype == np.float32]


GROUPS: dict[Any, dict[str, Any]] = {
    None: {"": lambda t: under(t)},
    1: {"/encoder": lambda t: under(t, "encoder"), "/head": lambda t: under(t, "head")},
    2: {
        "/encoder/layer_0": lambda t: under(t, "encoder", "layer_0"),
        "/encoder/layer_1": lambda t: under(t, "encoder", "layer_1"),
        "/head/kernel": lambda t: under(t, "head"),
    },
    "leaf": {
        f"/encoder/layer_{i}/{name}": lambda t, i=i, name=name: under(t, "encoder", f"layer_{i}", name)
        for i in range(2)
        for name in ("bias", "kernel")
    }
    | {"/head/kernel": lambda t: under(t, "head", "kernel")},
    ("*bias", "encoder/*"): {
        "/*bias": lambda t: under(t, "encoder", "layer_0", "bias") + under(t, "encoder", "layer_1", "bias"),
        "/encoder/*": lambda t: [t["encoder"][f"layer_{i}"]["kernel"] for i in range(2)],
    },
}


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_the_norms_are_those_of_the_groups(groups: Any) -> None:
    tx = clipjax.record_norms(groups, of=("updates", "params", "ratio"))
    update = jax.jit(tx.update)
    state = tx.init(tree(0))
    for seed, scale in enumerate((1.0, 1e-30, 1e30)):
        grads, params = tree(seed, scale), tree(seed + 9)
        updates, state = update(grads, state, params)
        assert same_bits(updates, grads)
        seen = clipjax.metrics(state)
        for name, part in GROUPS[groups].items():
            norms = {
                "updates": float(exact_tree_norm(part(grads))),
                "params": float(exact_tree_norm(part(params))),
            }
            norms["ratio"] = norms["updates"] / norms["params"]
            for of, norm in norms.items():
                assert float(seen[f"record_norms/{of}{name}"]) == pytest.approx(norm, rel=1e-6), of
        assert len(seen) == 2 + 3 * len(GROUPS[groups])


def test_every_so_many_steps() -> None:
    tx = clipjax.record_norms(every=3)
    update, state, found = jax.jit(tx.update), tx.init(jnp.zeros(1)), []
    for step in range(7):
        state = update(jnp.array([1.0 + step]), state)[1]
        found.append(float(clipjax.metrics(state)["record_norms/updates"]))
    assert found == [1, 1, 1, 4, 4, 4, 7]
    assert int(clipjax.metrics(state)["record_norms/steps"]) == 7


def test_steps_between_do_not_measure() -> None:
    """The whole measurement is in one branch of a conditional."""
    tx = optax.chain(clipjax.record_norms("leaf", every=10), optax.sgd(1.0))
    grads = {"kernel": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    state = jax.eval_shape(tx.init, grads)
    text = jax.jit(tx.update).lower(grads, state).as_text()
    outside = text.split("stablehlo.case")[0] + text.split("stablehlo.case")[-1].split("}) :")[-1]
    assert "stablehlo.case" in text
    assert "stablehlo.reduce" not in outside


@pytest.mark.parametrize(
    ("clip", "groups"),
    [
        (clipjax.clip_by_global_norm(1.0), None),
        (clipjax.clip_by_norm(1.0), "leaf"),
        (clipjax.clip_by_norm(1.0), 1),
        (clipjax.clip_by_group_norm({"kernel_0": 1.0, "*": 1.0}), ["kernel_0", "*"]),
    ],
    ids=["global", "leaf", "depth", "groups"],
)
def test_what_a_clip_measures_is_not_measured_again(clip: Any, groups: Any) -> None:
    """Read off the compiled step: its passes over memory are those of the clip alone."""
    alone = cost_of(compiled(optax.chain(clip, adam())))
    recorded = cost_of(compiled(optax.chain(clipjax.record_norms(groups), clip, adam())))
    assert recorded.passes <= alone.passes + 0.01
    measured = cost_of(compiled(optax.chain(clipjax.record_norms(groups), adam())))
    assert measured.passes > cost_of(compiled(adam())).passes + 0.5  # the count sees a measurement


def test_zeros_and_what_is_not_finite() -> None:
    tx = clipjax.record_norms(1, of=("updates", "ratio"))
    grads = {
        "a": np.zeros(2, np.float32),
        "b": np.ones(2, np.float32),
        "c": np.array([np.nan, 1], np.float32),
    }
    params = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32), "c": np.ones(2, np.float32)}
    seen = jax.device_get(clipjax.metrics(jax.jit(tx.update)(grads, tx.init(params), params)[1]))
    assert [float(seen[f"record_norms/ratio/{name}"]) for name in "ab"] == [0, math.inf]
    assert np.isnan(seen["record_norms/updates/c"])
    assert seen["record_norms/nonfinite_count"] == 1


def test_metrics_for_json_and_from_a_checkpoint() -> None:
    tx = optax.chain(clipjax.record_norms("leaf"), optax.adam(1e-3), clipjax.record_norms(of="params"))
    params = tree(0)
    params.pop("steps")
    state = tx.update(params, tx.init(params), params)[1]
    seen = {name: float(x) for name, x in jax.device_get(clipjax.metrics(state)).items()}
    assert json.loads(json.dumps(seen)) == seen
    assert "record_norms_1/params" in seen
    assert same_bits(clipjax.metrics(msgpack_restore(to_bytes(state))), clipjax.metrics(state))


def test_it_may_stand_after_a_projection() -> None:
    tx = clipjax.chain(optax.sgd(0.1), clipjax.max_norm(1.0), clipjax.record_norms(of="ratio"))
    params = {"kernel": jnp.ones((4, 3))}
    updates, state = tx.update(params, tx.init(params), params)
    ratio = np.linalg.norm(updates["kernel"]) / np.linalg.norm(params["kernel"])
    assert float(clipjax.metrics(state)["record_norms/ratio"]) == pytest.approx(ratio, rel=1e-6)
    with pytest.raises(ValueError, match=r"links\[0\].*projects the weights, but links\[2\] moves"):
        clipjax.chain(clipjax.max_norm(1.0), clipjax.record_norms(), optax.sgd(0.1))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"groups": "leaves"},
            TypeError,
            "an int or a list of path patterns, got 'leaves'",
        ),
        ({"groups": True}, TypeError, "groups must be None"),
        ({"groups": []}, TypeError, "groups must be None"),
        ({"groups": 0}, ValueError, "groups must be at least 1, got 0"),
        ({"of": "grads"}, ValueError, r"of must be one or several of .*got 'grads'"),
        ({"of": ()}, ValueError, "of must be one or several"),
        ({"every": 0}, ValueError, "every must be at least 1, got 0"),
        ({"every": 0.5}, TypeError, "every must be an int, got 0.5"),
    ],
)
def test_bad_arguments(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        clipjax.record_norms(**options)


def test_what_update_needs() -> None:
    tx = clipjax.record_norms(of="ratio")
    with pytest.raises(ValueError, match=r"params: record_norms measures 'ratio': pass them"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
    with pytest.raises(ValueError, match=r"groups: the pattern 'head' matches no leaf(.|\n)*a"):
        clipjax.record_norms(["head"]).init({"a": jnp.ones(2)})


def test_components_of_a_path_may_have_slashes() -> None:
    """As those of Haiku; and a float update may be of a parameter that has no norm."""
    params = {"mlp/~/linear_0": {"w": jnp.ones(2)}, "mlp/~/linear_1": {"w": jnp.ones(2), "n": jnp.arange(2)}}
    grads = {name: {key: jnp.ones(2) for key in layer} for name, layer in params.items()}
    tx = clipjax.record_norms(1, of=("updates", "ratio"))
    seen = clipjax.metrics(tx.update(grads, tx.init(params), params)[1])
    assert set(seen) >= {f"record_norms/updates/mlp/~/linear_{i}" for i in range(2)}
    leaf = clipjax.record_norms("leaf", of="ratio")
    assert clipjax.metrics(leaf.update(grads, leaf.init(params), params)[1])
