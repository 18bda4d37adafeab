"""The clip that CONTRIBUTING.md adds does what it says, and the contract suite finds and tests it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clipjax
from tests.packaging.contributed import NAME, clip
from tests.support import ROOT
from tests.support.walk import ARGUMENTS, cases


def test_it_bounds_the_gradient_by_the_weights() -> None:
    params = {"w": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}  # of norm 5
    grads = {"w": jnp.array([0.0, 6.0]), "b": jnp.array(-8.0)}  # of norm 10
    tx = clip()(0.1)
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], [0.0, 0.3], rtol=1e-6)
    np.testing.assert_allclose(updates["b"], -0.4, rtol=1e-6)
    assert clipjax.metrics(state)[f"{NAME}/norm"] == 10
    with pytest.raises(ValueError, match=re.escape("threshold")):
        clip()(-1.0)


def test_the_walk_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipjax, "__all__", [*clipjax.__all__, NAME])
    monkeypatch.setattr(clipjax, NAME, clip(), raising=False)
    assert NAME in [case.name for case in cases()]
    assert ARGUMENTS["threshold"] == 0.25, "as the page says"


@pytest.mark.slow
def test_the_contract_suite_tests_it() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "tests.packaging.contributed", "-n", "0", "-q"]
    ran = subprocess.run(
        [*command, "tests/contract", "-k", NAME],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None
    assert int(passed[1]) > 30
