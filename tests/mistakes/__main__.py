"""Print the table of mistakes as Markdown, to be read, or write a part of it to a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.mistakes.page import page

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.mistakes", description=__doc__)
    parser.add_argument("--write", type=Path, help="write the page with the first rows of each theme")
    path = parser.parse_args().write
    if path is None:
        print(page(most=None), end="")
    else:
        path.write_text(page(), encoding="utf-8")
