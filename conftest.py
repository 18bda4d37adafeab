"""What every test needs before JAX starts, hypothesis' profiles, and the code in the documentation."""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

ROOT = Path(__file__).parent

# Most of the tests' time is XLA's: what one process has compiled, the others and the next run read from
# here. A cold run is one with another folder in the variable.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

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

# The blocks of a page run from top to bottom, each as a test, in one namespace.
pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], patterns=["*.md"]).pytest()
