"""The command line of mnist.py: its flags, the bar while it trains, the table and the figure at the end."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from rich import progress
from rich.table import Table

import clipjax

LEARNING_RATES = {"value": 1.0, "global-norm": 3e-3, "max-norm": 0.1, "both": 3e-3}
BEFORE, AFTER, INK = "#e4572e", "#22577a", "#1d1d1f"
LINE: dict[str, Any] = {"linestyle": (0, (5, 3)), "linewidth": 1.3}


class UserError(Exception):
    """What the user can put right: shown in one line, without a traceback."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are raised, to be shown in one line like all others."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the arguments."""
        raise UserError(message)


def number(kind: Callable[[str], float], low: float, high: float, what: str) -> Callable[[str], float]:
    """Make the converter of a flag's text into a number from `low` to `high`."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
        return value

    return convert


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line, and fill in the defaults that depend on other flags."""
    count = number(int, 1, 10**9, "a whole number of at least 1")
    positive = number(float, 1e-30, 1e30, "a number above 0")
    seed = number(int, 0, 2**32 - 1, "a whole number from 0 to 2**32 - 1")
    parser = Parser(
        prog="mnist.py",
        description="Train a small network on handwritten digits with its gradients and weights bounded.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--method",
        choices=LEARNING_RATES,
        default="both",
        help="value: clip the gradient's entries, SGD; global-norm: clip its norm, Adam; max-norm: keep the "
        "weights of each unit within a radius, momentum; both: global norm and radius, Adam (default)",
    )
    add("--data", type=Path, metavar="DIR", help="MNIST's IDX files, gzipped or not (default: small digits)")
    add("--epochs", type=count, metavar="N", help="passes over the training set (default: 30)")
    add("--batch-size", type=count, default=32, metavar="N", help="images per step (default: %(default)s)")
    add(
        "--learning-rate",
        type=positive,
        metavar="X",
        help="step size (default: 1 for value, 0.1 for max-norm, else 0.003)",
    )
    add(
        "--clip",
        type=positive,
        default=1.0,
        metavar="X",
        help="bound of the gradient; not for max-norm (default: %(default)s)",
    )
    add(
        "--radius",
        type=positive,
        default=1.5,
        metavar="X",
        help="bound of each unit's weights; for max-norm and both (default: %(default)s)",
    )
    add("--hidden", type=count, nargs="+", default=[300, 100], metavar="N", help="widths (default: 300 100)")
    add("--batch-norm", action="store_true", help="normalise each hidden layer over the batch")
    add(
        "--seed",
        type=seed,
        default=0,
        metavar="N",
        help="of the weights and the order (default: %(default)s)",
    )
    add("--checkpoint", type=Path, metavar="DIR", help="save here, and go on from what is saved")
    add("--save-every", type=count, metavar="N", help="steps between two checkpoints (default: one epoch)")
    add(
        "--plot",
        type=Path,
        default=Path("out/mnist.png"),
        metavar="PATH",
        help="figure (default: %(default)s)",
    )
    add("--quick", action="store_true", help="3 epochs, to see that it runs")
    args = parser.parse_args(argv)
    args.epochs = args.epochs or (3 if args.quick else 30)
    args.learning_rate = args.learning_rate or LEARNING_RATES[args.method]
    return args


def make_directory(flag: str, directory: Path) -> None:
    """Make a directory that may be there already."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UserError(f"{flag}: {directory} is not a directory") from error
    except OSError as error:
        raise UserError(f"{flag}: {directory} cannot be made: {error.strerror}") from error
    if not os.access(directory, os.W_OK):
        raise UserError(f"{flag}: {directory} cannot be written to")


def check_plot(path: Path) -> None:
    """Raise now what would otherwise be raised after the training."""
    if path.suffix != ".png":
        raise UserError(f"--plot: {path} must end in .png")
    make_directory("--plot", path.parent)
    if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
        raise UserError(f"--plot: {path} cannot be written")


class Record(NamedTuple):
    """What is kept of each step."""

    loss: Any
    accuracy: Any
    before: Any  # the norm of the gradient; with `--method value` its largest entry
    after: Any  # the same after clipping


@contextlib.contextmanager
def progress_bar(epochs: int) -> Iterator[Callable[[float, np.ndarray, Any], None]]:
    """Show a bar over epochs; yields the function that moves it."""
    with progress.Progress(progress.BarColumn(16), progress.TextColumn("{task.description}")) as bar:
        task = bar.add_task("starting", total=epochs)

        def show(epoch: float, rows: np.ndarray, opt_state: Any) -> None:
            mean = Record(*rows.mean(axis=0))
            text = f"{math.ceil(epoch)}/{epochs}  loss {mean.loss:.4f}  accuracy {mean.accuracy:.3f}"
            text += f"  gradient {mean.before:.3f}  clipped {percent(share(opt_state, 'clip'))}"
            bar.update(task, completed=epoch, description=text)

        yield show


