"""Train a small network on handwritten digits with its gradients and weights bounded.

A flag selects one of four methods: `value` clips each entry of the gradient before SGD; `global-norm`
clips the norm of the whole gradient before Adam; `max-norm` keeps the incoming weights of every unit
within a radius, with SGD with momentum and a decaying rate; `both` (the default) clips the global norm
and keeps the radius, with Adam. The script uses the digits that come with scikit-learn; `--data DIR`
reads MNIST's own files.

    python examples/mnist.py
    python examples/mnist.py --method max-norm --batch-norm --checkpoint out/run
"""

from __future__ import annotations

import contextlib
import functools
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import absl.logging
import command_line
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from command_line import UserError, check_plot, make_directory
from idx import IdxError, read_mnist
from mnist_cli import Record, Settings, draw, progress_bar, summary
from rich.console import Console
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import clipjax

CLIPS = {"value": "clip_by_value", "global-norm": "clip_by_global_norm", "both": "clip_by_global_norm"}
PROJECTS = ("max-norm", "both")
REPORT_EVERY = 50  # steps between two reports, each of which waits for the device


class Data(NamedTuple):
    """Pixels in [0, 1] as float32 `(n, pixels)`, and labels as int32 `(n,)`."""

    train_x: np.ndarray
    train_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


class State(NamedTuple):
    """Everything that a step changes."""

    params: Any
    stats: Any  # running statistics of batch normalization; empty without
    opt_state: Any


