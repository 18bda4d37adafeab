"""Choose a threshold from the gradient norms of a run: a table, and a figure.

Reads what `clipjax.NormLog.save` wrote, as examples/spikes.py does.

    python examples/spikes.py
    python examples/norm_log.py out/spikes.npz --thresholds 0.5 1 2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mnist_cli import Parser, UserError, check_plot, number

import clipjax


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    positive = number(float, 0, 1e300, "a number of at least 0")
    parser = Parser(
        prog="norm_log.py", description="Choose a threshold from the norms of a run.", allow_abbrev=False
    )
    add = parser.add_argument
    add("log", type=Path, metavar="PATH", help="a saved clipjax.NormLog, as out/spikes.npz")
    add("--thresholds", type=positive, nargs="+", default=[], metavar="X", help="constants to try")
    add(
        "--plot",
        type=Path,
        default=Path("out/norm_log.png"),
        metavar="PATH",
        help="figure (default: %(default)s)",
    )
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    """Show what the log says."""
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
    """Run the script; returns its exit status."""
    try:
        run(parse(argv))
    except (UserError, OSError, ValueError) as error:
        print(f"norm_log.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
