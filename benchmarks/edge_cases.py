"""Edge cases, given to clipjax and to Optax: what each makes of them, measured.

Run `python -m benchmarks.edge_cases` from the root of the repository; `--write PATH` writes Markdown.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.edge_cases_inputs import BASIC
from benchmarks.edge_cases_systems import SYSTEMS
from benchmarks.edge_cases_trials import TRIALS

_GROUPS = {
    "Precision, range and non-finite values": BASIC,
    "How often a bound is exceeded, and by how much": TRIALS,
    "Derivatives, sharding and composition": SYSTEMS,
}
_LONGEST_ERROR = 110


class Row(NamedTuple):
    """One input and two answers."""

    given: str
    ours: str
    theirs: str


def answer(ask: Callable[[], str] | None) -> str:
    """Return what `ask` says, or the error that it raises, shortened."""
    if ask is None:
        return "has none"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy's, about the overflow that is the point
            return ask()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        # Addresses would make every run of this differ.
        text = re.sub(r" at 0x[0-9a-f]+", "", f"{type(error).__name__}: {lines[0]}")
        return text if len(text) <= _LONGEST_ERROR else f"{text[:_LONGEST_ERROR]}..."


def measure(group: Iterable[tuple[str, Callable[[], str] | None, Callable[[], str] | None]]) -> list[Row]:
    """Ask both libraries about every input."""
    return [Row(given, answer(ours), answer(theirs)) for given, ours, theirs in group]


def _markdown(tables: dict[str, list[Row]]) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("clipjax", "optax", "jax"))
    parts = [
        "# Edge cases",
        f"This page compares clipjax and Optax on edge cases, with {versions} on a CPU. `python -m "
        "benchmarks.edge_cases --write docs/edge-cases.md` writes it from measurements. Norms are measured "
        "in float64. A pair of square brackets is a leaf.",
    ]
    for title, rows in tables.items():
        lines = ["| input | clipjax | Optax |", "|---|---|---|"]
        lines += [f"| {' | '.join(_escaped(cell) for cell in row)} |" for row in rows]
        parts += [f"## {title}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _escaped(cell: str) -> str:
    """Keep what Markdown would take for markup."""
    for mark in "\\|*_<`[":
        cell = cell.replace(mark, f"\\{mark}")
    return cell


def main(argv: list[str] | None = None) -> None:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.edge_cases", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PATH", help="write a Markdown page there")
    args = parser.parse_args(argv)
    tables = {title: measure(group) for title, group in _GROUPS.items()}
    console = Console(width=None if Console().is_terminal else 120)
    for title, rows in tables.items():
        table = Table("input", "clipjax", "Optax", title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for row in rows:
            # Brackets are arrays here, not rich's markup.
            table.add_row(*(cell.replace("[", "\\[") for cell in row))
        console.print(table)
    if args.write:
        args.write.write_text(_markdown(tables))


if __name__ == "__main__":
    main()
