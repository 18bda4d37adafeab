"""Processes that train together, with the devices of one mesh shared out among them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support import ROOT

DEVICES = 4

# What the tests prove does not depend on how fast LLVM makes the code, and it compiles in less time.
FLAGS = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count="

# In seconds: after which a silent process counts as dead, and how long one that ends waits for the others.
# What is left when one is killed ends after the shorter of the two, which JAX has at 100 and 300.
TIMEOUT = 10
# In seconds: what hangs for so long is an error of the test.
PATIENCE = 240


class Seen(NamedTuple):
    """What a process saw of a run: the state after it by path, and the metrics of each step."""

    state: dict[str, np.ndarray]
    metrics: list[dict[str, float]]


class Ended(NamedTuple):
    """A process that has ended."""

    code: int
    printed: str
    after: float  # seconds after another one was killed


class Session:
    """Processes that train together, from when they start until the last one has ended.

    Args:
      number: how many processes.
      folder: for what they print and their results.
      runs: the runs, one after another; see :func:`tests.processes.training.train`.
      kill: the process to be killed in a further run, that would have no end.
    """

    def __init__(
        self, number: int, folder: Path, runs: Iterable[dict[str, Any]], kill: int | None = None
    ) -> None:
        self.number, self.folder = number, folder
        folder.mkdir(exist_ok=True)
        # The port is not given to anybody else while this socket has it, which never listens; but the first
        # process, that asks for the same option, may.
        with socket.socket() as port:
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            port.bind(("127.0.0.1", 0))
            address = "{}:{}".format(*port.getsockname())
            endless = [] if kill is None else [{"name": "endless", "mesh": [2, 2], "steps": [0, 10**9]}]
            timeout = 100 if kill is None else TIMEOUT
            plan = {"address": address, "processes": number, "timeout": timeout, "runs": [*runs, *endless]}
            self.processes = [self._start(plan | {"process": i}) for i in range(number)]
            try:
                self.ended = self._end(kill)
            finally:
                for process in self.processes:
                    process.kill()
                    process.communicate()

    def _start(self, plan: dict[str, Any]) -> subprocess.Popen[bytes]:
        plan = plan | {"results": str(self.folder)}
        flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}{DEVICES // self.number}"
        with self._output(plan["process"]).open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.processes.training", json.dumps(plan)],
                env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()},
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def _output(self, process: int) -> Path:
        return self.folder / f"output-{process}"

    def printed(self, process: int) -> str:
        return self._output(process).read_text(errors="replace")

    def _end(self, kill: int | None) -> list[Ended]:
        """Wait for all processes to end, and kill one when it is in the middle of its run."""
        start, killed, after = time.monotonic(), None, {}
        while len(after) < self.number:
            now = time.monotonic()
            if now - start > PATIENCE:
                self._fail(f"after {PATIENCE} s not all processes have ended")
            for i, process in enumerate(self.processes):
                if i in after or process.poll() is None:
                    continue
                after[i] = now - (killed or now)
                if process.returncode and killed is None:
                    self._fail(f"process {i} ended with status {process.returncode}")
            if kill is not None and killed is None and "endless: step 5" in self.printed(kill):
                self.processes[kill].kill()
                killed = time.monotonic()
            time.sleep(0.05)
        return [Ended(p.returncode, self.printed(i), after[i]) for i, p in enumerate(self.processes)]

    def _fail(self, what: str) -> None:
        outputs = [f"process {i} printed:\n{self.printed(i)[-4000:]}" for i in range(self.number)]
        pytest.fail("\n\n".join([what, *outputs]), pytrace=False)

    def seen(self, run: str) -> list[Seen]:
        """What each process saw of a run."""
        found = []
        for i in range(self.number):
            path = self.folder / f"{run}-{i}"
            with np.load(path.with_suffix(".npz")) as state:
                found.append(Seen(dict(state), json.loads(path.with_suffix(".json").read_text())))
        return found
