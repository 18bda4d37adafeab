"""`record_norms`: which norms it measures, and that nothing changes."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import clipjax
from tests.support.trees import NESTED


def test_record_norms_measures_and_changes_nothing() -> None:
    total, encoder, head = (2 * float(np.sqrt(x)) for x in (138, 125, 13))
    layers = {"encoder/layer_0": 10, "encoder/layer_1": 20, "head/w": 6, "head/b": 4}
    leaves = {
        "encoder/layer_0/w": 10,
        "encoder/layer_1/w": 20,
        "head/w": 6,
        "head/b": 4,
    }
    record = clipjax.record_norms
    cases = [
        # Of a recorder that keeps steps, metrics takes the roots.
        (
            record(*args, keep=keep),
            {f"updates/{key}".rstrip("/"): x for key, x in expected.items()},
        )
        for args, expected in (
            ((), {"": total}),
            (("leaf",), leaves),
            ((1,), {"encoder": encoder, "head": head}),
            ((np.int64(2),), layers),
            ((["layer_0/*", "encoder/*"],), {"layer_0/*": 10, "encoder/*": 20}),
            (("head/*",), {"head/*": head}),
        )
        for keep in (0, 2)
    ]
    cases += [
        (record(name="gradients"), {"gradients": total}),
        (record(of="params"), {"params": total / 2}),
        (
            record(1, of=("updates", "params"), name="g"),
            {
                "g/encoder": encoder,
                "g/head": head,
                "params/encoder": encoder / 2,
                "params/head": head / 2,
            },
        ),
    ]
    double = jax.tree.map(lambda x: 2 * x, NESTED)

    @jax.jit
    def every(updates: Any) -> Any:
        return [tx.update(updates, tx.init(NESTED), NESTED) for tx, _ in cases]

    for (_, expected), (updates, state) in zip(cases, every(double), strict=True):
        jax.tree.map(np.testing.assert_array_equal, updates, double)
        read = clipjax.metrics(state)
        assert read.pop("record_norms/steps") == 1
        found = {k.removeprefix("record_norms/"): float(x) for k, x in read.items()}
        assert found == pytest.approx(expected)


def test_without_a_leaf_that_has_a_norm_the_state_can_be_saved(tmp_path: Path) -> None:
    """As of an unused label of `optax.partition`; Orbax saves no empty array."""
    tx = clipjax.record_norms("leaf", keep=2)
    tree = {"a": jnp.ones(2, np.int32)}
    update = jax.jit(tx.update)
    _, state = update(tree, tx.init(tree))
    assert all(x.size for x in jax.tree.leaves(state.metrics))
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as saver:
        restored = saver.restore(tmp_path / "state", state)
    _, state = update(tree, restored, loss=jnp.inf)
    assert clipjax.metrics(state) == {"record_norms/steps": 2}
    (bad,) = clipjax.bad_steps(state)
    assert (bad.step, bad.groups) == (1, {})


def test_orders_and_ratios_of_groups_and_layers() -> None:
    rng = np.random.default_rng(0)
    shapes = {"blocks": (3, 4, 2), "head": (5,), "zero": (2,), "still": (2,)}
    updates = {
        name: rng.normal(size=x).astype(np.float32) for name, x in shapes.items()
    }
    params = {name: rng.normal(size=x).astype(np.float32) for name, x in shapes.items()}
    params["zero"] *= 0
    updates["zero"] *= 0
    updates["still"] *= 0

    def norms(tree: Any, order: float) -> dict[str, float]:
        layers = {f"blocks/{i}": x for i, x in enumerate(tree["blocks"])}
        each = layers | {name: tree[name] for name in ("head", "zero", "still")}
        return {
            name: float(np.linalg.norm(x.ravel().astype(float), order))
            for name, x in each.items()
        }

    for order in (1, 2, 3, np.inf):
        tx = clipjax.record_norms(
            "leaf", of=("ratio", "params", "updates"), stacked="blocks", ord=order
        )
        _, state = jax.jit(tx.update)(updates, tx.init(params), params)
        found = clipjax.metrics(state)
        of_updates, of_params = norms(updates, order), norms(params, order)
        for name, norm in of_updates.items():
            of = f"{name} of order {order}"
            read = [found[f"record_norms/{x}/{name}"] for x in ("updates", "params")]
            np.testing.assert_allclose(read, [norm, of_params[name]], 1e-5, err_msg=of)
            ratio = norm / of_params[name] if norm else 0.0
            read = found[f"record_norms/ratio/{name}"]
            np.testing.assert_allclose(read, ratio, 1e-5, err_msg=of)
