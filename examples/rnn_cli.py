"""Define the command line of rnn.py: its flags, progress bar, final table and figure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro
from command_line import MaybeCount, Positive, Within, figure
from matplotlib.ticker import PercentFormatter
from rich import progress
from rich.table import Table

from clipjax import plots

METHODS = {"none": "nothing", "global": "global norm", "step": "each time step"}  # what is clipped
COLORS = {"none": "#d55e00", "global": "#0072b2", "step": "#009e73"}
Length = Annotated[int, Within(10, 10**4, "a whole number of at least 10")]
Mode = tyro.conf.create_mutex_group(required=False, title="modes")


@dataclass
class Settings:
    """Train a recurrent network on long sequences, with its gradients clipped and without."""

    lengths: tuple[Length, ...] = ()
    """lengths of the sequences; by default 10 30"""
    seeds: MaybeCount = None
    """networks trained at once; None: 4, with --full 8"""
    steps: MaybeCount = None
    """most steps, rounded up to multiples of 250; None: 3000, with --full 20000"""
    clip: Positive = 1.0
    """bound of the global norm"""
    step_clip: Positive = 0.01
    """bound at each time step"""
    learning_rate: Positive = 0.1
    """step size of SGD"""
    plot: Path = Path("out/rnn.png")
    """figure"""
    quick: Annotated[bool, Mode] = False
    """one short length, to check that it runs"""
    full: Annotated[bool, Mode] = False
    """the runs of docs/published-results.md, which take minutes"""

    def __post_init__(self) -> None:
        """Fill in the defaults that depend on other flags."""
        lengths, seeds, steps = (10, 30), 4, 3000
        if self.quick:
            lengths, seeds, steps = (20,), 2, 500
        if self.full:
            lengths, seeds, steps = (20, 30), 8, 20_000
        self.lengths = tuple(sorted(set(self.lengths or lengths)))
        self.seeds = seeds if self.seeds is None else self.seeds
        self.steps = steps if self.steps is None else self.steps


class Outcome(NamedTuple):
    """The results of one method on one length, for all seeds."""

    method: str
    length: int
    solved: np.ndarray  # (seeds,) the step at which a seed had learned the task; 0 if it never did
    before: np.ndarray  # (seeds, steps) the norm of the gradient
    after: np.ndarray  # the same after the clip of the optimizer's chain


@contextlib.contextmanager
def progress_bar(runs: int, steps: int) -> Iterator[Callable[[str, int], Callable[..., None]]]:
    """Show a progress bar over all runs.

    Yields:
      A function of a method and a length that begins a run, and returns the function that updates the bar.
    """
    with progress.Progress(progress.BarColumn(16), progress.TextColumn("{task.description}")) as bar:
        task = bar.add_task("starting", total=runs * steps)
        begun = iter(range(runs))

        def begin(method: str, length: int) -> Callable[[int, np.ndarray, float], None]:
            past = next(begun) * steps
            what = f"length {length}, clipping {METHODS[method]}: "
            bar.update(task, completed=past, description=f"{what}compiling")

            def show(step: int, solved: np.ndarray, norm: float) -> None:
                text = f"{step}/{steps}  learned {learned(solved)}  largest gradient {norm:.3g}"
                bar.update(task, completed=past + step, description=what + text)

            return show

        yield begin
        bar.update(task, completed=runs * steps, description="done")


def learned(solved: np.ndarray) -> str:
    """Format how many of the seeds have learned the task."""
    return f"{np.count_nonzero(solved)}/{len(solved)}"


def table(outcomes: Sequence[Outcome], steps: int) -> Table:
    """Put the results into a table."""
    shown = Table("length", "clipped", "learned", "steps until then", "largest gradient")
    for outcome in outcomes:
        when = sorted(int(step) for step in outcome.solved if step)
        until = " to ".join(map(str, sorted({when[0], when[-1]}))) if when else f"not in {steps}"
        largest = outcome.before.max()
        shown.add_row(
            str(outcome.length), METHODS[outcome.method], learned(outcome.solved), until, f"{largest:.3g}"
        )
    return shown


def draw(path: Path, outcomes: Sequence[Outcome], clip: float) -> None:
    """Draw the gradient of the first seed over the steps, and how many seeds learned each length."""
    with figure(path, 14, 4.4) as drawn:
        plain, clipped, right = drawn.subplots(1, 3, width_ratios=(1, 1, 0.9))
        longest = max(outcome.length for outcome in outcomes)
        found = {outcome.method: outcome for outcome in outcomes if outcome.length == longest}
        none, bounded = found["none"], found["global"]
        plain.set_title(f"Nothing clipped: {_end(none)}", loc="left")
        clipped.set_title(f"Global norm clipped: {_end(bounded)}", loc="left")
        right.set_title("Networks that learned the task", loc="left")
        last = len(bounded.before[0])  # without the clip it may have trained longer without learning
        plots.norms(none.before[0, :last], ax=plain)
        plots.norms(bounded.before[0], after=bounded.after[0], bound=clip, ax=clipped)
        limits = np.transpose([plain.get_ylim(), clipped.get_ylim()])
        for panel in (plain, clipped):
            panel.set(ylim=(limits[0].min(), limits[1].max()), xlabel=f"step, sequences of {longest} symbols")
        _draw_learned(right, outcomes)


def _end(outcome: Outcome) -> str:
    solved = outcome.solved[0]
    return f"learned in {solved:,} steps" if solved else "not learned"


def _draw_learned(axes: Any, outcomes: Sequence[Outcome]) -> None:
    lengths = sorted({outcome.length for outcome in outcomes})
    width = 0.8 / len(METHODS)
    for i, (method, label) in enumerate(METHODS.items()):
        found = [outcome for outcome in outcomes if outcome.method == method]
        places = [lengths.index(o.length) + (i - (len(METHODS) - 1) / 2) * width for o in found]
        shares = [np.mean(o.solved > 0) for o in found]
        bars = axes.bar(places, shares, 0.9 * width, color=COLORS[method], label=label)
        axes.bar_label(bars, [learned(o.solved) for o in found], padding=2, fontsize="small")
    axes.set(xlabel="length of the sequences", xticks=range(len(lengths)), xticklabels=lengths, ylim=(0, 1.1))
    axes.set_ylabel("share of the networks")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        title="clipped:",
        alignment="left",
        loc="upper left",
        bbox_to_anchor=(1, 1),
        frameon=False,
        fontsize="small",
        title_fontsize="small",
    )
