"""The tests of peers that fail with ours on purpose, and why; `docs/outside.md` says the same."""

from __future__ import annotations

import fnmatch
from typing import NamedTuple


class Difference(NamedTuple):
    """Tests that differ for one reason."""

    runs: str  # a pattern, as `optax-*`
    tests: str  # patterns of `file::class::test parameters`, one a line
    why: str


DIFFERENCES: tuple[Difference, ...] = ()


def why(run: str, test: str) -> str | None:
    """The reason for which a test is expected to fail, or None."""
    for difference in DIFFERENCES:
        if fnmatch.fnmatchcase(run, difference.runs) and any(
            fnmatch.fnmatchcase(test, f"*{pattern.strip()}*") for pattern in difference.tests.splitlines()
        ):
            return difference.why
    return None
