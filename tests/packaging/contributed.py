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
    """Make it public, as step 2 of the page does."""
    setattr(clipjax, NAME, clip())
    clipjax.__all__.append(NAME)
