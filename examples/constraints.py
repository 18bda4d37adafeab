"""Bound the incoming weights of every unit of a network whose layers are of many kinds.

`clipjax.flax.unit_axes` finds which weights form one unit: a filter of a convolution, grouped or not; the
filter of one place of a local convolution; one component of one attention head. `clipjax.max_norm` keeps
each of these units within a radius, and `clipjax.verify` looks for units beyond it. The network is trained
twice on the digits that come with scikit-learn, with the bound and without.

    python examples/constraints.py
    python examples/constraints.py --radius 0.5 --plot out/tight.png
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import command_line
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from command_line import MaybeCount, Positive, Seed, check_plot, figure
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import clipjax
from clipjax import plots
from clipjax.flax import unit_axes

BATCH = 64
ORDER = ["convolution", "grouped", "query", "key", "value", "out", "local", "dense"]


class Data(NamedTuple):
    """Images as float32 `(n, 8, 8, 1)` in [0, 1], and labels as int32 `(n,)`."""

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
    """Read the digits, with the same split for every seed."""
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
    """Return the fraction of the test images that are classified correctly."""
    logits = jax.jit(Network().apply)({"params": params}, data.test_x)
    return float(np.mean(np.argmax(logits, axis=1) == data.test_y))


def kernels_of(params: Any, axes: dict[str, Any]) -> dict[str, Any]:
    """Return the bounded parameters by path, in the order of the network."""
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
    bounded = [path for path in leaves if axes[path] is not clipjax.SKIP]
    return {path: leaves[path] for path in sorted(bounded, key=lambda path: ORDER.index(name_of(path)))}


def name_of(path: str) -> str:
    """Return the name of a layer, from the path of its kernel."""
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


def draw(path: Path, free: Any, bounded: Any, projection: clipjax.Projection) -> None:
    """Draw the norm of each unit, layer by layer, without the bound and with it."""
    with figure(path, 13, 5.4) as drawn:
        panels = drawn.subplots(1, 2, sharex=True)
        for panel, label, params in zip(panels, ("Without", "With"), (free, bounded), strict=True):
            beyond = len(clipjax.verify(params, projection))
            panel.set_title(f"{label} the bound: {beyond or 'no'} units beyond the radius", loc="left")
            plots.unit_norms(params, projection, ax=panel)
            panel.set_xlabel("norm of a unit's incoming weights")


@dataclass
class Settings:
    """Bound the incoming weights of every unit of a network whose layers are of many kinds."""

    radius: Positive = 1.2
    """bound of each unit"""
    epochs: MaybeCount = None
    """passes over the training set; None: 30"""
    seed: Seed = 0
    """seed of the weights and the order"""
    plot: Path = Path("out/constraints.png")
    """figure"""
    quick: bool = False
    """2 epochs, to check that it runs"""

    def __post_init__(self) -> None:
        """Fill in the default that depends on another flag."""
        if self.epochs is None:
            self.epochs = 2 if self.quick else 30


def run(args: Settings) -> None:
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
    draw(args.plot, free, bounded, projection)
    print(f"figure: {args.plot}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script and return its exit status."""
    return command_line.main("constraints.py", Settings, run, argv)


if __name__ == "__main__":
    sys.exit(main())
