"""One likely mistake: what was typed, and what the error has to say."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """Code to run, and words that the message must have: the argument, the value, what to do."""

    typed: str
    error: type[Exception]
    says: tuple[str, ...]


def value(typed: str, *says: str) -> Row:
    """A mistake that raises a ValueError."""
    return Row(typed, ValueError, says)


def kind(typed: str, *says: str) -> Row:
    """A mistake that raises a TypeError."""
    return Row(typed, TypeError, says)
