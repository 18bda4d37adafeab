"""What the texts of errors share."""

from collections.abc import Sequence
from typing import Any

_LONGEST = 80


def short_repr(value: Any) -> str:
    """Return the repr of a value on one line, cut to what an error message can hold."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def a_few(names: Sequence[Any], count: int = 20) -> str:
    """List the first names, and say how many more there are."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(map(str, names[:count])) + more


def traced_error(name: str, value: Any) -> TypeError:
    """Return the error for a traced number on which the program itself depends."""
    return TypeError(
        f"{name} must be known before compiling: pass a Python value; with "
        "optax.inject_hyperparams, name it in static_args; got "
        f"{short_repr(value)}"
    )
