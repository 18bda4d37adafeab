"""NNX's modes: that of today, and those that are to become its defaults."""

import contextlib
from collections.abc import Iterator

import pytest

MODES = [(), ("set_graph_mode",), ("set_graph_mode", "set_graph_updates")]


@contextlib.contextmanager
def without(modes: tuple[str, ...]) -> Iterator[None]:
    """Turn modes off, and on again at the end."""
    nnx = pytest.importorskip("flax.nnx")
    if missing := [name for name in modes if not hasattr(nnx, name)]:
        pytest.skip(f"this Flax has no {missing}")
    with contextlib.ExitStack() as stack:
        for name in modes:
            stack.enter_context(getattr(nnx, name)(False))
        yield
