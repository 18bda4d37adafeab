"""Several processes that train together return what one does, metrics and all."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.devices import process
from tests.devices.members import assert_same

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone() -> Any:
    return jax.device_get(process.train(lambda tree: tree))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize("count", [2, 4])
def test_processes_do_what_one_does(count: int, alone: Any, tmp_path: Path) -> None:
    """With states that are made without `jit`, NaN in one process, and a loss that is
    not finite. Every process reads the same metrics and bad steps.
    """
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count="
    environment = {**os.environ, "XLA_FLAGS": f"{flags}{8 // count}"}
    command = [sys.executable, "-m", "tests.devices.process"]
    port = free_port()
    started = [
        subprocess.Popen(
            [*command, *map(str, (number, count, port, tmp_path))],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    for each in started:
        _, printed = each.communicate(timeout=300)
        assert each.returncode == 0, printed

    updates, metrics, bad = alone
    said = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(count)]
    assert [str(x) for x in said] == [str(said[0])] * count  # in which NaN is NaN
    for number in range(count):
        with np.load(tmp_path / f"{number}.npz") as leaves:
            found = jax.tree.unflatten(jax.tree.structure(updates), leaves.values())
        assert_same(found, updates)
    assert_same(said[0]["metrics"], metrics)
    assert [x["step"] for x in said[0]["bad"]] == [x.step for x in bad] == [1, 2]
    for theirs, ours in zip(said[0]["bad"], bad, strict=True):
        assert theirs.pop("recorder") == ours.recorder
        assert_same(theirs, {key: getattr(ours, key) for key in theirs})
