"""Each script of this folder, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CLIENTS = sorted(Path(__file__).parent.glob("[!t]*_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("script", CLIENTS, ids=lambda path: path.stem)
def test_a_client_trains_as_with_optax(script: Path) -> None:
    environment = dict(os.environ)
    environment.pop("XLA_FLAGS", None)  # the tests' eight devices
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
