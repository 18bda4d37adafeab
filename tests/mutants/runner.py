"""Running tests on a copy of the project, with one line of the library changed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tests.mutants.mutant import Mutant

ROOT = Path(__file__).parents[2]
_COPIED = ("clipjax", "tests", "examples", "docs", "conftest.py", "pyproject.toml", "README.md")
_OPTIONS = ("-x", "-q", "-rfE", "-m", "not peer and not slow and not full", "-p", "no:cacheprovider")
# Where the folder of compiled programs is emptied meanwhile, that is no defect which a test has stats.
_WARNINGS = ("-W", "ignore:Error writing persistent compilation cache")

Outcome = Literal["seen", "survived", "out of time", "broken"]


class Run(NamedTuple):
    """What became of some tests."""

    outcome: Outcome
    failed: str  # the first test that failed
    seconds: float
    printed: str


class Copy:
    """A copy of the project in a folder of its own, for one run of tests at a time."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        for name in _COPIED:
            source, target = ROOT / name, folder / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, target)

    @contextmanager
    def changed(self, mutant: Mutant) -> Any:
        """The library with one line changed."""
        path = self.root / "clipjax" / mutant.file
        source = path.read_text(encoding="utf-8")
        try:
            self._write(path, mutated(source, mutant))
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, source: str) -> None:
        path.write_text(source, encoding="utf-8")
        # Python tells that a file has changed by its size and by seconds, which may be the same.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def run(self, tests: Iterable[str], timeout: float, processes: int = 0) -> Run:
        """Run tests up to the first failure."""
        begin = time.monotonic()
        options = [*_OPTIONS, *_WARNINGS, "-n", str(processes), "-p", "tests.mutants.no_shrinking"]
        with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
            started = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=self.root,
                env=self._environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                status: int | None = started.wait(timeout)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()
                status = None
            output.seek(0)
            printed = output.read()
        failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", printed, re.MULTILINE)
        return Run(
            _OUTCOMES.get(status, "broken"), failed[1] if failed else "", time.monotonic() - begin, printed
        )

    def _environment(self) -> dict[str, str]:
        """The compiled programs are shared with the project's own tests: most are those of every mutant."""
        return {
            "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
            "XLA_FLAGS": "",  # XLA's defaults, by which users compile
            **os.environ,
            # Tests that start processes of their own must import this copy of the library.
            "PYTHONPATH": str(self.root),
        }


_OUTCOMES: dict[int | None, Outcome] = {0: "survived", 1: "seen", None: "out of time"}


def mutated(source: str, mutant: Mutant) -> str:
    """The source with the change."""
    if source.count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.name}: {mutant.old!r} occurs {source.count(mutant.old)} times in {mutant.file}"
        )
    return source.replace(mutant.old, mutant.new)
