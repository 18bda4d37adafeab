"""Where the tests run: on a CPU, as eight virtual devices. It is set before JAX is imported."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the tests' time is XLA's, and half of that LLVM's optimizing, of which no assertion depends.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()
os.environ.setdefault("MPLBACKEND", "Agg")

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).parent
collect_ignore = ["docs/site"]  # what builds the site needs the extra `docs`


def _enter(namespace: dict[str, Any]) -> None:
    """Run a page in a folder of its own, since some write files."""
    namespace["_folder"] = tempfile.mkdtemp()
    os.chdir(namespace["_folder"])


def _leave(namespace: dict[str, Any]) -> None:
    os.chdir(ROOT)
    shutil.rmtree(namespace["_folder"])


# The blocks of a page run from top to bottom, each as a test, in one namespace.
pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()], patterns=["*.md"], setup=_enter, teardown=_leave
).pytest()
