"""The README is read in a minute, and names every member."""

from __future__ import annotations

import re

import pytest

import clipjax
from tests.support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
TYPES = {"SKIP", "Axes", "Bound", "Projection", "Replay", "Suggestion", "Violation"}


@pytest.mark.parametrize("name", sorted(set(clipjax.__all__) - TYPES - {"fan_in_or_whole"}))
def test_every_member_is_there(name: str) -> None:
    assert re.search(rf"\b{name}\b", README)


def test_it_is_short() -> None:
    prose = re.sub(r"```.*?```|^\|.*?$", "", README, flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"[\w'-]+", re.sub(r"\]\([^)]*\)", "]", prose))) < 450
