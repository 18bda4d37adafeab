"""Clipping lets a recurrent network learn long dependencies (Pascanu 2013): `examples/rnn.py --full`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where the scripts are, which import each other

import rnn
import rnn_cli

from .row import Row

TITLE = "Clipping lets a recurrent network learn long dependencies"
SOURCE, ARXIV = "Pascanu et al. 2013", "1211.5063"


def measure() -> list[Row]:
    """Measure the result."""
    args = rnn_cli.Settings(full=True)
    outcomes = rnn.run(args)
    rows = []
    for length in args.lengths:
        solved = {o.method: o.solved for o in outcomes if o.length == length}
        counts = {method: int((steps > 0).sum()) for method, steps in solved.items()}
        shown = "; ".join(
            f"{rnn_cli.METHODS[method]}: {rnn_cli.learned(steps)}"
            + (f" by step {steps.max():,}" if steps.all() else "")
            for method, steps in solved.items()
        )
        rows.append(
            Row(
                f"temporal order, {length} symbols, {args.seeds} seeds, at most {args.steps:,} steps: "
                "networks learn with the gradient clipped, and not without",
                shown,
                "global norm at least 7/8, nothing at most 1/8",
                counts["global"] >= 7 and counts["none"] <= 1,
            )
        )
    return rows
