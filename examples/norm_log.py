"""Choose a threshold from the gradient norms of a run: a table, and a figure.

The script reads a file that `clipjax.NormLog.save` wrote, as examples/spikes.py does.

    python examples/spikes.py
    python examples/norm_log.py out/spikes.npz --thresholds 0.5 1 2
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import command_line
import tyro
from command_line import UserError, Within, check_plot

import clipjax

Threshold = Annotated[float, Within(0, 1e300, "a number of at least 0")]


@dataclass
class Settings:
    """Choose a threshold from the norms of a run."""

    log: tyro.conf.Positional[Path]
    """a saved clipjax.NormLog, such as out/spikes.npz"""
    thresholds: tuple[Threshold, ...] = ()
    """constants to try"""
    plot: Path = Path("out/norm_log.png")
    """figure"""


def run(args: Settings) -> None:
    """Show the log's table and figure."""
    check_plot(args.plot)
    log = clipjax.NormLog.load(args.log)
    if len(log) == log.nonfinite_count:
        raise UserError(f"log: {args.log} has no finite norm")
    print(log)
    if args.thresholds:
        print()
    for threshold, rate in zip(args.thresholds, log.clip_rate(args.thresholds), strict=True):
        print(f"a constant of {threshold:g} would clip {rate:.1%} of the steps")
    log.plot(args.plot)
    print(f"\nfigure: {args.plot}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script and return its exit status."""
    return command_line.main("norm_log.py", Settings, run, argv, ValueError)


if __name__ == "__main__":
    sys.exit(main())
