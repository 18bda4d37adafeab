"""Bound the incoming weights of every unit of a network whose layers are of many kinds.

`clipjax.flax.unit_axes` asks the model which weights go into one unit: a filter of a convolution, grouped
or not, of a local one the filter of one place, one component of one head of attention. `clipjax.max_norm`
keeps each of these within a radius, and `clipjax.verify` looks for one that is beyond. The network is
trained twice on the digits that come with scikit-learn, with the bound and without.

    python examples/constraints.py
    python examples/constraints.py --radius 0.5 --plot out/tight.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from mnist_cli import AFTER, BEFORE, INK, LINE, Parser, UserError, check_plot, number
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import clipjax
from clipjax.flax import unit_axes

BATCH = 64
ORDER = ["convolution", "grouped", "query", "key", "value", "out", "local", "dense"]


class Data(NamedTuple):
    """Images as float32 `(n, 8, 8, 1)` in [0, 1], labels as int32 `(n,)`."""

    train_x: jax.Array
    train_y: jax.Array
    test_x: jax.Array
    test_y: jax.Array


class Network(nn.Module):
    """Convolutions, plain, grouped and local, with attention between them."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map images `(batch, 8, 8, 1)` to logits `(batch, 10)`."""
        x = nn.relu(nn.Conv(16, (3, 3), name="convolution")(x))
        x = nn.relu(nn.Conv(32, (3, 3), strides=2, feature_group_count=4, name="grouped")(x))
        places = x.reshape(x.shape[0], -1, x.shape[-1])
        places += nn.MultiHeadDotProductAttention(num_heads=4, name="attention")(places)
        x = nn.relu(nn.ConvLocal(16, (2, 2), strides=(2, 2), name="local")(places.reshape(x.shape)))
        return nn.Dense(10, name="dense")(x.reshape(x.shape[0], -1))


def load_data() -> Data:
    """Read the digits, the same split for every seed."""
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        images / 16, labels, test_size=0.2, stratify=labels, random_state=0
    )
    train_x, test_x = (jnp.asarray(x, jnp.float32).reshape(-1, 8, 8, 1) for x in (train_x, test_x))
    return Data(train_x, jnp.asarray(train_y, jnp.int32), test_x, jnp.asarray(test_y, jnp.int32))


