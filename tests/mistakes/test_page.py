"""The page docs/mistakes.md shows rows of the table, and says of each what the table expects."""

from __future__ import annotations

import pytest

from tests.mistakes.page import shown, typed, unescaped
from tests.mistakes.row import Row
from tests.support import ROOT

PAGE = (ROOT / "docs" / "mistakes.md").read_text(encoding="utf-8")
CELLS = dict(line[2:-2].rsplit(" | ", 1) for line in PAGE.splitlines() if line.startswith("| `"))
ROWS = [row for rows in shown().values() for row in rows]


def test_the_page_has_the_first_rows_of_each_theme() -> None:
    assert list(CELLS) == [typed(row) for row in ROWS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.typed)
def test_the_page_says_what_the_table_expects(row: Row) -> None:
    told = unescaped(CELLS[typed(row)])
    assert told.startswith(f"{row.error.__name__}: ")
    assert [words for words in row.says if words not in told] == []
