"""The table of mistakes as a Markdown page."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator

from tests.mistakes.table import THEMES, run

HEAD = """\
# Mistakes, and what you are told
"""


def page() -> str:
    """The page: a table for each theme."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield HEAD.rstrip()
    for theme, rows in THEMES.items():
        yield from ("", f"## {theme}", "", "| typed | told |", "|---|---|")
        for row in rows:
            yield f"| {_code(row.typed)} | {_text(told(row.typed))} |"


def told(typed: str) -> str:
    """What a traceback ends with, or the value that came."""
    came = run(typed)
    if not isinstance(came, Exception):
        return f"no error: {came!r}"
    return "".join(traceback.format_exception_only(came)).strip()


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _text(text: str) -> str:
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return re.sub(r"([\\`*_<>\[\]|])", r"\\\1", text).replace("\n", "<br>")
