"""Tables for the terminal and in Markdown."""

from collections.abc import Callable, Sequence
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

    @property
    def bare(self) -> str:
        """The figure without its goal."""
        spread = "" if self.low is None else f" ({self.low:.2f}-{self.high:.2f})"
        return f"{self.value:.2f}{spread}"

    def __str__(self) -> str:
        if self.goal is None:
            return self.bare
        return f"{self.bare} {'>' if self.missed else '≤'} {self.goal:g}"


class Row(NamedTuple):
    """What is known of one step: figures by column, or text such as "ours / theirs"."""

    case: tuple[str, ...]  # step, what it is compared with, tree, and so on
    cells: dict[str, Figure | str]

    @property
    def figures(self) -> dict[str, Figure]:
        """The ratios by column."""
        return {name: x for name, x in self.cells.items() if isinstance(x, Figure)}


def _texts(
    head: Sequence[str],
    rows: Sequence[Row],
    show: Callable[[Figure | str], str] = str,
) -> list[list[str]]:
    columns = list(dict.fromkeys(name for row in rows for name in row.cells))
    body = [
        [*row.case, *(show(row.cells.get(name, "")) for name in columns)]
        for row in rows
    ]
    return [[*head, *columns], *body]


def as_text(head: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a table for the terminal."""
    lines = _texts(head, rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def as_markdown(head: Sequence[str], rows: Sequence[Row]) -> str:
    """Return a table in Markdown, or one for each device; goals are left out."""
    if "device" not in head:
        return _markdown(head, rows)
    place = head.index("device")

    def others(names: Sequence[str]) -> tuple[str, ...]:
        return (*names[:place], *names[place + 1 :])

    of_device: dict[str, list[Row]] = {}
    for row in rows:
        its_rows = of_device.setdefault(row.case[place], [])
        its_rows.append(row._replace(case=others(row.case)))
    return "\n\n".join(
        f"## {device}\n\n{_markdown(others(head), its_rows)}"
        for device, its_rows in of_device.items()
    )


def _markdown(head: Sequence[str], rows: Sequence[Row]) -> str:
    lines = _texts(head, rows, lambda x: x.bare if isinstance(x, Figure) else x)
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(rows: Sequence[Row]) -> str:
    """Say how many goals are met."""
    figures = [x for row in rows for x in row.figures.values() if x.goal is not None]
    met = f"{sum(not x.missed for x in figures)} of {len(figures)} goals met"
    return f"{met}; `>` is above the goal."
