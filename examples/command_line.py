"""Share helpers among the scripts: command lines that tyro builds from types, and output files."""

from __future__ import annotations

import contextlib
import os
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import matplotlib as mpl
import tyro
from matplotlib.figure import Figure

T = TypeVar("T")


class UserError(Exception):
    """An error that the user can fix: shown in one line, without a traceback."""


class Within(NamedTuple):
    """The range of a number on the command line."""

    low: float
    high: float
    what: str


_COUNT = Within(1, 10**9, "a whole number of at least 1")
_POSITIVE = Within(1e-30, 1e30, "a number above 0")

Count = Annotated[int, _COUNT]
MaybeCount = Annotated[int | None, _COUNT]
MaybeIndex = Annotated[int | None, Within(0, 10**9, "a whole number of at least 0")]
Positive = Annotated[float, _POSITIVE]
MaybePositive = Annotated[float | None, _POSITIVE]
Seed = Annotated[int, Within(0, 2**32 - 1, "a whole number from 0 to 2**32 - 1")]


def parse(settings: type[T], argv: Sequence[str] | None, prog: str | None = None) -> T:
    """Read the command line into a dataclass, whose fields are the flags.

    Raises:
      SystemExit: after `--help`, or if tyro cannot read a flag, in which case it prints why.
      UserError: a number is out of the range of its type.
    """
    args = tyro.cli(settings, args=argv, prog=prog, config=(tyro.conf.FlagCreatePairsOff,))
    for name, kind in typing.get_type_hints(settings, include_extras=True).items():
        _check(f"--{name.replace('_', '-')}", kind, getattr(args, name))
    return args


def _check(flag: str, kind: Any, value: Any) -> None:
    """Raise an error if the value of a flag, or one of its values, is out of range."""
    if isinstance(value, tuple):
        for each in value:
            _check(flag, typing.get_args(kind)[0], each)
        return
    for within in getattr(kind, "__metadata__", ()):
        if isinstance(within, Within) and value is not None and not within.low <= value <= within.high:
            raise UserError(f"{flag}: must be {within.what}, got {value!r}")


def main(
    prog: str,
    settings: type[T],
    run: Callable[[T], Any],
    argv: Sequence[str] | None,
    *errors: type[Exception],
) -> int:
    """Run a script and return its exit status. Errors that the user can fix are shown in one line."""
    try:
        run(parse(settings, argv, prog))
    except (UserError, OSError, *errors) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


def make_directory(flag: str, directory: Path) -> None:
    """Make a directory that may already exist."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UserError(f"{flag}: {directory} is not a directory") from error
    except OSError as error:
        raise UserError(f"{flag}: {directory} cannot be made: {error.strerror}") from error
    if not os.access(directory, os.W_OK):
        raise UserError(f"{flag}: {directory} cannot be written to")


def check_plot(path: Path) -> None:
    """Raise errors about the plot's path now rather than after the training."""
    if path.suffix != ".png":
        raise UserError(f"--plot: {path} must end in .png")
    make_directory("--plot", path.parent)
    if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
        raise UserError(f"--plot: {path} cannot be written")


@contextlib.contextmanager
def figure(path: Path, width: float, height: float, fontsize: float = 12) -> Iterator[Figure]:
    """Yield a figure of this width and height in inches, and write it at the end."""
    with mpl.rc_context({"font.size": fontsize, "axes.titlesize": fontsize + 0.5}):
        drawn = Figure(figsize=(width, height), dpi=110, layout="constrained")
        drawn.get_layout_engine().set(w_pad=0.12)
        yield drawn
        drawn.savefig(path)
