"""Tables for the terminal and in Markdown."""

from collections.abc import Sequence
from typing import NamedTuple


class Figure(NamedTuple):
    """A ratio of ours to theirs, its quartiles if there are some, and its goal."""

    value: float
    goal: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def missed(self) -> bool:
        """Whether the ratio, rounded as it is shown, is above its goal."""
        return self.goal is not None and round(self.value, 2) > self.goal

    def __str__(self) -> str:
        spread = "" if self.low is None else f" ({self.low:.2f}-{self.high:.2f})"
        goal = (
            "" if self.goal is None else f" {'>' if self.missed else '≤'} {self.goal:g}"
        )
        return f"{self.value:.2f}{spread}{goal}"


class Row(NamedTuple):
    """What is known of one step: figures by column, or text such as "ours / theirs"."""

    case: tuple[str, ...]  # step, what it is compared with, tree, and so on
    cells: dict[str, Figure | str]

    @property
    def figures(self) -> dict[str, Figure]:
        """The ratios by column."""
        return {name: x for name, x in self.cells.items() if isinstance(x, Figure)}


def _texts(head: Sequence[str], rows: Sequence[Row]) -> list[list[str]]:
    columns = list(dict.fromkeys(name for row in rows for name in row.cells))
    body = [
        [*row.case, *(str(row.cells.get(name, "")) for name in columns)] for row in rows
    ]
    return [[*head, *columns], *body]


def as_text(head: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a table for the terminal."""
    lines = _texts(head, rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def as_markdown(head: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a table in Markdown, where what is above its goal is bold."""
    lines = _texts(head, rows)
    marked = [
        [f"**{text}**" if " > " in text else text for text in line]
        for line in lines[1:]
    ]
    return "\n".join(
        f"| {' | '.join(line)} |"
        for line in [lines[0], ["---"] * len(lines[0]), *marked]
    )


def summary(rows: Sequence[Row], unit: str) -> str:
    """Say how many goals are met."""
    figures = [x for row in rows for x in row.figures.values() if x.goal is not None]
    met = f"{sum(not x.missed for x in figures)} of {len(figures)} goals met"
    return f"{met}. {unit} `>` is above the goal."
