"""The command line of sharded.py: its flags, the bar while it trains, the table and the figure at the end."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib as mpl
import numpy as np
from flax import nnx
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from mnist_cli import AFTER, BEFORE, INK, LINE, Parser, UserError, number
from rich import progress
from rich.table import Table

import clipjax

BYTES = {"pred": 1, "bf16": 2, "f16": 2, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
DOTS: dict[str, Any] = {"linestyle": "none", "marker": ".", "markersize": 5, "markeredgewidth": 0}


class Record(NamedTuple):
    """What is kept of each update."""

    loss: Any  # of its last batch
    right: Any  # the share of that batch's sums that the model gets right
    before: Any  # the norm of the accumulated gradient
    after: Any  # the same after clipping
    clipped: Any  # the share of the updates so far that clipped the gradient
    projected: Any  # the share that projected weights
    violation: Any  # by how much weights were out of bounds before the update


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line, and fill in the defaults that depend on other flags."""
    count = number(int, 1, 10**9, "a whole number of at least 1")
    index = number(int, 0, 10**9, "a whole number of at least 0")
    positive = number(float, 1e-30, 1e30, "a number above 0")
    seed = number(int, 0, 2**32 - 1, "a whole number from 0 to 2**32 - 1")
    parser = Parser(
        prog="sharded.py",
        description="Train a small transformer that adds numbers, split over all devices, with its gradients "
        "and weights bounded.",
        allow_abbrev=False,
    )
    given = "(default: %(default)s)"
    where = parser.add_argument_group("devices").add_argument
    where(
        "--devices",
        type=count,
        metavar="N",
        help="virtual ones on a CPU, in each process (default: 8 in all)",
    )
    where(
        "--tensor",
        type=count,
        metavar="N",
        help="size of the tensor axis; the rest is data (default: 2 or 1)",
    )
    where("--coordinator", metavar="HOST:PORT", help="where process 0 is to be reached, or auto on a cluster")
    where("--processes", type=count, metavar="N", help="how many of them take part")
    where("--process-id", type=index, metavar="I", help="which of them this is, from 0")
    what = parser.add_argument_group("model and training").add_argument
    what("--width", type=count, default=64, metavar="N", help=f"features {given}")
    what("--heads", type=count, default=4, metavar="N", help=f"of attention {given}")
    what("--layers", type=count, default=2, metavar="N", help=f"blocks of the transformer {given}")
    what("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help=f"of the weights {given}")
    what("--rounding", choices=("stochastic", "nearest"), default="stochastic", help=f"of bfloat16 {given}")
    what("--updates", type=count, metavar="N", help="of the weights (default: 450)")
    what("--accumulate", type=count, default=2, metavar="N", help=f"batches for each update {given}")
    what("--batch-size", type=count, default=64, metavar="N", help=f"sums in a batch {given}")
    what("--learning-rate", type=positive, default=5e-3, metavar="X", help=f"largest step size {given}")
    what("--clip", type=positive, default=1.0, metavar="X", help=f"bound of the gradient's norm {given}")
    what("--radius", type=positive, default=1.25, metavar="X", help=f"bound of each unit's weights {given}")
    what("--seed", type=seed, default=0, metavar="N", help=f"of the weights and the batches {given}")
    what("--quick", action="store_true", help="20 updates, to see that it runs")
    to = parser.add_argument_group("files").add_argument
    to("--checkpoint", type=Path, metavar="DIR", help="save here, and go on from what is saved")
    to("--save-every", type=count, default=50, metavar="N", help=f"updates between two checkpoints {given}")
    to("--plot", type=Path, default=Path("out/sharded.png"), metavar="PATH", help=f"figure {given}")
    args = parser.parse_args(argv)
    args.updates = args.updates or (20 if args.quick else 450)
    several = args.coordinator not in (None, "auto")
    if several != (args.processes is not None) or several != (args.process_id is not None):
        raise UserError("--coordinator HOST:PORT, --processes and --process-id go together")
    if several and not re.fullmatch(r".+:\d+", args.coordinator):
        raise UserError(f"--coordinator: must be HOST:PORT or auto, got {args.coordinator!r}")
    if several and args.process_id >= args.processes:
        raise UserError(f"--process-id: must be below --processes {args.processes}, got {args.process_id}")
    args.devices = args.devices or max(1, 8 // (args.processes or 1))
    return args


@contextlib.contextmanager
def progress_bar(updates: int, done: int | None, shown: bool) -> Iterator[Callable[[np.ndarray, int], None]]:
    """Show a bar over updates; yields the function that moves it."""
    if done and shown:
        print(f"resumed at update {done} of {updates}")
    columns = progress.BarColumn(10), progress.TextColumn("{task.description}")
    with progress.Progress(*columns, disable=not shown) as bar:
        task = bar.add_task("starting", total=updates)

        def show(history: np.ndarray, since: int) -> None:
            mean, last = Record(*history[since:].mean(axis=0)), Record(*history[-1])
            text = f"{len(history)}/{updates}  loss {mean.loss:.4f}  right {mean.right:.1%}"
            text += f"  gradient {mean.before:.3f}  clipped {last.clipped:.1%}"
            bar.update(task, completed=len(history), description=text)

        yield show


def collectives(program: str) -> dict[str, tuple[int, int]]:
    """Count a compiled program's collectives, and the bytes of their results on each device, by kind."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    found: dict[str, tuple[int, int]] = {}
    # Of one that is asynchronous the result is that of its second half, "-done".
    for result, kind in re.findall(rf"^\s*(?:ROOT )?%?[\w.-]+ = (.+?) ({kinds})(?:-done)?\(", program, re.M):
        arrays = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", result)
        size = sum(
            BYTES.get(dtype, 8) * math.prod(int(n) for n in dims.split(",") if n) for dtype, dims in arrays
        )
        count, total = found.get(kind, (0, 0))
        found[kind] = count + 1, total + size
    return found


def unit_norms(params: nnx.State, axes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Measure the norm of each bounded unit by the path of its leaf, in NumPy and float64."""
    leaves = {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(params)}
    return {
        path: np.sqrt(np.square(np.asarray(leaf, np.float64)).sum(axis=axes[path])).ravel()
        for path, leaf in leaves.items()
        if axes[path] is not clipjax.SKIP
    }


def size(count: int) -> str:
    """Write a number of bytes."""
    return f"{count:,} bytes" if count < 10_000 else f"{count / 1000:,.1f} kB"


class Outcome(NamedTuple):
    """What a run ended with."""

    devices: str
    mesh: Mapping[str, int]
    history: np.ndarray
    params: nnx.State  # whole on each device
    norms: dict[str, np.ndarray]
    violations: Sequence[clipjax.Violation]
    loss: float  # of the sums that were held out, as is the next
    right: float
    step: Any  # the compiled step


def summary(outcome: Outcome, radius: float) -> Table:
    """Put what came out into a table."""
    leaves, last = jax.tree.leaves(outcome.params), Record(*outcome.history[-1])
    largest = max(norms.max() for norms in outcome.norms.values())
    memory = outcome.step.memory_analysis()
    table = Table(
        "sharded over", outcome.devices + ", " + " by ".join(f"{n} {a}" for a, n in outcome.mesh.items())
    )
    add = table.add_row
    add(
        "weights",
        f"{sum(x.size for x in leaves):,} in {len(leaves)} leaves, {size(sum(x.nbytes for x in leaves))}",
    )
    add("loss of unseen sums", f"{outcome.loss:.4f}")
    add("unseen sums that are right", f"{outcome.right:.1%}")
    add("updates that clipped the gradient", f"{last.clipped:.1%}")
    add("updates that projected weights", f"{last.projected:.1%}")
    add("largest norm of a unit", f"{largest:.9f} {'≤' if largest <= radius else '>'} {radius:g}")
    units = sum(norms.size for norms in outcome.norms.values())
    add("units out of bounds, by clipjax.verify", f"{len(outcome.violations)} of {units:,}")
    add("violation, by clipjax.metrics", f"{last.violation:g}")
    table.add_section()
    add("a step's state on each device", size(memory.argument_size_in_bytes))
    add("its temporaries", size(memory.temp_size_in_bytes))
    for kind, (count, total) in sorted(collectives(outcome.step.as_text()).items()):
        add(f"its {kind}s", f"{count}, {size(total)}")
    return table


def draw(path: Path, outcome: Outcome, clip: float, radius: float) -> None:
    """Draw the loss and the gradient over the updates, and the norms that the units ended with."""
    style = {"font.size": 12, "axes.titlesize": 12.5, "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(style):
        figure = Figure(figsize=(14, 4.8), dpi=110, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12)
        panels = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
        record = Record(*outcome.history.T)
        titles = (
            _draw_loss(panels[0], record, outcome.right),
            _draw_gradient(panels[1], record, clip),
            _draw_units(panels[2], outcome.norms, radius),
        )
        for axes, title in zip(panels, titles, strict=True):
            axes.grid(alpha=0.25)
            axes.set_title(title, loc="left", pad=31)
            # Above the axes, the legend covers no data.
            axes.legend(
                loc="lower left",
                bbox_to_anchor=(-0.03, 1),
                ncols=3,
                frameon=False,
                handlelength=1.4,
                markerscale=2,
            )
        figure.savefig(path)


def _draw_loss(axes: Any, record: Record, right: float) -> str:
    _over_updates(axes, len(record.loss), "cross-entropy of the answers")
    axes.plot(
        np.arange(1, 1 + len(record.loss)),
        record.loss,
        color=AFTER,
        label="last batch of each update",
        **DOTS,
    )
    return f"Loss: {right:.1%} of unseen sums are right"


def _draw_gradient(axes: Any, record: Record, clip: float) -> str:
    updates = np.arange(1, 1 + len(record.loss))
    _over_updates(axes, len(updates), "norm of the accumulated gradient")
    axes.plot(updates, record.before, color=BEFORE, label="before clipping", **DOTS)
    axes.plot(updates, record.after, color=AFTER, label="after", **DOTS)
    axes.axhline(clip, color=INK, label=f"bound {clip:g}", **LINE)
    return f"Gradient: clipped in {record.clipped[-1]:.1%} of the updates"


def _over_updates(axes: Any, updates: int, measure: str) -> None:
    axes.set(xlabel="update", ylabel=measure, yscale="log", xlim=(0, updates + 1))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")


def _draw_units(axes: Any, norms: dict[str, np.ndarray], radius: float) -> str:
    for i, each in enumerate(norms.values()):
        axes.plot(each, np.full(each.size, i), color=AFTER, alpha=0.35, label=None if i else "a unit", **DOTS)
    axes.axvline(radius, color=INK, label=f"radius {radius:g}", **LINE)
    short = [re.sub("s/|/(attention/)?(kernel|embedding)?", " ", path).strip() for path in norms]
    axes.set_yticks(range(len(short)), short, fontsize=9)
    axes.invert_yaxis()
    axes.set(xlabel="norm of a unit's weights")
    every = np.concatenate(list(norms.values()))
    beyond = np.sum(every > radius)
    return f"Weights: {beyond or 'none'} of {len(every):,} units beyond"
