"""The library's docstrings as mkdocstrings renders them: roles become links, `Example:` a section."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|data|mod):`(?P<name>[\w.]+)`")
PUBLIC = re.compile(r"(?<![\[`])`clipjax\.(?P<name>\w+)`(?!\])")
TITLED = re.compile(r"^(?P<title>Guarantees|Gain): ", re.MULTILINE)
WITH_NAMES = ("clipjax.functional", "clipjax.plots")  # public under their own names
LITERAL = re.compile(r"::$", re.MULTILINE)  # before an indented block of code
SECTION = re.compile(
    r"^(?P<title>Args|Attributes|Raises|Returns):\n(?P<items>(?: +.*\n?|\n(?= ))+)", re.MULTILINE
)
NAMED = re.compile(r"\S")
ERROR = re.compile(r"[A-Z]\w+(, [A-Z]\w+)*: ")
ERRORS = re.compile(r"^( +)TypeError, ValueError: ", re.MULTILINE)
REFERENCES = re.compile(r"^References:\n(?P<text>(?:    .*\n|  .*\n?)+)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrite the docstring of each object before its sections are read."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Begin once everything is loaded: what is public is known then."""
        exported = {str(name) for name in pkg.exports or ()}
        seen: set[str] = set()

        def visit(item: Any) -> None:
            if item.is_alias or item.path in seen:
                return
            seen.add(item.path)
            if item.docstring:
                item.docstring.value = rewritten(item.docstring.value, item, exported)
            for member in item.members.values():
                visit(member)

        visit(pkg)


def joined(match: re.Match[str]) -> str:
    """A section with one line for each item; what is returned, which has no names, as prose."""
    text = textwrap.dedent(match["items"]).strip("\n")
    if match["title"] == "Returns":
        return f"**Returns:** {text}\n\n"
    begins = ERROR if match["title"] == "Raises" else NAMED
    items: list[str] = []
    for line in text.splitlines():
        if begins.match(line):
            items.append(f"    {line}")
        elif line.strip():
            items[-1] += f" {line.strip()}"
    return "\n".join([f"{match['title']}:", *items, "", ""])


def rewritten(text: str, item: Any, exported: set[str]) -> str:
    """A docstring in mkdocstrings' terms."""

    def link(match: re.Match[str]) -> str:
        name = match["name"].removeprefix("clipjax.")
        if item.module.path in WITH_NAMES and name in item.module.members:
            path = f"{item.module.path}.{name}"
        elif name in exported:
            path = f"clipjax.{name}"
        elif item.parent and item.parent.is_class and name in item.parent.members:
            path = f"clipjax.{item.parent.name}.{name}"
        elif item.is_class and name in item.members:
            path = f"clipjax.{item.name}.{name}"
        else:
            return f"`{name}`"
        return f"[`{name}`][{path}]"

    def public(match: re.Match[str]) -> str:
        name = match["name"]
        return f"[`clipjax.{name}`][clipjax.{name}]" if name in exported else match[0]

    prose, mark, example = text.partition("\nExample:\n")
    prose = LITERAL.sub(":", prose)
    prose = ROLE.sub(link, prose)
    prose = PUBLIC.sub(public, prose)
    prose = SECTION.sub(joined, prose)
    prose = ERRORS.sub(r"\1TypeError or ValueError: ", prose)
    prose = TITLED.sub(lambda match: f"**{match['title']}:** ", prose)
    prose = REFERENCES.sub(lambda match: f"**References:** {' '.join(match['text'].split())}\n", prose)
    return prose.rstrip() + (mark and "\n\nExamples:\n" + example)
