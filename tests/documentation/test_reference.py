"""The site's reference has every public name once, and its navigation every page."""

from __future__ import annotations

import collections
import inspect
import re

import pytest

import clipjax
from tests.support import ROOT

DOCS = ROOT / "docs"
PAGES = sorted((DOCS / "reference").glob("*.md"))


def entries() -> collections.Counter[str]:
    """The names that the pages have mkdocstrings write about."""
    found = (re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE) for page in PAGES)
    return collections.Counter(name for names in found for name in names)


def public() -> set[str]:
    """All that may be imported, with the modules' own names in the place of the modules."""
    pytest.importorskip("flax")
    pytest.importorskip("equinox")
    pytest.importorskip("matplotlib")
    modules = {"flax": clipjax.flax, "equinox": clipjax.equinox, "plots": clipjax.plots}
    modules |= {name: x for name in clipjax.__all__ if inspect.ismodule(x := getattr(clipjax, name))}
    names = {f"clipjax.{name}" for name in clipjax.__all__ if name not in modules}
    return names | {f"clipjax.{module}.{name}" for module, x in modules.items() for name in x.__all__}


def test_every_public_name_is_in_the_reference_once() -> None:
    """What is missing here wants a line `::: clipjax.<name>` on a page of docs/reference."""
    found = entries()
    assert public() - set(found) == set(), "missing in docs/reference"
    assert set(found) - public() == set(), "not public"
    assert set(found.values()) == {1}


def navigation() -> list[str]:
    """The pages of mkdocs.yml, which has tags that no safe loader knows."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = re.search(r"^nav:\n(.*?)^\S", text, re.MULTILINE | re.DOTALL)
    assert nav
    return re.findall(r"^ +- (?:[^#\n]*: )?(\S+\.md)$", nav[1], re.MULTILINE)


def test_every_page_is_in_the_navigation_once() -> None:
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    found = navigation()
    assert sorted(found) == sorted(pages)
