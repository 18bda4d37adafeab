"""The README names all that is public."""

from __future__ import annotations

import pytest

import clipjax
from tests.support import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(set(clipjax.__all__) - {"SKIP", "Projection"}))
def test_every_public_name_is_there(name: str) -> None:
    assert name in README
