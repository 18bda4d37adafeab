"""One run in its own process: `python -m tests.outside.worker RUN FOLDER EXTRA RESULTS [--unswapped]`."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.outside.runs import RUNS
from tests.outside.swap import uses

WORSE = ("passed", "skipped", "failed")  # from left to right


class Recorder:
    """A plugin that notes what became of each test, and whether it used what was swapped in."""

    def __init__(self) -> None:
        self.results: dict[str, dict[str, Any]] = {}
        self._names: dict[str, str] = {}
        self._uses = 0
        self._x64 = jax.config.jax_enable_x64

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Name the test by its parameters, which absl only numbers; undo what one that failed left behind."""
        jax.config.update("jax_enable_x64", self._x64)
        function = getattr(item, "obj", None)
        parameters = getattr(function, "__x_params_repr__", "")
        self._names[item.nodeid] = f"{item.nodeid} {parameters}".rstrip()
        self._uses = uses()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the worst of set-up, call, subtests and tear-down."""
        if report.failed:
            self._note(report, "failed")
        elif report.skipped:
            self._note(report, "skipped")
        elif report.when == "call":
            self._note(report, "passed")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Count a file that cannot be imported as a test that fails."""
        if report.failed:
            self._note(report, "failed")

    def _note(self, report: Any, outcome: str) -> None:
        name = self._names.get(report.nodeid, report.nodeid)
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else report.longreprtext
        known = self.results.get(name)
        if known is None or WORSE.index(known["outcome"]) < WORSE.index(outcome):
            known = {"outcome": outcome, "message": message}
        self.results[name] = {**known, "ours": uses() > self._uses}


def run(folder: Path, files: Sequence[str], swap: Callable[[], None] | None) -> dict[str, dict[str, Any]]:
    """Swap, run the tests, and return for each its outcome, its message and whether it used ours."""
    if swap is not None:
        swap()
    recorder = Recorder()
    with tempfile.TemporaryDirectory(prefix="clipjax-outside-") as place:
        settings = Path(place) / "pytest.ini"  # neither ours nor the peer's
        settings.write_text("[pytest]\n")
        options = f"-c {settings} --rootdir {folder} -p no:cacheprovider -q --tb=short"
        arguments = [*options.split(), "--continue-on-collection-errors", *(str(folder / x) for x in files)]
        status = pytest.main(arguments, plugins=[recorder])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):  # as where a file is missing
        raise RuntimeError(f"pytest ended with status {status!r}")
    return recorder.results


def main() -> None:
    """Write the results as JSON."""
    name, folder, extra, results = sys.argv[1:5]
    if extra:
        sys.path.append(extra)  # after what is installed
    chosen = RUNS[name]
    swap = None if "--unswapped" in sys.argv else chosen.swap
    Path(results).write_text(json.dumps(run(Path(folder), chosen.files.split(), swap)))


if __name__ == "__main__":
    main()
