"""The table of mutants fits the library and the tests as they are."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from tests.mutants.mutant import Mutant
from tests.mutants.runner import ROOT, mutated
from tests.mutants.table import MUTANTS


@functools.cache
def _names_in(path: Path) -> frozenset[str]:
    """The functions of a module, and the classes and their methods, as pytest names them."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    found = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}::{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)
            }
    return frozenset(found)


def test_the_names_differ() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_line_and_names_tests_that_exist(mutant: Mutant) -> None:
    path = ROOT / "clipjax" / mutant.file
    source = path.read_text(encoding="utf-8")
    changed = mutated(source, mutant)
    compile(changed, path, "exec")
    pairs = zip(source.splitlines(), changed.splitlines(), strict=True)
    assert sum(old != new for old, new in pairs) == 1
    assert mutant.tests.split()
    for test in mutant.tests.split():
        file, _, name = test.partition("::")
        assert (ROOT / file).exists(), f"there is no {file}"
        assert not name or name.partition("[")[0] in _names_in(ROOT / file), f"there is no {test}"
