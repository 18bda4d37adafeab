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
# On a busy machine, eight virtual devices may wait for each other for over 40 seconds.
FLAGS += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
os.environ["XLA_FLAGS"] = f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()
os.environ.setdefault("MPLBACKEND", "Agg")

ROOT = Path(__file__).parent
# Most of a run is XLA's compiling. A key is the program, the flags and the version, so
# that no entry can be stale.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import pytest
from sybil import Example, Sybil
from sybil.evaluators.doctest import NUMBER, OutputChecker
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser
from xdist.scheduler import LoadFileScheduling

# What needs packages of its own, and scripts that run when they are imported.
collect_ignore = ["docs/site"]
collect_ignore_glob = ["tests/clients/[!t]*.py"]


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


def _as_script(printed: str, page: Path) -> str:
    """Name lines of a page as those of its block, saved as train.py."""
    lines = page.read_text(encoding="utf-8").splitlines()

    def within_block(match: re.Match[str]) -> str:
        line = int(match[1])
        fence = max(i for i in range(line) if lines[i].startswith("```python"))
        return f"train.py:{line - fence - 1}"

    return re.sub(rf"\b{re.escape(page.name)}:(\d+)", within_block, printed)


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
    if not shown:
        return ""
    printed = _as_script(out.getvalue(), Path(example.path))
    return _compare("".join(f"{line}\n" for line in shown), printed)


# The first tier, which judges a change in two minutes, is `testpaths`. The second has
# the rest of these.
ALL = ["clipjax", "tests", "docs", "README.md", "CONTRIBUTING.md"]
APART = ("slow", "tpu_compile", "gpu_compile")


def pytest_configure(config: pytest.Config) -> None:
    """Run the first tier by default, and look everywhere for what `-m` names."""
    if not config.option.markexpr:
        config.option.markexpr = " and ".join(f"not {marker}" for marker in APART)
    elif config.args_source is config.ArgsSource.TESTPATHS:
        config.args[:] = ALL


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Mark the second tier: what is in no folder of the first, and is not slow."""
    first_tier = config.getini("testpaths")
    for item in items:
        path = item.path.relative_to(ROOT)
        in_first = any(path.is_relative_to(folder) for folder in first_tier)
        if not in_first and not any(map(item.get_closest_marker, APART)):
            item.add_marker("full")
    # What takes longest begins first: the pages, which run in one process.
    items.sort(key=lambda item: not item.path.is_relative_to(ROOT / "docs"))


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
