"""Every Python block of the documentation is run, by the Sybil of the root conftest.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.pages import blocks, pages

PAGES = [page for page in pages() if blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_a_test_that_names_its_page_and_line(
    page: Path, request: pytest.FixtureRequest
) -> None:
    found = request.config.hook.pytest_collect_file(file_path=page, parent=request.session)
    tests = {test.nodeid for file in found for test in file.collect()}
    for block in blocks(page):
        first, last = block.map
        name = f"{page.relative_to(ROOT).as_posix()}::line:"
        # A block of prompts is a test for each of them.
        assert any(f"{name}{line},column:1" in tests for line in range(first + 1, last)), first + 1


def test_the_pages_with_code_are_those_that_pytest_is_pointed_at(pytestconfig: pytest.Config) -> None:
    paths = [ROOT / path for path in pytestconfig.getini("testpaths")]
    for page in PAGES:
        assert any(page.is_relative_to(path) for path in paths), page


def test_the_pages_that_show_how_it_is_written_have_code() -> None:
    expected = {"README.md": 2, "docs/quickstart.md": 8, "docs/choosing.md": 4, "docs/constraints.md": 2}
    expected |= {"docs/frameworks.md": 20, "docs/coming-from.md": 8, "docs/faq.md": 4, "docs/adaptive.md": 1}
    assert {name: len(blocks(ROOT / name)) >= least for name, least in expected.items()} == dict.fromkeys(
        expected, True
    )