class Network(nn.Module):
    """Dense layers with Swish between them, and batch normalization on request."""

    hidden: Sequence[int]
    batch_norm: bool

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Map pixels `(batch, pixels)` to logits `(batch, 10)`."""
        for width in self.hidden:
            x = nn.Dense(width, use_bias=not self.batch_norm)(x)
            if self.batch_norm:
                x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.swish(x)
        return nn.Dense(10)(x)


def load_data(directory: Path | None) -> Data:
    """Read MNIST from `directory`, or the digits that come with scikit-learn if it is None."""
    if directory is None:
        images, labels = load_digits(return_X_y=True)
        # The split is the same for every seed, so that seeds can be compared.
        train_x, test_x, train_y, test_y = train_test_split(
            images / 16, labels, test_size=0.2, stratify=labels, random_state=0
        )
    else:
        train_x, train_y, test_x, test_y = read_mnist(directory)
        train_x, test_x = train_x / np.float32(255), test_x / np.float32(255)
    return Data(
        train_x.astype(np.float32),
        train_y.astype(np.int32),
        test_x.astype(np.float32),
        test_y.astype(np.int32),
    )


def make_optimizer(
    method: str, learning_rate: float, clip: float, radius: float, steps: int
) -> optax.GradientTransformation:
    """Bound an optimizer in one of the four ways."""
    if method == "value":
        return optax.chain(clipjax.clip_by_value(clip), optax.sgd(learning_rate))
    if method == "global-norm":
        return optax.chain(clipjax.clip_by_global_norm(clip), optax.adam(learning_rate))
    if method == "max-norm":
        decay = optax.polynomial_schedule(
            learning_rate, learning_rate / 10, power=0.9, transition_steps=steps
        )
        return optax.chain(optax.sgd(decay, momentum=0.9), clipjax.max_norm(radius))
    return clipjax.bounded(
        optax.adam(learning_rate),
        clip=clipjax.clip_by_global_norm(clip),
        project=clipjax.max_norm(radius),
        nonfinite="skip",
    )


def init_state(network: Network, tx: optax.GradientTransformation, pixels: int, seed: int) -> State:
    """Draw the initial parameters."""

    @jax.jit  # one compilation instead of dozens
    def init(key: jax.Array) -> State:
        variables = network.init(key, jnp.zeros((1, pixels)), train=False)
        params = variables["params"]
        return State(params, variables.get("batch_stats", {}), tx.init(params))

    return init(jax.random.key(seed))


def make_step(
    network: Network, tx: optax.GradientTransformation, method: str
) -> Callable[[State, np.ndarray, np.ndarray], tuple[State, Record]]:
    """Compile one training step."""

    def loss_of(params: Any, stats: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": stats}
        logits, changed = network.apply(variables, x, train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, (changed.get("batch_stats", {}), jnp.mean(logits.argmax(-1) == y))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, Record]:
        (loss, (stats, accuracy)), grads = jax.value_and_grad(loss_of, has_aux=True)(
            state.params, state.stats, x, y
        )
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        if method in CLIPS:
            seen = clipjax.metrics(opt_state)
            before, after = (seen[f"{CLIPS[method]}/{name}"] for name in ("norm", "norm_after"))
        else:
            before = after = clipjax.functional.global_norm(grads)
        return State(params, stats, opt_state), Record(loss, accuracy, before, after)

    return step


def batches(
    data: Data, size: int, seed: int, start: int, stop: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the batches of steps `start` to `stop`, which lie in the same epoch.

    Their order depends on the seed and the epoch alone, so that a resumed run sees the same batches.
    """
    epoch, first = divmod(start, len(data.train_y) // size)
    order = np.random.default_rng([seed, epoch]).permutation(len(data.train_y))
    for i in range(first, first + stop - start):
        rows = order[i * size : (i + 1) * size]
        yield data.train_x[rows], data.train_y[rows]


def evaluate(network: Network, state: State, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Measure loss and accuracy, with the running statistics of batch normalization."""
    variables = {"params": state.params, "batch_stats": state.stats}
    loss, accuracy = _loss_and_accuracy(network, variables, x, y)
    return float(loss), float(accuracy)


@functools.partial(jax.jit, static_argnums=0)
def _loss_and_accuracy(
    network: Network, variables: Any, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    logits = network.apply(variables, x, train=False)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, jnp.mean(logits.argmax(-1) == y)


def open_checkpoints(
    directory: Path | None, settings: dict[str, Any]
) -> contextlib.AbstractContextManager[ocp.CheckpointManager | None]:
    """Open a directory for the checkpoints of one run, and raise an error if it holds those of another."""
    if directory is None:
        return contextlib.nullcontext()
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    make_directory("--checkpoint", directory)
    manager = ocp.CheckpointManager(directory.resolve(), options=options)
    if manager.latest_step() is not None:
        saved = restore(manager, settings=ocp.args.JsonRestore())["settings"]
        for name, here in settings.items():
            if saved.get(name) != here:
                there = saved.get(name)
                raise UserError(f"--checkpoint: {directory} is of another run, {name} {there} and not {here}")
    return manager


def restore(manager: ocp.CheckpointManager, **items: Any) -> Any:
    """Read some items of the latest checkpoint."""
    try:
        return manager.restore(manager.latest_step(), args=ocp.args.Composite(**items))
    except Exception as error:  # Orbax raises whatever its storage layers do
        where = manager.directory / str(manager.latest_step())
        raise UserError(f"--checkpoint: {where} cannot be read") from error


def save(manager: ocp.CheckpointManager, state: State, history: np.ndarray, settings: dict[str, Any]) -> None:
    """Write a checkpoint; if the process is killed meanwhile, the previous checkpoint remains."""
    content = ocp.args.StandardSave({"state": state, "history": history})
    items = ocp.args.Composite(content=content, settings=ocp.args.JsonSave(settings))
    manager.save(len(history), args=items)


def train(
    state: State,
    step: Callable[..., tuple[State, Record]],
    data: Data,
    args: Settings,
    manager: ocp.CheckpointManager | None,
    settings: dict[str, Any],
) -> tuple[State, np.ndarray]:
    """Train, or continue where the latest checkpoint stopped.

    Returns:
      The last state and the history: a row of `Record` for each step since the very first.
    """
    per_epoch = len(data.train_y) // args.batch_size
    total, save_every = args.epochs * per_epoch, args.save_every or per_epoch
    done = manager and manager.latest_step()
    history = np.zeros((done or 0, len(Record._fields)), np.float32)
    if done:
        if done > total:
            raise UserError(f"--checkpoint: {args.checkpoint} is at step {done}, past --epochs {args.epochs}")
        like = ocp.args.StandardRestore({"state": state, "history": history})
        state, history = itemgetter("state", "history")(restore(manager, content=like)["content"])
        print(f"resumed at step {done} of {total}")
    with progress_bar(args.epochs) as show:
        if done:
            show(done / per_epoch, history[(done - 1) // per_epoch * per_epoch :], state.opt_state)
        while (start := len(history)) < total:
            # Go up to the next multiple of each interval, so that an interruption does not move them.
            stop = min((start // n + 1) * n for n in (per_epoch, save_every, REPORT_EVERY))
            records = []
            for x, y in batches(data, args.batch_size, args.seed, start, stop):
                state, record = step(state, x, y)
                records.append(record)
            history = np.concatenate([history, np.asarray(jax.device_get(records), np.float32)])
            show(stop / per_epoch, history[start // per_epoch * per_epoch :], state.opt_state)
            if manager is not None and (stop % save_every == 0 or stop == total):
                save(manager, state, history, settings)
    return state, history


def settings_of(args: Settings, data: Data) -> dict[str, Any]:
    """List all settings that a resumed run must share with the original run."""
    checksum = zlib.crc32(data.train_y, zlib.crc32(data.train_x))
    settings = {
        "method": args.method,
        "data": f"{len(data.train_y)} images of {data.train_x.shape[1]} pixels, CRC-32 {checksum:08x}",
        "--hidden": list(args.hidden),
        "--batch-norm": args.batch_norm,
        "--batch-size": args.batch_size,
        "--learning-rate": args.learning_rate,
        "--seed": args.seed,
    }
    if args.method in CLIPS:
        settings["--clip"] = args.clip
    if args.method in PROJECTS:
        settings["--radius"] = args.radius
    if args.method == "max-norm":
        settings["--epochs"] = args.epochs  # its learning rate ends with the last one
    return settings


def run(args: Settings) -> None:
    """Train, and show the results."""
    check_plot(args.plot)
    data = load_data(args.data)
    if args.batch_size > len(data.train_y):
        raise UserError(
            f"--batch-size: {args.batch_size}, but there are only {len(data.train_y)} training images"
        )
    settings = settings_of(args, data)
    with open_checkpoints(args.checkpoint, settings) as manager:
        network = Network(args.hidden, args.batch_norm)
        steps = args.epochs * (len(data.train_y) // args.batch_size)
        tx = make_optimizer(args.method, args.learning_rate, args.clip, args.radius, steps)
        state = init_state(network, tx, data.train_x.shape[1], args.seed)
        state, history = train(state, make_step(network, tx, args.method), data, args, manager, settings)
    clip = args.clip if args.method in CLIPS else None
    radius = args.radius if args.method in PROJECTS else None
    train_score = evaluate(network, state, data.train_x, data.train_y)
    test_score = evaluate(network, state, data.test_x, data.test_y)
    Console().print(summary(args.method, state.params, state.opt_state, radius, train_score, test_score))
    projection = None if radius is None else clipjax.max_norm(radius)
    draw(args.plot, args.method, Record(*history.T), clip, state.params, projection)
    print(f"figure: {args.plot}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script and return its exit status."""
    absl.logging.set_verbosity(absl.logging.ERROR)
    return command_line.main("mnist.py", Settings, run, argv, IdxError)


if __name__ == "__main__":
    sys.exit(main())
