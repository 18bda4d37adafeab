"""Define the command line of sharded.py: its flags, progress bar, final table and figure."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from command_line import Count, MaybeCount, MaybeIndex, Positive, Seed, UserError, figure
from flax import nnx
from matplotlib.ticker import LogLocator
from rich import progress
from rich.table import Table

import clipjax
from clipjax import plots

BYTES = {"pred": 1, "bf16": 2, "f16": 2, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}


class Record(NamedTuple):
    """The measurements of one update."""

    loss: Any  # of its last batch
    right: Any  # the fraction of that batch's sums that the model gets right
    before: Any  # the norm of the accumulated gradient
    after: Any  # the same after clipping
    clipped: Any  # the fraction of the updates so far that clipped the gradient
    projected: Any  # the fraction that projected weights
    violation: Any  # by how much weights were out of bounds before the update


@dataclass
class Settings:
    """Train a small transformer that adds numbers on all devices, with gradients and weights bounded."""

    devices: MaybeCount = None
    """virtual devices on a CPU, in each process; None: 8 in all"""
    tensor: MaybeCount = None
    """size of the tensor axis; the rest is data; None: 2, or 1 if the number of devices is odd"""
    coordinator: str | None = None
    """HOST:PORT of process 0, or auto on a cluster"""
    processes: MaybeCount = None
    """number of processes"""
    process_id: MaybeIndex = None
    """number of this process, from 0"""
    width: Count = 64
    """number of features"""
    heads: Count = 4
    """attention heads"""
    layers: Count = 2
    """blocks of the transformer"""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """type of the weights"""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """rounding of bfloat16 weights"""
    updates: MaybeCount = None
    """updates of the weights; None: 450"""
    accumulate: Count = 2
    """batches for each update"""
    batch_size: Count = 64
    """sums in a batch"""
    learning_rate: Positive = 5e-3
    """largest step size"""
    clip: Positive = 1.0
    """bound of the gradient's norm"""
    radius: Positive = 1.25
    """bound of each unit's weights"""
    seed: Seed = 0
    """seed of the weights and the batches"""
    quick: bool = False
    """20 updates, to check that it runs"""
    checkpoint: Path | None = None
    """save checkpoints here, and continue from the latest"""
    save_every: Count = 50
    """updates between two checkpoints"""
    plot: Path = Path("out/sharded.png")
    """figure"""

    def __post_init__(self) -> None:
        """Fill in the defaults that depend on other flags, and check that the flags fit together."""
        if self.updates is None:
            self.updates = 20 if self.quick else 450
        several = self.coordinator not in (None, "auto")
        if several != (self.processes is not None) or several != (self.process_id is not None):
            raise UserError("--coordinator HOST:PORT, --processes and --process-id go together")
        if several and not re.fullmatch(r".+:\d+", self.coordinator):
            raise UserError(f"--coordinator: must be HOST:PORT or auto, got {self.coordinator!r}")
        if several and self.process_id >= self.processes:
            raise UserError(
                f"--process-id: must be below --processes {self.processes}, got {self.process_id}"
            )
        if self.devices is None:
            self.devices = max(1, 8 // (self.processes or 1))


@contextlib.contextmanager
def progress_bar(updates: int, done: int | None, shown: bool) -> Iterator[Callable[[np.ndarray, int], None]]:
    """Show a progress bar over updates, and yield the function that updates it."""
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
    # The result of an asynchronous collective is that of its second half, "-done".
    for result, kind in re.findall(rf"^\s*(?:ROOT )?%?[\w.-]+ = (.+?) ({kinds})(?:-done)?\(", program, re.M):
        arrays = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", result)
        size = sum(
            BYTES.get(dtype, 8) * math.prod(int(n) for n in dims.split(",") if n) for dtype, dims in arrays
        )
        count, total = found.get(kind, (0, 0))
        found[kind] = count + 1, total + size
    return found


def unit_norms(params: nnx.State, axes: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Measure the norms of the bounded units of each leaf, in NumPy and float64, by path."""
    leaves = {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(params)}
    return {
        path: np.sqrt(np.square(np.asarray(leaf, np.float64)).sum(axis=axes[path])).ravel()
        for path, leaf in leaves.items()
        if axes[path] is not clipjax.SKIP
    }


def size(count: int) -> str:
    """Format a number of bytes."""
    return f"{count:,} bytes" if count < 10_000 else f"{count / 1000:,.1f} kB"


class Outcome(NamedTuple):
    """The results of a run."""

    devices: str
    mesh: Mapping[str, int]
    history: np.ndarray
    params: nnx.State  # whole on each device
    norms: dict[str, np.ndarray]
    violations: Sequence[clipjax.Violation]
    loss: float  # of the held-out sums, like `right`
    right: float
    step: Any  # the compiled step


def summary(outcome: Outcome, radius: float) -> Table:
    """Put the results into a table."""
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


def draw(path: Path, outcome: Outcome, clip: float, project: clipjax.Projection) -> None:
    """Draw the loss and the gradient over the updates, and the final norms of the units."""
    with figure(path, 16, 5.4) as drawn:
        left, middle, right = drawn.subplots(1, 3, width_ratios=(1, 1, 1.1))
        record = Record(*outcome.history.T)
        left.plot(
            1 + np.arange(len(record.loss)),
            record.loss,
            ".",
            color="#0072b2",
            markersize=5,
            markeredgewidth=0,
        )
        left.set(xlabel="update", ylabel="cross-entropy of the answers", yscale="log")
        left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        left.yaxis.set_major_formatter("{x:g}")
        left.yaxis.set_minor_formatter("")
        left.grid(alpha=0.25)
        left.spines[["top", "right"]].set_visible(False)
        left.set_title(f"Loss: {outcome.right:.1%} of unseen sums are right", loc="left")
        middle.set_title(f"Gradient: clipped in {record.clipped[-1]:.1%} of the updates", loc="left")
        plots.norms(record.before, after=record.after, bound=clip, ax=middle)
        middle.set(xlabel="update", ylabel="norm of the accumulated gradient")
        right.set_title(f"Weights: {len(outcome.violations) or 'no'} units beyond the radius", loc="left")
        plots.unit_norms(outcome.params, project, ax=right)
