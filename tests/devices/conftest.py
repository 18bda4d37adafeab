"""Runs the tests of this folder on eight CPU devices, in two processes for all of them.

JAX must be told of the devices before it starts, and the other tests need one device. So the first test here
that is asked for starts a second pytest, which runs half of the tests of this folder that were selected, and
writes down what came of each; the other half is for the next worker that comes. Tests of one way to use
several devices share programs, and so are in one half. Here no test's function is called: it passes, fails or
is skipped as it did there.

To run the tests directly, as under a debugger:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m pytest -n0 tests/devices
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.support import ROOT
from tests.support.eight_devices import DEVICES

# LLVM is not asked to make the code fast, which is a fifth of what these tests cost: what they prove does not
# depend on that. XLA's own passes, which place and merge the collectives, are as ever.
FLAGS = f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0"

# Where the second pytest writes: a line of JSON for each report, and what it printed in the end.
REPORTS = "CLIPJAX_REPORTS_OF_EIGHT_DEVICES"


@pytest.fixture(scope="session", autouse=True)
def reports(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> dict[str, list[dict[str, str]]] | None:
    """The reports of the eight devices by node id; None where there are eight devices already."""
    if jax.device_count() == DEVICES:
        return None
    folder = tmp_path_factory.getbasetemp()
    if worker_id != "master":
        folder = folder.parent  # all workers of pytest-xdist share it
    halves = halves_of([item for item in request.session.items if item.path.parent == Path(__file__).parent])
    paths = [folder / f"reports_of_eight_devices_{i}" for i in range(len(halves))]
    for wait in (False, True):  # first what no other worker runs, then what is left
        for nodeids, path in zip(halves, paths, strict=True):
            with contextlib.suppress(BlockingIOError), path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))  # until the file is closed
                if nodeids and not path.exists():
                    run(nodeids, path)
    found: dict[str, list[dict[str, str]]] = {}
    for line in (line for path in paths if path.exists() for line in path.read_text().splitlines()):
        report = json.loads(line)
        found.setdefault(report["nodeid"], []).append(report)
    return found


def halves_of(items: list[Any]) -> tuple[list[str], list[str]]:
    """The node ids of the tests, in two halves of about as many programs."""
    programs: dict[Any, list[str]] = {}
    for item in items:
        way = getattr(item, "callspec", None) and item.callspec.params.get("way")
        programs.setdefault(way or item.path.name, []).append(item.nodeid)
    each = list(programs.values())
    return tuple([nodeid for program in each[i::2] for nodeid in program] for i in range(2))


def run(nodeids: list[str], path: Path) -> None:
    """Run tests in a process with eight devices."""
    path.touch()
    flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
    environment = {
        "XLA_FLAGS": flags.strip(),
        "JAX_PLATFORMS": "cpu",
        "PYTEST_ADDOPTS": "",
        "CLIPJAX_RECORD": "",  # the first pytest records what ran
        REPORTS: str(path),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", *nodeids],
        env={**os.environ, **environment},
        cwd=ROOT,
        timeout=1200,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    write(path, nodeid="", when="end", outcome="", text=done.stdout)


def write(path: str | Path, **report: str) -> None:
    with Path(path).open("a") as file:
        file.write(json.dumps(report) + "\n")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if path := os.environ.get(REPORTS):
        text = "\n".join([report.longreprtext, *(f"{title}:\n{text}" for title, text in report.sections)])
        write(path, nodeid=report.nodeid, when=report.when, outcome=report.outcome, text=text)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    reports = pyfuncitem.funcargs["reports"]
    if reports is None:
        return None  # pytest calls the function
    own = reports.get(pyfuncitem.nodeid, [])
    if failed := [report["text"] for report in own if report["outcome"] == "failed"]:
        pytest.fail("\n".join(failed), pytrace=False)
    if skipped := [report["text"] for report in own if report["outcome"] == "skipped"]:
        pytest.skip("\n".join(skipped))
    if not any(report["when"] == "call" and report["outcome"] == "passed" for report in own):
        printed = "\n".join(report["text"] for report in reports.get("", []))
        pytest.fail(f"the process with eight devices did not run it, and printed:\n{printed}", pytrace=False)
    return True