def train(tx: optax.GradientTransformation, data: Data, epochs: int, seed: int, label: str) -> Any:
    """Train, and return the parameters."""
    network = Network()
    key = jax.random.key(seed)

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = network.apply({"params": params}, data.train_x[batch])
        return optax.softmax_cross_entropy_with_integer_labels(logits, data.train_y[batch]).mean()

    def step(carry: Any, batch: jax.Array) -> tuple[Any, None]:
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def epoch(carry: Any, key: jax.Array) -> Any:
        order = jax.random.permutation(key, len(data.train_y))
        batches = order[: len(order) // BATCH * BATCH].reshape(-1, BATCH)
        return jax.lax.scan(step, carry, batches)[0]

    params = jax.jit(network.init)(key, data.train_x[:1])["params"]
    carry = params, tx.init(params)
    for i in track(range(epochs), label):
        carry = epoch(carry, jax.random.fold_in(key, i))
    return carry[0]


def accuracy(params: Any, data: Data) -> float:
    """The share of the test images that are read correctly."""
    logits = jax.jit(Network().apply)({"params": params}, data.test_x)
    return float(np.mean(np.argmax(logits, axis=1) == data.test_y))


def kernels_of(params: Any, axes: dict[str, Any]) -> dict[str, Any]:
    """The parameters that are bounded, by path, in the order of the network."""
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
    bounded = [path for path in leaves if axes[path] is not clipjax.SKIP]
    return {path: leaves[path] for path in sorted(bounded, key=lambda path: ORDER.index(name_of(path)))}


def name_of(path: str) -> str:
    """The name of a layer, from the path of its kernel."""
    return path.removesuffix("/kernel").removeprefix("attention/")


def norms_of(params: Any, axes: dict[str, Any]) -> dict[str, np.ndarray]:
    """Measure the norm of each unit in NumPy and float64, by path."""
    found = {}
    for path, leaf in kernels_of(params, axes).items():
        squares = np.square(np.asarray(leaf, np.float64))
        found[path] = np.sqrt(squares.sum(axis=axes[path])).ravel()
    return found


def table(params: Any, axes: dict[str, Any], radius: float) -> Table:
    """Put the layers into a table."""
    norms = norms_of(params, axes)
    shown = Table("layer", "kernel", "axes", "units", "at radius", "largest norm")
    for path, leaf in kernels_of(params, axes).items():
        each = norms[path]
        reached = int(np.sum(each > radius * (1 - 1e-6)))
        shown.add_row(
            *map(str, (name_of(path), leaf.shape, axes[path], each.size, reached, f"{each.max():.9f}"))
        )
    return shown


def draw(path: Path, free: dict[str, np.ndarray], bounded: dict[str, np.ndarray], radius: float) -> None:
    """Draw how the norms of the units are distributed in each layer, with the bound and without."""
    style = {"font.size": 11, "axes.titlesize": 11.5, "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(style):
        figure = Figure(figsize=(11, 5.6), dpi=120, layout="constrained")
        panels = figure.subplots(2, 4, sharex=True).ravel()
        largest = max(norms.max() for norms in (*free.values(), *bounded.values()))
        # The radius is the edge of a bin: what is at it is left of it.
        bins = radius * np.arange(0, np.ceil(20 * largest / radius) + 1) / 20
        for panel, (layer, norms) in zip(panels, bounded.items(), strict=True):
            panel.hist(free[layer], bins, color=BEFORE, alpha=0.55, label="without the bound")
            panel.hist(norms, bins, color=AFTER, alpha=0.85, label="with it")
            panel.axvline(radius, color=INK, label=f"radius {radius:g}", **LINE)
            panel.yaxis.set_major_locator(MaxNLocator(5, integer=True))
            beyond = np.sum(norms > radius)
            panel.set_title(f"{name_of(layer)}\n{norms.size} units, {beyond or 'none'} beyond", loc="left")
        figure.supxlabel("norm of a unit's incoming weights", fontsize="medium")
        figure.supylabel("units", fontsize="medium")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=3, frameon=False)
        figure.savefig(path)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(
        prog="constraints.py",
        description="Bound the incoming weights of every unit of a network whose layers are of many kinds.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    positive = number(float, 1e-30, 1e30, "a number above 0")
    count = number(int, 1, 10**9, "a whole number of at least 1")
    seed = number(int, 0, 2**32 - 1, "a whole number from 0 to 2**32 - 1")
    add("--radius", type=positive, default=1.2, metavar="X", help="bound of each unit (default: %(default)s)")
    add("--epochs", type=count, metavar="N", help="passes over the training set (default: 30)")
    add("--seed", type=seed, default=0, metavar="N", help="of weights and order (default: %(default)s)")
    add(
        "--plot",
        type=Path,
        default=Path("out/constraints.png"),
        metavar="PATH",
        help="figure (default: %(default)s)",
    )
    add("--quick", action="store_true", help="2 epochs, to see that it runs")
    args = parser.parse_args(argv)
    args.epochs = args.epochs or (2 if args.quick else 30)
    return args


def run(args: argparse.Namespace) -> None:
    """Train twice, and show the table and the figure."""
    check_plot(args.plot)
    data = load_data()
    image = jax.ShapeDtypeStruct((1, 8, 8, 1), jnp.float32)
    axes = unit_axes(Network(), jax.random.key(0), image)
    projection = clipjax.max_norm(args.radius, axes=axes)

    free = train(optax.adam(3e-3), data, args.epochs, args.seed, "without the bound")
    bounded = train(
        clipjax.chain(optax.adam(3e-3), projection), data, args.epochs, args.seed, "with the bound   "
    )
    counts = [len(clipjax.verify(params, projection)) for params in (free, bounded)]
    scores = [accuracy(params, data) for params in (free, bounded)]
    console = Console()
    console.print(table(bounded, axes, args.radius))
    console.print(f"test accuracy: {scores[0]:.2%} without the bound, {scores[1]:.2%} with it")
    console.print(f"units beyond the radius: {counts[0]} without the bound, {counts[1]} with it")
    draw(args.plot, norms_of(free, axes), norms_of(bounded, axes), args.radius)
    print(f"figure: {args.plot}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; returns its exit status."""
    try:
        run(parse(argv))
    except (UserError, OSError) as error:
        print(f"constraints.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
