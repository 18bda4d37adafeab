"""Print the table of mistakes as Markdown, to be read."""

from __future__ import annotations

from tests.mistakes.page import page

if __name__ == "__main__":
    print(page(), end="")
