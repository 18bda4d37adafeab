"""What is wrong with what came: nothing, or why a user would not understand it."""

from __future__ import annotations

import re
import traceback
from typing import Any

from tests.mistakes.row import Row

# What a user has not written and cannot know, and what hides the values.
INTERNAL = (
    "object has no attribute",
    "not subscriptable",
    "not supported between",
    "lambda",
    " at 0x",
    "=<function",
    "fan_in_of_matrices",
    "'seen'",
    " ''",
    "GradientTransformationExtraArgs(",
    "Traced<",
    "site-packages",
)
FOREIGN = re.compile(r"site-packages/(\w+)")


def faults(row: Row, came: Any) -> list[str]:
    """Why a row is silent or unclear; nothing if it is neither."""
    if not isinstance(came, Exception):
        return [f"silent: {came!r}"]
    message, found = str(came), []
    if type(came) is not row.error:
        found.append(f"a {type(came).__name__}, not a {row.error.__name__}")
    found += [f"does not say {words!r}" for words in row.says if words not in message]
    found += [f"says {words!r}" for words in INTERNAL if words in message]
    if private := re.search(r"'_\w*'|'\w+_'", message):  # an argument that is not public
        found.append(f"says {private[0]}")
    if len(message) > 600:
        found.append(f"{len(message)} characters long")
    if (longest := max(map(len, message.splitlines()), default=0)) > 250:
        found.append(f"has a line of {longest} characters")
    if raised_by := FOREIGN.search(traceback.extract_tb(came.__traceback__)[-1].filename):
        found.append(f"raised by {raised_by[1]}")
    return found
