"""The texts to replace are there, once."""

from __future__ import annotations

from pathlib import Path

import clipjax
from tests.mutants.table import MUTANTS


def test_each_old_text_occurs_once() -> None:
    package = Path(clipjax.__file__).parent
    wrong = [m for m in MUTANTS if (package / m.file).read_text().count(m.old) != 1 or m.old == m.new]
    assert not wrong
    assert len(MUTANTS) >= 50
    assert sum(m.file.startswith("_core/") for m in MUTANTS) >= 30


def test_the_likely_tests_exist() -> None:
    tests = Path(__file__).parent.parent
    assert not [m.test for m in MUTANTS if not (tests / m.test).exists()]
