"""What a published result comes to here: a row of the table."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A claim, what we measured, the bar that was set before, and whether it is met."""

    claim: str
    figure: str
    bar: str
    met: bool


def span(values: list[float] | tuple[float, ...], form: str = ".3g") -> str:
    """Write the smallest and the largest of some values."""
    low, high = min(values), max(values)
    return f"{low:{form}}" if low == high else f"{low:{form}} to {high:{form}}"
