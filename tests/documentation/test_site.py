"""What the site makes of pages that are written for a code host."""

from __future__ import annotations

import importlib.util
from types import ModuleType, SimpleNamespace

import pytest

from tests.support import ROOT


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/site/hooks.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("written", "shown", "without"),
    [
        ("[a](../../README.md)", "[a](../index.md)", None),
        ("[a](../../tests/README.md#the-rooms)", "[a](R/blob/main/tests/README.md#the-rooms)", "a"),
        ("[`a [b]`](../../tests/core)", "[`a [b]`](R/tree/main/tests/core)", "`a [b]`"),
        ("[a](../faq.md#nan), [b](#c), [d](https://e.org/f.md)", None, None),
        ("![a](../mnist.png)", "[![a](../mnist.png)](../mnist.png)", None),
        ("```python\n[a](../../tests/core)\n```", None, None),
        ("1\n<!--- invisible-code-block: python\nx = 1\n--->\n\n2", "1\n2", None),
        (r"'\<'", "'&lt;'", None),
    ],
)
def test_links_lead_to_pages_of_the_site_or_to_the_repository(
    hooks: ModuleType, written: str, shown: str | None, without: str | None
) -> None:
    shown = written if shown is None else shown
    page = SimpleNamespace(file=SimpleNamespace(src_uri="reference/page.md"))
    for extra, expected in (({"repository": "R"}, shown), ({}, shown if without is None else without)):
        config = SimpleNamespace(extra=extra)
        assert hooks.on_page_markdown(written, page, config, None) == expected
