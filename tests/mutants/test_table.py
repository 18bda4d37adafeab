"""The texts to replace are there, once, and so are the tests."""

from pathlib import Path

import pytest

import clipjax
from tests.mutants.table import MUTANTS


@pytest.mark.slow
def test_each_old_text_occurs_once() -> None:
    package = Path(clipjax.__file__).parent
    wrong = [
        m
        for m in MUTANTS
        if (package / m.file).read_text().count(m.old) != 1 or m.old == m.new
    ]
    assert not wrong, "change these in tests/mutants/table.py:\n" + "\n".join(
        map(str, wrong)
    )
    assert not [
        m.test for m in MUTANTS if not (Path(__file__).parents[1] / m.test).exists()
    ]
