"""What a mutant is."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A change of one line in the library, which somebody could make by mistake."""

    name: str
    file: str  # in `clipjax/`
    old: str  # occurs once in the file
    new: str
    tests: str  # pytest's arguments, separated by spaces: the tests that should fail, the likeliest first
    equivalent: str = ""  # why it changes nothing that a test could see, if it survives for that reason
