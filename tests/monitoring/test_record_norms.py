"""`record_norms`: which norms it measures, and that nothing changes."""

from typing import Any

import jax
import numpy as np
import pytest

import clipjax
from tests.support.trees import NESTED


def test_record_norms_measures_and_changes_nothing() -> None:
    def found(*args: Any, **kwargs: Any) -> dict[str, float]:
        tx = clipjax.record_norms(*args, **kwargs)
        double = jax.tree.map(lambda x: 2 * x, NESTED)
        updates, state = jax.jit(tx.update)(double, tx.init(NESTED), NESTED)
        jax.tree.map(np.testing.assert_array_equal, updates, double)
        read = clipjax.metrics(state)
        assert read.pop("record_norms/steps") == 1
        return {key.removeprefix("record_norms/"): float(x) for key, x in read.items()}

    total, encoder, head = (2 * float(np.sqrt(x)) for x in (138, 125, 13))
    layers = {"encoder/layer_0": 10, "encoder/layer_1": 20, "head/w": 6, "head/b": 4}
    leaves = {
        "encoder/layer_0/w": 10,
        "encoder/layer_1/w": 20,
        "head/w": 6,
        "head/b": 4,
    }
    for args, expected in (
        ((), {"": total}),
        (("leaf",), leaves),
        ((1,), {"encoder": encoder, "head": head}),
        ((2,), layers),
        ((["layer_0/*", "encoder/*"],), {"layer_0/*": 10, "encoder/*": 20}),
        (("head/*",), {"head/*": head}),
    ):
        wanted = {f"updates/{key}".rstrip("/"): x for key, x in expected.items()}
        for keep in (0, 2):  # of a recorder that keeps steps, metrics takes the roots
            assert found(*args, keep=keep) == pytest.approx(wanted)
    assert found(name="gradients") == pytest.approx({"gradients": total})
    assert found(of="params") == pytest.approx({"params": total / 2})
    both = found(1, of=("updates", "params"), name="g")
    assert both == pytest.approx(
        {
            "g/encoder": encoder,
            "g/head": head,
            "params/encoder": encoder / 2,
            "params/head": head / 2,
        }
    )
