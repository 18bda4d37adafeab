"""The table of mistakes as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.mistakes.row import Row
from tests.mistakes.table import THEMES, run

HEAD = """\
# Mistakes, and what you are told

This page lists likely mistakes, such as names of other libraries, and the errors that they raise. It shows a
part of a table that `python -m tests.mistakes` prints. The table is a test: every row raises an error. This
page is written by `python -m tests.mistakes --write docs/mistakes.md`.

Every public name of `clipjax` is imported here. `params` and `grads` are dicts with a `kernel` of shape
`(4, 3)` and a `bias` of shape `(3,)`, `layers` is a dict of 48 such dicts, the kernel of `conv` has shape
`(3, 4, 5)`, and `x` has shape `(3,)`. `sgd` and `adam` are optimizers of Optax, and `clip` is
`clip_by_global_norm(1.0)`.
"""
# How many rows of a theme the page shows: the first, which are the likeliest.
SHOWN = 10


def shown(most: int | None = SHOWN) -> dict[str, tuple[Row, ...]]:
    """The rows of the page, by theme; all of them if `most` is None."""
    return {theme: rows[:most] for theme, rows in THEMES.items()}


def page(most: int | None = SHOWN) -> str:
    """The page: a table for each theme."""
    return "\n".join(_lines(most)) + "\n"


def _lines(most: int | None) -> Iterator[str]:
    yield HEAD.rstrip()
    for theme, rows in shown(most).items():
        yield from ("", f"## {theme}", "", "| typed | told |", "|---|---|")
        for row in rows:
            yield f"| {typed(row)} | {_told(row)} |"


def typed(row: Row) -> str:
    """What was typed, in a cell of the table."""
    return f"`{row.typed}`".replace("|", "\\|")


def _told(row: Row) -> str:
    """What a traceback ends with, or the value that came."""
    came = run(row.typed)
    if not isinstance(came, Exception):
        return f"no error: {came!r}"
    text = f"{type(came).__name__}: {came}"
    return re.sub(r"([\\`*_<>\[\]|])", r"\\\1", text).replace("\n", "<br>")


def unescaped(cell: str) -> str:
    """The text of a cell."""
    return re.sub(r"\\(.)", r"\1", cell.replace("<br>", "\n"))
