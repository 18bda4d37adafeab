"""The page docs/stacks.md: seven stacks, each with the file that it is about and lines that run."""

from __future__ import annotations

import re

import pytest

from tests.support import ROOT

PAGE = (ROOT / "docs" / "stacks.md").read_text(encoding="utf-8")
STACKS = ["MaxText", "Levanter", "Axlearn", "EasyDeL", "Tunix", "big_vision", "Megatron-LM"]


def test_the_table_has_a_row_for_each_section() -> None:
    assert re.findall(r"^\| \[([^]]+)\]\(#", PAGE, re.MULTILINE) == STACKS
    assert re.findall(r"^## (.+)$", PAGE, re.MULTILINE) == STACKS


@pytest.mark.parametrize("stack", STACKS)
def test_each_section_names_what_it_read_and_compares_with_its_rule(stack: str) -> None:
    section = PAGE.split(f"\n## {stack}\n")[1].split("\n## ")[0]
    assert re.match(r"\n[\w.-]+/[\w.-]+ at `[0-9a-f]{7}`", section)
    assert re.search(r"`[\w/-]+\.py`", section)
    # Every visible block is followed by one that compares it with the oracles, or is compared in itself.
    assert section.count("\n```python\n") >= 1
    assert section.count("rules.") >= 1
    assert section.count("assert") >= 2
