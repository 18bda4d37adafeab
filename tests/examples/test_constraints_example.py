"""The example examples/constraints.py: what it shows, and its errors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.support.oracles import exact_norm
from tests.support.scripts import ran, refused
from tests.support.units import random_weights

for module in ("flax", "sklearn", "matplotlib", "rich", "tyro"):
    pytest.importorskip(module)


import constraints  # noqa: E402

from clipjax.flax import unit_axes  # noqa: E402


def test_the_example(unoptimized: None, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    whole = constraints.load_data()
    part = constraints.Data(whole.train_x[:256], whole.train_y[:256], whole.test_x, whole.test_y)
    monkeypatch.setattr(constraints, "load_data", lambda: part)
    figure = tmp_path / "figure.png"
    assert constraints.main(["--quick", "--radius", "0.5", "--plot", str(figure)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"units beyond the radius: \d{2,3} without the bound, 0 with it", out)
    assert figure.read_bytes().startswith(b"\x89PNG")
    for layer in constraints.ORDER:
        row = next(line for line in out.splitlines() if f" {layer} " in line)
        assert 0 < float(re.findall(r"\d\.\d{9}", row)[0]) <= 0.5


def test_the_quick_mode_is_short() -> None:
    assert constraints.Settings(quick=True).epochs == 2


def test_the_norms_of_the_example_are_those_of_its_layers() -> None:
    key, image = jax.random.key(0), jax.ShapeDtypeStruct((1, 8, 8, 1), np.float32)
    params = random_weights(constraints.Network().init, key, image)["params"]
    axes = unit_axes(constraints.Network(), key, image)
    norms = constraints.norms_of(params, axes)
    by_hand = {
        "convolution": (0, 1, 2),
        "grouped": (0, 1, 2),
        "attention/out": (0, 1),
        "local": 2,
        "dense": 0,
    }
    by_hand |= {f"attention/{side}": 0 for side in ("query", "key", "value")}
    assert set(norms) == {f"{name}/kernel" for name in by_hand}
    for name, axis in by_hand.items():
        leaf = params
        for part in name.split("/"):
            leaf = leaf[part]
        np.testing.assert_allclose(
            norms[f"{name}/kernel"], exact_norm(leaf["kernel"], axis).ravel(), rtol=1e-12
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--radius", "0"], "--radius: must be a number above 0"),
        (["--epochs", "x"], "Error parsing --epochs"),
        (["--plot", "figure.gif"], "must end in .png"),
        (["--radios", "1"], "Unrecognized options"),
    ],
)
def test_errors_of_the_user(arguments: list[str], message: str, capsys: Any) -> None:
    assert message in refused("constraints.py", ran(constraints.main, arguments, capsys))
