"""Where tests run: a CPU, as eight virtual devices; set before JAX is imported."""

import contextlib
import doctest
import io
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the tests' time is XLA's, and half of that LLVM's optimizing, of which no
# assertion depends.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()
os.environ.setdefault("MPLBACKEND", "Agg")

from sybil import Example, Sybil
from sybil.evaluators.doctest import NUMBER, OutputChecker
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser
from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parent
collect_ignore = ["docs/site", "tests/clients"]  # what needs packages of its own


def _enter(namespace: dict[str, Any]) -> None:
    """Run a page in a folder of its own, since some write files."""
    namespace["_folder"] = tempfile.mkdtemp()
    os.chdir(namespace["_folder"])


def _leave(namespace: dict[str, Any]) -> None:
    os.chdir(ROOT)
    shutil.rmtree(namespace["_folder"])


# Beside or below the call.
SHOWN = re.compile(r"^ *print\(.*?\)(?:  # (.+))?((?:\n# .+)*)$", re.MULTILINE)


def _compare(shown: str, printed: str) -> str:
    """Say what differs between what a page shows, rounded, and what is printed."""
    flags = NUMBER | doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    same = OutputChecker().check_output(shown, printed, flags)
    return "" if same else f"shown:\n{shown}printed:\n{printed}"


def _run(example: Example) -> str:
    """Run a block, and compare what it prints with its comments, if it has some."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        PythonEvaluator()(example)
    parts = [
        part
        for match in SHOWN.finditer(example.parsed)
        for part in (match[1], match[2].replace("\n# ", "\n"))
    ]
    shown = [line for part in parts if part for line in part.strip().splitlines()]
    return (
        _compare("".join(f"{line}\n" for line in shown), out.getvalue())
        if shown
        else ""
    )


def pytest_xdist_make_scheduler(config: Any, log: Any) -> LoadFileScheduling:
    """Give each file to one process, and each folder whose files share programs."""

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            folder, _, _ = nodeid.rpartition("::")[0].rpartition("/")
            shared = ("tests/contract", "docs")
            return folder if folder in shared else super()._split_scope(nodeid)

    return ByFile(config, log)


# The blocks of a page run from top to bottom, each as a test, in one namespace.
pytest_collect_file = Sybil(
    parsers=[CodeBlockParser("python", _run), SkipParser()],
    patterns=["*.md"],
    setup=_enter,
    teardown=_leave,
).pytest()