def share(opt_state: Any, transformation: str) -> float | None:
    """Read in which share of the steps a clip (`"clip"`) or a projection (`"max_norm"`) acted."""
    for name, value in clipjax.metrics(opt_state).items():
        if name.startswith(transformation) and name.endswith("/clipped_fraction"):
            return float(value)
    return None


def percent(part: float | None) -> str:
    """Write a share of the steps."""
    return "-" if part is None else f"{part:.1%}"


def unitwise_norms(params: Any) -> dict[str, np.ndarray]:
    """Measure the norm of every unit's incoming weights, in float64 and without JAX."""
    return {
        name: np.linalg.norm(np.asarray(layer["kernel"], np.float64), axis=0)
        for name, layer in params.items()
        if "kernel" in layer
    }


def summary(
    method: str, params: Any, opt_state: Any, radius: float | None, train: Any, test: tuple[float, float]
) -> Table:
    """Put what came out into a table; `train` and `test` are pairs of loss and accuracy."""
    largest = max(norms.max() for norms in unitwise_norms(params).values())
    bound = "no radius" if radius is None else f"{'≤' if largest <= radius else '>'} {radius:g}"
    table = Table("method", method)
    table.add_row("train accuracy", f"{train[1]:.2%}")
    table.add_row("test accuracy", f"{test[1]:.2%}")
    table.add_row("test loss", f"{test[0]:.4f}")
    table.add_row("steps that clipped the gradient", percent(share(opt_state, "clip")))
    table.add_row("steps that projected weights", percent(share(opt_state, "max_norm")))
    table.add_row("largest norm of a unit", f"{largest:.9f} {bound}")
    return table


def draw(
    path: Path, method: str, record: Record, clip: float | None, params: Any, radius: float | None
) -> None:
    """Draw the gradient over the steps, and the norms that the units ended with; None: no bound."""
    style = {"font.size": 12, "axes.titlesize": 12.5, "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(style):
        figure = Figure(figsize=(11, 4.2), dpi=120, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12)
        left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
        measure = "largest entry" if method == "value" else "norm"
        titles = (
            _draw_gradient(left, measure, record, clip),
            _draw_units(right, unitwise_norms(params), radius),
        )
        # Above the axes, the legends cover no data, however many layers there are.
        rows = math.ceil(len(right.get_legend_handles_labels()[1]) / 4)
        for axes, title in zip((left, right), titles, strict=True):
            axes.set_title(title, loc="left", pad=11 + 20 * rows)
            axes.legend(
                loc="lower left",
                bbox_to_anchor=(-0.02, 1),
                ncols=4,
                frameon=False,
                columnspacing=1.2,
                handlelength=1.4,
                markerscale=2,
            )
        figure.savefig(path)


def _draw_gradient(axes: Any, measure: str, record: Record, clip: float | None) -> str:
    steps = np.arange(1, len(record.before) + 1)
    dots = {"linestyle": "none", "marker": ".", "markersize": 4.5, "markeredgewidth": 0}
    axes.set(xlabel="step", ylabel=f"{measure} of the gradient", yscale="log", xlim=(0, len(steps) + 1))
    axes.grid(alpha=0.25)
    if clip is None:
        axes.plot(steps, record.before, color=AFTER, label="each step", **dots)
        return "Gradients: not clipped by this method"
    axes.plot(steps, record.before, color=BEFORE, label="before clipping", **dots)
    axes.plot(steps, record.after, color=AFTER, label="after", **dots)
    axes.axhline(clip, color=INK, label=f"bound {clip:g}", **LINE)
    return f"Gradients: clipped in {np.mean(record.after < record.before):.1%} of the steps"


def _draw_units(axes: Any, norms: dict[str, np.ndarray], radius: float | None) -> str:
    colors = mpl.colormaps["YlGnBu"](np.linspace(0.35, 0.9, len(norms)))
    labels = [f"layer {i}" for i in range(1, 1 + len(norms))]
    axes.hist(list(norms.values()), bins=40, stacked=True, color=colors, label=labels)
    axes.set(xlabel="norm of a unit's incoming weights", ylabel="units")
    if radius is None:
        return "Weights: this method has no radius"
    axes.axvline(radius, color=INK, label=f"radius {radius:g}", **LINE)
    every = np.concatenate(list(norms.values()))
    reached, beyond = np.sum(every > radius * (1 - 1e-5)), np.sum(every > radius)
    return f"Weights: {reached} of {len(every)} units at the radius, {beyond or 'none'} beyond"
