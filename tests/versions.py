"""Which versions the tests ran with: a record of each run, and the table of them in docs/versions.md.

`nox -s tests` sets CLIPJAX_RECORD, and the root conftest.py then writes a record. `python -m tests.versions
out/versions --write docs/versions.md` puts the records into the table; rows of which there is none stay.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "optax", "flax", "equinox", "orbax-checkpoint", "numpy")
COUNTED = ("passed", "failed", "error", "skipped")
HEADS = ("Python", "", *PACKAGES, "tests", *COUNTED, "date")
HEAD, RULE = (f"| {' | '.join(cells)} |" for cells in (HEADS, ["---"] * len(HEADS)))


def jaxlib() -> tuple[int, ...]:
    """The version of jaxlib, as numbers; without importing it, which would read the flags of XLA."""
    return tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version("jaxlib"))[:3])


def record(path: Path, stats: Mapping[str, Iterable[Any]], arguments: Iterable[str]) -> None:
    """Write what ran here, with which versions, and what came of it."""
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    found = {
        "Python": platform.python_version(),
        "": path.stem.split("-")[-1],
        **{name: installed.get(name, "") for name in PACKAGES},
        "tests": " ".join(f"`{argument}`" for argument in arguments) or "all",
        **{name: str(len(list(stats.get(name, ())))) for name in COUNTED},
        "date": datetime.date.today().isoformat(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1), encoding="utf-8")


def _parts(page: str) -> tuple[str, list[str], str]:
    """What is before the rows of the table, the rows, and what is after them."""
    before, after = page.split(f"{HEAD}\n{RULE}\n")
    lines = after.splitlines(keepends=True)
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), lines))
    return f"{before}{HEAD}\n{RULE}\n", rows, "".join(lines[len(rows) :])


def rows_of(page: str) -> list[list[str]]:
    """The cells of each row of the table in a page."""
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in _parts(page)[1]]


def with_records(page: str, records: Iterable[Mapping[str, str]]) -> str:
    """The page with a row for each record, in place of an older one of the same Python and end."""
    rows = {_key(row): row for row in [*rows_of(page), *([r[head] for head in HEADS] for r in records)]}
    before, _, after = _parts(page)
    return before + "".join(f"| {' | '.join(rows[key])} |\n" for key in sorted(rows)) + after


def _key(row: list[str]) -> tuple[int, int, str]:
    major, minor, *_ = row[0].split(".")
    return int(major), int(minor), {"oldest": "0", "newest": "1"}.get(row[1], row[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("records", type=Path, help="the folder with the records")
    parser.add_argument("--write", type=Path, required=True, help="the page with the table")
    given = parser.parse_args()
    found = [json.loads(path.read_text("utf-8")) for path in sorted(given.records.glob("*.json"))]
    if not found:
        sys.exit(f"{given.records} has no records: `nox -s tests` writes them")
    given.write.write_text(with_records(given.write.read_text("utf-8"), found), encoding="utf-8")
