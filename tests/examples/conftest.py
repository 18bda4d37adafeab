"""What the tests of the examples share."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(scope="module")
def unoptimized() -> Iterator[None]:
    """Let XLA compile without its optimizations, which take longer than such short runs."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
