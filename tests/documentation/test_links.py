"""Every link within the repository leads somewhere: to a file or a folder, and there to a section."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support import ROOT
from tests.support.pages import anchors, links, pages


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere, each with its line and the reason."""
    found = []
    for line, target in links(page):
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:  # the rest of the world is not ours to test
            continue
        path, section = unquote(parts.path), unquote(parts.fragment)
        file = page.parent / path if path else page
        if path.startswith("/"):
            found.append(f"{page.name}:{line}: {target} is absolute")
        elif not file.exists():
            found.append(f"{page.name}:{line}: {target} does not exist")
        elif section and (file.suffix != ".md" or section not in anchors(file)):
            found.append(f"{page.name}:{line}: {target} has no such section")
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_images_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_the_readme_links_to_every_page_and_picture() -> None:
    """Or to a page that does: what nothing leads to, nobody finds."""
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        found = {
            (page.parent / urlsplit(link.target).path).resolve()
            for page in new
            if page.suffix == ".md"
            for link in links(page)
            if not urlsplit(link.target).scheme
        }
        new = {path for path in found if path.is_file()} - reached
    assert {path for path in (ROOT / "docs").iterdir() if path.is_file()} <= reached


def test_what_is_broken_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A `section` of 2, twice\n\n# A section of 2, twice\n")
    (tmp_path / "a b.png").touch()
    page = tmp_path / "page.md"
    page.write_text(
        "[1](there.md), [2](there.md#a-section-of-2-twice), [3](there.md#a-section-of-2-twice-1), [4][4]\n"
        "![5](a%20b.png) <img src='a b.png'> [6](https://example.com/none) [7](#own) <a id='own'></a>\n\n"
        "```python\n[8](none.md)\n```\n\n`[9](none.md)`\n\n[4]: there.md\n"
    )
    assert broken(page) == []
    page = tmp_path / "broken.md"
    page.write_text(
        "[1](gone.md)\n\n![2](gone.png)\n\n| a |\n|---|\n| [3](there.md#section) |\n\n"
        "<img src='gone.svg'>\n\n[4][4] [5](#none)\n\n[4]: gone\n"
    )
    assert broken(page) == [
        "broken.md:1: gone.md does not exist",
        "broken.md:3: gone.png does not exist",
        "broken.md:7: there.md#section has no such section",
        "broken.md:9: gone.svg does not exist",
        "broken.md:11: gone does not exist",
        "broken.md:11: #none has no such section",
    ]
