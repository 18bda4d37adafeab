"""Define the command line of mnist.py: its flags, progress bar, final table and figure."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from command_line import Count, MaybeCount, MaybePositive, Positive, Seed, figure
from rich import progress
from rich.table import Table

import clipjax
from clipjax import plots

LEARNING_RATES = {"value": 1.0, "global-norm": 3e-3, "max-norm": 0.1, "both": 3e-3}


@dataclass
class Settings:
    """Train a small network on handwritten digits with its gradients and weights bounded."""

    method: Literal["value", "global-norm", "max-norm", "both"] = "both"
    """value: clip the gradient's entries, with SGD; global-norm: clip its norm, with Adam; max-norm: keep the
    weights of each unit within a radius, with momentum; both: global norm and radius, with Adam"""
    data: Path | None = None
    """MNIST's IDX files, gzipped or not; None: small digits"""
    epochs: MaybeCount = None
    """passes over the training set; None: 30"""
    batch_size: Count = 32
    """images per step"""
    learning_rate: MaybePositive = None
    """step size; None: 1 for value, 0.1 for max-norm, else 0.003"""
    clip: Positive = 1.0
    """bound of the gradient; not used by max-norm"""
    radius: Positive = 1.5
    """bound of each unit's weights; used by max-norm and both"""
    hidden: tuple[Count, ...] = (300, 100)
    """widths of the hidden layers"""
    batch_norm: bool = False
    """normalize each hidden layer over the batch"""
    seed: Seed = 0
    """seed of the weights and the order"""
    checkpoint: Path | None = None
    """save checkpoints here, and continue from the latest"""
    save_every: MaybeCount = None
    """steps between two checkpoints; None: one epoch"""
    plot: Path = Path("out/mnist.png")
    """figure"""
    quick: bool = False
    """3 epochs, to check that it runs"""

    def __post_init__(self) -> None:
        """Fill in the defaults that depend on other flags."""
        if self.epochs is None:
            self.epochs = 3 if self.quick else 30
        if self.learning_rate is None:
            self.learning_rate = LEARNING_RATES[self.method]


class Record(NamedTuple):
    """The measurements of one step."""

    loss: Any
    accuracy: Any
    before: Any  # the norm of the gradient, or its largest entry with `--method value`
    after: Any  # the same after clipping


@contextlib.contextmanager
def progress_bar(epochs: int) -> Iterator[Callable[[float, np.ndarray, Any], None]]:
    """Show a progress bar over epochs, and yield the function that updates it."""
    with progress.Progress(progress.BarColumn(16), progress.TextColumn("{task.description}")) as bar:
        task = bar.add_task("starting", total=epochs)

        def show(epoch: float, rows: np.ndarray, opt_state: Any) -> None:
            mean = Record(*rows.mean(axis=0))
            text = f"{math.ceil(epoch)}/{epochs}  loss {mean.loss:.4f}  accuracy {mean.accuracy:.3f}"
            text += f"  gradient {mean.before:.3f}  clipped {percent(share(opt_state, 'clip'))}"
            bar.update(task, completed=epoch, description=text)

        yield show


def share(opt_state: Any, transformation: str) -> float | None:
    """Read the fraction of steps in which a clip (`"clip"`) or a projection (`"max_norm"`) acted."""
    for name, value in clipjax.metrics(opt_state).items():
        if name.startswith(transformation) and name.endswith("/clipped_fraction"):
            return float(value)
    return None


def percent(part: float | None) -> str:
    """Format a fraction of the steps."""
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
    """Put the results into a table; `train` and `test` are pairs of loss and accuracy."""
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
    path: Path,
    method: str,
    record: Record,
    clip: float | None,
    params: Any,
    projection: clipjax.Projection | None,
) -> None:
    """Draw the gradient over the steps, and the final norms of the units; None means no bound."""
    with figure(path, 12.5, 4.4) as drawn:
        left, right = drawn.subplots(1, 2, width_ratios=(1.1, 1))
        measure = "largest entry" if method == "value" else "norm"
        after = None if clip is None else record.after
        if clip is None:
            left.set_title("Gradients: not clipped by this method", loc="left")
        else:
            share = np.mean(record.after < record.before)
            left.set_title(f"Gradients: clipped in {share:.1%} of the steps", loc="left")
        if projection is None:
            right.set_title("Weights: this method has no radius", loc="left")
        else:
            beyond = len(clipjax.verify(params, projection))
            right.set_title(f"Weights: {beyond or 'no'} units beyond the radius", loc="left")
        plots.norms(record.before, after=after, bound=clip, ax=left)
        left.set_ylabel(f"{measure} of the gradient")
        plots.unit_norms(params, projection, ax=right)
        right.set_xlabel("norm of a unit's incoming weights")
