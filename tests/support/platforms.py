"""Programs for devices that are not here."""

from typing import Any

import jax
import pytest

from benchmarks.platforms import missing


def skip_where_missing(platform: str) -> None:
    """Skip a test where the compiler for a platform is not installed."""
    if reason := missing(platform):
        pytest.skip(reason)


def compiled_for_tpu(function: Any, *args: Any) -> str:
    """Return the program, for the devices of the arguments' shardings, as text."""
    traced = jax.jit(function).trace(*args)
    return traced.lower(lowering_platforms=("tpu",)).compile().as_text()
