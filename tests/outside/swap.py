"""Put ours where a peer's code and tests look theirs up, and tell which tests use it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

_uses = 0


def uses() -> int:
    """How often something swapped in has been called so far."""
    return _uses


def counted(ours: Callable[..., Any], theirs: Any = None) -> Callable[..., Any]:
    """`ours`, its calls counted; with the name and the signature of `theirs` if that is given."""

    @functools.wraps(ours if theirs is None else theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _uses
        _uses += 1
        return ours(*args, **kwargs)

    return call


def replace(package: str, theirs: Any, ours: Any) -> None:
    """Let every name in the loaded modules of `package` that stands for `theirs` stand for `ours`."""
    places = [
        (module, name)
        for path, module in list(sys.modules.items())
        if path == package or path.startswith(f"{package}.")
        for name, value in list(vars(module).items())
        if value is theirs
    ]
    if not places:
        raise LookupError(f"nothing in {package} is {theirs!r}: has it been swapped before?")
    for module, name in places:
        setattr(module, name, ours)
