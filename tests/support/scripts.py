"""Running the examples' scripts in this process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Ran(NamedTuple):
    status: int
    out: str
    err: str


def ran(main: Callable[[Sequence[str]], int], arguments: Sequence[object], capsys: Any) -> Ran:
    """The status of a script, and what it printed."""
    capsys.readouterr()
    try:
        status = main([*map(str, arguments)])
    except SystemExit as stopped:  # of tyro: help, or what is no command line
        status = stopped.code
    captured = capsys.readouterr()
    return Ran(status, captured.out, captured.err)


def refused(script: str, result: Ran) -> str:
    """What a script says that was stopped by the user's mistake: one line of its own, or a box of tyro's."""
    assert (result.status, result.out) == (2, "")
    box = re.sub(r"^[│|] ?| ?[│|]$", "", result.err, flags=re.MULTILINE)
    assert "Traceback" not in box
    if "For full helptext" not in box:
        assert re.fullmatch(rf"{re.escape(script)}: error: [^\n]+\n", result.err)
    return " ".join(box.split())
