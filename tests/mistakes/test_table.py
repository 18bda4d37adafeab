"""Every likely mistake ends in an error that says what is wrong and what to do."""

from __future__ import annotations

import pytest

from tests.mistakes.judge import faults
from tests.mistakes.row import Row
from tests.mistakes.table import ROWS, needs, run


def test_no_row_is_twice_in_the_table() -> None:
    assert len({row.typed for row in ROWS}) == len(ROWS) >= 80


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.typed)
def test_what_was_typed_and_what_came(row: Row) -> None:
    for library in needs(row):
        pytest.importorskip(library)
    came = run(row.typed)
    found = faults(row, came)
    assert not found, f"{type(came).__name__}: {came}"
