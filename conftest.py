"""What every test needs before JAX starts, hypothesis' profiles, and the code in the documentation."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from tests import versions

ROOT = Path(__file__).parent

# Compilers for TPUs and GPUs may be installed where the devices are not, and JAX would look for those.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Most of the tests' time is XLA's: what one process has compiled, the others and the next run read from
# here. A cold run is one with another folder in the variable.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# XLA's CPU compiler has two ways to make code of a fusion, and that of its defaults takes twice as long for
# programs as small as these. What a test asserts has to hold for both. With XLA_FLAGS set, if only to ""
# (the defaults), the tests use what it says; `.ci/run` so proves once more what is judged to the last bit.
# XLA knows the flag no more since jaxlib 0.11.1, and ends a process that sets it.
CHEAPER = "--xla_cpu_use_fusion_emitters=false" if versions.jaxlib() < (0, 11, 1) else ""
os.environ.setdefault("XLA_FLAGS", CHEAPER)

settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "explore", parent=settings.get_profile("default"), derandomize=False, max_examples=500
)
settings.load_profile("default")


def pytest_report_header() -> str:
    """Say what the tests are compiled by."""
    flags = os.environ["XLA_FLAGS"]
    other = (
        "; `XLA_FLAGS= python -m pytest` for XLA's defaults, which take longer"
        if flags == CHEAPER and flags
        else ""
    )
    return f"XLA_FLAGS={flags}{other}"


# What builds the site is no part of the library, and needs what only the extra `docs` installs.
collect_ignore = ["docs/site"]


def _prepare(namespace: dict[str, Any]) -> None:
    """Give the conditions under which a page's block is skipped what they ask."""
    namespace["find_spec"] = find_spec


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Record which versions the tests ran with, where that was asked for."""
    if path := os.environ.get("CLIPJAX_RECORD"):
        versions.record(Path(path), terminalreporter.stats, config.invocation_params.args)


# The blocks of a page run from top to bottom, each as a test, in one namespace.
pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()], patterns=["*.md"], setup=_prepare
).pytest()
