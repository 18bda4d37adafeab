"""The clip that CONTRIBUTING.md adds, added: a plugin of pytest, and what tests of the page share."""

from __future__ import annotations

from typing import Any

import clipjax
from tests.support import ROOT
from tests.support.pages import blocks

NAME = "clip_by_weight_norm"


def clip() -> Any:
    """The function of the page."""
    (block,) = blocks(ROOT / "CONTRIBUTING.md")
    namespace: dict[str, Any] = {"__name__": "clipjax.gradients.contributed"}
    exec(block.content, namespace)
    return namespace[NAME]


def pytest_configure() -> None:
    """Take the steps 2 and 3 of the page."""
    setattr(clipjax, NAME, clip())
    clipjax.__all__.append(NAME)
    from tests.contract.test_without_state import STATELESS  # which lists what is public

    STATELESS.add(NAME)
