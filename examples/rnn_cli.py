"""The command line of rnn.py: its flags, the bar while it trains, the table and the figure at the end."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from mnist_cli import AFTER, BEFORE, INK, LINE, Parser, number
from rich import progress
from rich.table import Table

METHODS = {"none": "nothing", "global": "global norm", "step": "each time step"}  # what is clipped
COLORS = {"none": BEFORE, "global": AFTER, "step": "#8ed1b5"}


class Outcome(NamedTuple):
    """What became of one method on one length, for all seeds."""

    method: str
    length: int
    solved: np.ndarray  # (seeds,) the step at which a seed had learnt; 0 if it never had
    before: np.ndarray  # (seeds, steps) the norm of the gradient
    after: np.ndarray  # the same after the clip of the optimizer's chain


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line, and fill in the defaults that depend on other flags."""
    count = number(int, 1, 10**9, "a whole number of at least 1")
    length = number(int, 10, 10**4, "a whole number of at least 10")
    positive = number(float, 1e-30, 1e30, "a number above 0")
    parser = Parser(
        prog="rnn.py",
        description="Train a recurrent network on long sequences, with its gradients clipped and without.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--lengths",
        type=length,
        nargs="+",
        metavar="N",
        help="of the sequences (default: 10 30)",
    )
    add("--seeds", type=count, metavar="N", help="networks trained side by side (default: 4; full: 8)")
    add("--steps", type=count, metavar="N", help="at most, by 250 (default: 3000; full: 20000)")
    add("--clip", type=positive, default=1.0, metavar="X", help="bound of the global norm (default: 1)")
    add(
        "--step-clip",
        type=positive,
        default=0.01,
        metavar="X",
        help="bound at each time step (default: %(default)s)",
    )
    add(
        "--learning-rate",
        type=positive,
        default=0.1,
        metavar="X",
        help="step size of SGD (default: %(default)s)",
    )
    add(
        "--plot",
        type=Path,
        default=Path("out/rnn.png"),
        metavar="PATH",
        help="figure (default: %(default)s)",
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--quick", action="store_true", help="one short length, to see that it runs")
    modes.add_argument("--full", action="store_true", help="what docs/published-results.md has; minutes")
    args = parser.parse_args(argv)
    lengths, seeds, steps = [10, 30], 4, 3000
    if args.quick:
        lengths, seeds, steps = [20], 2, 500
    if args.full:
        lengths, seeds, steps = [20, 30], 8, 20_000
    args.lengths = sorted(set(args.lengths or lengths))
    args.seeds, args.steps = args.seeds or seeds, args.steps or steps
    return args


@contextlib.contextmanager
def progress_bar(runs: int, steps: int) -> Iterator[Callable[[str, int], Callable[..., None]]]:
    """Show a bar over all runs.

    Yields:
      A function of a method and a length that begins a run, and returns the function that moves the bar.
    """
    with progress.Progress(progress.BarColumn(16), progress.TextColumn("{task.description}")) as bar:
        task = bar.add_task("starting", total=runs * steps)
        begun = iter(range(runs))

        def begin(method: str, length: int) -> Callable[[int, np.ndarray, float], None]:
            past = next(begun) * steps
            what = f"length {length}, clipping {METHODS[method]}: "
            bar.update(task, completed=past, description=f"{what}compiling")

            def show(step: int, solved: np.ndarray, norm: float) -> None:
                text = f"{step}/{steps}  learnt {learnt(solved)}  largest gradient {norm:.3g}"
                bar.update(task, completed=past + step, description=what + text)

            return show

        yield begin
        bar.update(task, completed=runs * steps, description="done")


def learnt(solved: np.ndarray) -> str:
    """Write how many of the seeds have learnt."""
    return f"{np.count_nonzero(solved)}/{len(solved)}"


def table(outcomes: Sequence[Outcome], steps: int) -> Table:
    """Put what came out into a table."""
    shown = Table("length", "clipped", "learnt", "steps until then", "largest gradient")
    for outcome in outcomes:
        when = sorted(int(step) for step in outcome.solved if step)
        until = " to ".join(map(str, sorted({when[0], when[-1]}))) if when else f"not in {steps}"
        largest = outcome.before.max()
        shown.add_row(
            str(outcome.length), METHODS[outcome.method], learnt(outcome.solved), until, f"{largest:.3g}"
        )
    return shown


def draw(path: Path, outcomes: Sequence[Outcome], clip: float) -> None:
    """Draw the gradient of the first seed over the steps, and how many seeds learnt each length."""
    style = {"font.size": 12, "axes.titlesize": 12.5, "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(style):
        figure = Figure(figsize=(13, 4.2), dpi=110, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12)
        plain, clipped, right = figure.subplots(1, 3)
        longest = max(outcome.length for outcome in outcomes)
        found = {outcome.method: outcome for outcome in outcomes if outcome.length == longest}
        titles = [
            _draw_gradient(plain, found["none"], None),
            _draw_gradient(clipped, found["global"], clip),
            _draw_learnt(right, outcomes),
        ]
        clipped.sharey(plain)
        clipped.set_ylabel("")
        plain.set_xlim(clipped.get_xlim())  # it may have been trained for longer, in vain
        for axes, title in zip((plain, clipped, right), titles, strict=True):
            axes.set_title(title, loc="left", pad=31)
            axes.legend(
                loc="lower left",
                bbox_to_anchor=(-0.03, 1),
                ncols=4,
                frameon=False,
                columnspacing=1,
                handlelength=1.2,
                handletextpad=0.5,
                markerscale=2,
            )
        figure.savefig(path)


def _draw_gradient(axes: Any, outcome: Outcome, clip: float | None) -> str:
    before, after, solved = outcome.before[0], outcome.after[0], outcome.solved[0]
    steps = np.arange(1, len(before) + 1)
    dots = {"linestyle": "none", "marker": ".", "markersize": 4, "markeredgewidth": 0}
    axes.set(xlabel=f"step, sequences of {outcome.length}", ylabel="norm of the gradient")
    axes.set(yscale="log", xlim=(0, len(steps) + 1))
    axes.grid(alpha=0.25)
    end = f"learnt in {solved:,} steps" if solved else "not learnt"
    if clip is None:
        axes.plot(steps, before, color=BEFORE, label="each step", **dots)
        return f"Nothing clipped: {end}"
    axes.plot(steps, before, color=BEFORE, label="before", **dots)
    axes.plot(steps, after, color=AFTER, label="after", **dots)
    axes.axhline(clip, color=INK, label=f"bound {clip:g}", **LINE)
    return f"Global norm clipped: {end}"


def _draw_learnt(axes: Any, outcomes: Sequence[Outcome]) -> str:
    lengths = sorted({outcome.length for outcome in outcomes})
    width = 0.8 / len(METHODS)
    for i, (method, label) in enumerate(METHODS.items()):
        found = [outcome for outcome in outcomes if outcome.method == method]
        places = [lengths.index(o.length) + (i - (len(METHODS) - 1) / 2) * width for o in found]
        shares = [np.mean(o.solved > 0) for o in found]
        bars = axes.bar(places, shares, 0.9 * width, color=COLORS[method], label=label)
        axes.bar_label(bars, [learnt(o.solved) for o in found], padding=2, fontsize=10.5)
    axes.set(xlabel="length of the sequences", xticks=range(len(lengths)), xticklabels=lengths, ylim=(0, 1.1))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return "Share that learnt, by what is clipped"
