"""Optax's optimizers, wrapped in ours in a way that should change nothing."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import clipjax
from tests.outside.swap import counted, replace

Wrap = Callable[[Any], Any]

WRAPS: dict[str, Wrap] = {
    "skip": lambda tx: clipjax.skip_nonfinite(tx),
    "clip": lambda tx: clipjax.bounded(tx, clip=clipjax.clip_by_global_norm(math.inf)),
    "project": lambda tx: clipjax.bounded(tx, project=clipjax.max_norm(1e9, axes=None)),
}


def swap(wrap: Wrap) -> None:
    """Wrap what every optimizer's factory returns."""
    import jax
    import optax
    from optax._src import alias

    # The tests of explicit sharding compare versions of JAX as strings, and would skip themselves: "0.10" is
    # before "0.7" then.
    jax.__version__ = "0.9"
    factories = {
        name: value
        for name, value in vars(alias).items()
        if getattr(optax, name, None) is value
        and (inspect.isfunction(value) or isinstance(value, functools.partial))
    }
    for factory in factories.values():
        replace("optax", factory, _wrapped(factory, wrap))


def _wrapped(factory: Any, wrap: Wrap) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        made = wrap(factory(*args, **kwargs))
        # Some tests make their optimizers when they are imported, and only use them afterwards.
        return made._replace(init=counted(made.init))

    return counted(make, factory)
