"""The Markdown pages of the repository, parsed as GitHub does."""

from __future__ import annotations

import functools
import html.parser
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.support import ROOT

LINKS = {"a": "href", "img": "src"}


class Link(NamedTuple):
    line: int  # the first of the paragraph or table row that it is in
    target: str


def pages(root: Path = ROOT) -> list[Path]:
    """Every Markdown file below `root`, but for hidden folders and virtual environments."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [x for x in folders if not (x.startswith(".") or Path(folder, x, "pyvenv.cfg").exists())]
        found += [Path(folder, name) for name in names if name.endswith(".md")]
    return sorted(found)


@functools.cache
def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def blocks(page: Path, language: str = "python") -> list[Token]:
    """The fenced blocks of a language."""
    return [token for token in tokens(page) if token.type == "fence" and token.info.split()[:1] == [language]]


class _Html(html.parser.HTMLParser):
    """The targets and the anchors of raw HTML."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given: dict[str, Any] = dict(attrs)
        self.targets += [given[name] for name in (LINKS.get(tag), "srcset") if given.get(name)]
        self.anchors += [given[name] for name in ("id", "name") if given.get(name)]


def _inline(page: Path) -> Iterator[tuple[int, Token]]:
    """What is in the text, with the line of the paragraph, heading or table row around it."""
    line = 0
    for token in tokens(page):
        line = token.map[0] + 1 if token.map else line
        for child in (token, *(token.children or ())):
            yield line, child


def links(page: Path) -> list[Link]:
    """The targets of all links and images, in Markdown and in HTML."""
    found = []
    for line, token in _inline(page):
        if token.type in ("link_open", "image"):
            found.append(Link(line, str(token.attrGet("href") or token.attrGet("src"))))
        elif token.type in ("html_block", "html_inline"):
            found += [Link(line, target) for target in _Html(token.content).targets]
    return found


def anchors(page: Path) -> set[str]:
    """The sections that a link may name: GitHub's slugs of the headings, and the ids in HTML."""
    found: dict[str, int] = {}
    ids = {
        name
        for _, token in _inline(page)
        if token.type in ("html_block", "html_inline")
        for name in _Html(token.content).anchors
    }
    for token, inside in zip(tokens(page), tokens(page)[1:], strict=False):
        if token.type == "heading_open":
            parts = inside.children or []
            text = "".join(part.content for part in parts if part.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
            count = found[slug] = found.get(slug, -1) + 1
            ids.add(f"{slug}-{count}" if count else slug)
    return ids
