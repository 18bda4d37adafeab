"""Tables for the terminal and in Markdown, and a picture of the same figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """A ratio of ours to theirs, its quartiles if it was measured several times, and its goal."""

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
        goal = "" if self.goal is None else f" {'>' if self.missed else '≤'} {self.goal:g}"
        return f"{self.value:.2f}{spread}{goal}"


class Row(NamedTuple):
    """What was found out about one step: figures by column, or text such as "ours / theirs"."""

    case: tuple[str, ...]  # step, what it is compared with, tree, and so on
    cells: dict[str, Figure | str]

    @property
    def figures(self) -> dict[str, Figure]:
        """The ratios by column."""
        return {name: x for name, x in self.cells.items() if isinstance(x, Figure)}


def _texts(head: Sequence[str], rows: Sequence[Row]) -> list[list[str]]:
    columns = list(dict.fromkeys(name for row in rows for name in row.cells))
    body = [[*row.case, *(str(row.cells.get(name, "")) for name in columns)] for row in rows]
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
    marked = [[f"**{text}**" if " > " in text else text for text in line] for line in lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], ["---"] * len(lines[0]), *marked])


def summary(rows: Sequence[Row], unit: str) -> str:
    """Say how many goals are met."""
    figures = [x for row in rows for x in row.figures.values() if x.goal is not None]
    met = f"{sum(not x.missed for x in figures)} of {len(figures)} goals met"
    return f"{met}. {unit} `>` is above the goal."


def plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draw each ratio as a dot with its quartiles, and its goal as a line; each column has a panel."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    steps = list(dict.fromkeys(row.case[0] for row in rows))
    groups = list(dict.fromkeys(row.case[2:] for row in rows))
    height = len(groups) + 1  # of a step, in lines
    size = (2.2 + 2.8 * len(names), 1.3 + 0.16 * len(steps) * height + 0.2 * (len(groups) // 4))
    figure, panels = plt.subplots(1, len(names), figsize=size, sharey=True, squeeze=False)
    for panel, name in zip(panels[0], names, strict=True):
        for row in rows:
            if name in row.figures:
                group = groups.index(row.case[2:])
                _draw(panel, row.figures[name], height * steps.index(row.case[0]) + group, f"C{group % 10}")
        _scale(panel, [row.figures[name] for row in rows if name in row.figures])
        panel.set_title(name, fontsize=10, loc="left")
        panel.set_xlabel("ours / theirs", fontsize=9)
        for i in range(1, len(steps)):
            panel.axhline(height * i - 1, color="0.92", lw=0.8, zorder=0)
    middles = [height * i + (len(groups) - 1) / 2 for i in range(len(steps))]
    panels[0][0].set_yticks(middles, steps, fontsize=9)
    panels[0][0].set_ylim(height * len(steps) - 1, -1)
    dots = [plt.Line2D([], [], color=f"C{i % 10}", marker="o", ls="") for i in range(len(groups))]
    goal = plt.Line2D([], [], color="0.3", marker="|", ms=9, mew=1.5, ls="")
    labels = [*(", ".join(group) for group in groups), "goal"]
    figure.set_layout_engine("constrained")
    figure.legend([*dots, goal], labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw(panel: Any, figure: Figure, y: float, color: str) -> None:
    if figure.low is not None:
        panel.plot([figure.low, figure.high], [y, y], color=color, lw=1.5)
    panel.plot(figure.value, y, "o", color=color, ms=4.5)
    if figure.goal is not None:
        panel.plot(figure.goal, y, "|", color="0.3", ms=8, mew=1.5, zorder=0)


def _scale(panel: Any, figures: list[Figure]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    values = [v for x in figures for v in x if v]
    low, high = min(0.8, *values) / 1.05, max(1.3, *values) * 1.05
    ticks = [t for t in (0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.2, 1.5, 2, 3, 5, 10, 20) if low <= t <= high]
    panel.set_xscale("log")
    panel.set_xlim(low, high)
    panel.axvline(1, color="0.75", lw=1, zorder=0)
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(ScalarFormatter())
    panel.tick_params(axis="y", length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)
