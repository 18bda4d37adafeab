"""Train a recurrent network to remember what it saw long ago, with its gradients clipped and without.

This is the temporal-order task of Pascanu et al. (2013, arXiv 1211.5063): a sequence of noise symbols has an
A or a B soon after its beginning and another in its middle, and at its end the network must say which they
were. The longer the sequence, the more often the gradient explodes in the backward pass, and one such step
of plain SGD destroys what was learned. There are three methods: `none` clips nothing; `global` clips the norm
of the whole gradient, in the optimizer's chain; `step` clips, within the network, the gradient that each time
step passes back to the one before. A network has learned the task when it errs in less than 1% of new
sequences.

    python examples/rnn.py
    python examples/rnn.py --full
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import command_line
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from command_line import check_plot
from rich.console import Console
from rnn_cli import METHODS, Outcome, Settings, draw, progress_bar, table

import clipjax

HIDDEN, BATCH = 50, 20
CLASSES, SYMBOLS = 4, 6  # AA, AB, BA, BB; A, B and four symbols of noise
LOOK_EVERY = 250  # steps between two measurements of the error
TEST_SIZE = 2000
SOLVED = 0.01  # the paper's criterion: less than 1% of the sequences wrong
SPECTRAL_RADIUS, FAN_IN = 0.95, 15


class State(NamedTuple):
    """Everything that a step changes."""

    params: Any
    opt_state: Any


def smart_tanh(key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.Array:
    """Draw recurrent weights like the paper's "smart tanh": sparse, and with a spectral radius of 0.95."""
    of_values, of_places = jax.random.split(key)
    weights = jax.random.normal(of_values, shape, dtype)
    rank = jax.random.uniform(of_places, shape).argsort(axis=1).argsort(axis=1)
    weights = jnp.where(rank < FAN_IN, weights, 0)
    return weights * (SPECTRAL_RADIUS / jnp.abs(jnp.linalg.eigvals(weights)).max())


class Cell(nn.SimpleCell):
    """A tanh cell that clips the gradient that flows back through its hidden state."""

    max_norm: float | None = None

    def __call__(self, carry: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Take one time step."""
        if self.max_norm is not None:
            carry = clipjax.clip_gradient_by_norm(carry, self.max_norm)
        return super().__call__(carry, inputs)


class Network(nn.Module):
    """Read a sequence, and classify it by the last hidden state."""

    max_norm: float | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map symbols `(batch, length)` to logits `(batch, 4)`."""
        small = nn.initializers.normal(0.01)
        cell = Cell(HIDDEN, kernel_init=small, recurrent_kernel_init=smart_tanh, max_norm=self.max_norm)
        hidden, _ = nn.RNN(cell, return_carry=True)(jax.nn.one_hot(x, SYMBOLS))
        return nn.Dense(CLASSES, kernel_init=small)(hidden)


def sequences(key: jax.Array, count: int, length: int) -> tuple[jax.Array, jax.Array]:
    """Draw sequences `(count, length)` of symbols from 0 to 5, and their classes `(count,)` from 0 to 3.

    The first of the two symbols lies in the second tenth of the sequence, the second in the sixth, as in
    the authors' programs.
    """
    of_noise, of_symbols, of_places = jax.random.split(key, 3)
    noise = jax.random.randint(of_noise, (count, length), 2, SYMBOLS)
    symbols = jax.random.randint(of_symbols, (count, 2), 0, 2)
    starts = jnp.array([length // 10, length // 2])
    places = starts + jax.random.randint(of_places, (count, 2), 0, length // 10)
    return noise.at[jnp.arange(count)[:, None], places].set(symbols), symbols @ jnp.array([2, 1])


def make_optimizer(method: str, learning_rate: float, clip: float) -> optax.GradientTransformation:
    """Chain SGD after a clip of the global norm, which only measures if the method is not `global`."""
    bound = clip if method == "global" else math.inf
    return optax.chain(clipjax.clip_by_global_norm(bound), optax.sgd(learning_rate))


def norms(opt_state: Any) -> tuple[jax.Array, jax.Array]:
    """Return the norm of the gradient before and after the optimizer's clip."""
    seen = clipjax.metrics(opt_state)
    return seen["clip_by_global_norm/norm"], seen["clip_by_global_norm/norm_after"]


def make_steps(network: Network, tx: optax.GradientTransformation, length: int) -> Callable[..., Any]:
    """Compile `LOOK_EVERY` steps and a measurement of the error, for all seeds at once."""

    def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(network.apply(params, x), y).mean()

    def step(state: State, batch: tuple[jax.Array, jax.Array]) -> tuple[State, tuple[jax.Array, jax.Array]]:
        grads = jax.grad(loss_of)(state.params, *batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(params, opt_state), norms(opt_state)

    def steps(state: State, key: jax.Array, number: jax.Array) -> tuple[State, Any, jax.Array]:
        fresh = sequences(jax.random.fold_in(key, number), LOOK_EVERY * BATCH + TEST_SIZE, length)
        batches = jax.tree.map(lambda a: a[TEST_SIZE:].reshape(LOOK_EVERY, BATCH, *a.shape[1:]), fresh)
        state, measured = jax.lax.scan(step, state, batches)
        x, y = (a[:TEST_SIZE] for a in fresh)
        return state, measured, jnp.mean(network.apply(state.params, x).argmax(-1) != y)

    return jax.jit(jax.vmap(steps, in_axes=(0, 0, None)), donate_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def first_params(seeds: int) -> tuple[jax.Array, Any]:
    """Draw a key and the initial parameters for each seed, which depend on neither method nor length."""
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    return keys, jax.vmap(lambda key: Network().init(key, jnp.zeros((1, 1), int)))(keys)


def train(
    method: str, length: int, args: Settings, show: Callable[[int, np.ndarray, float], None]
) -> Outcome:
    """Train one network for each seed, until all have learned the task or the steps are used up."""
    network = Network(args.step_clip if method == "step" else None)
    tx = make_optimizer(method, args.learning_rate, args.clip)
    steps = make_steps(network, tx, length)
    keys, params = first_params(args.seeds)
    state, solved, history = State(params, jax.vmap(tx.init)(params)), np.zeros(args.seeds, int), []
    for number in range(-(-args.steps // LOOK_EVERY)):
        state, measured, error = steps(state, keys, number)
        history.append(np.asarray(measured))
        done = (number + 1) * LOOK_EVERY
        solved = np.where((solved == 0) & (np.asarray(error) < SOLVED), done, solved)
        show(done, solved, float(history[-1][0].max()))
        if solved.all():
            break
    before, after = np.concatenate(history, axis=-1)
    return Outcome(method, length, solved, before, after)


def run(args: Settings) -> list[Outcome]:
    """Train with every method on every length."""
    outcomes = []
    with progress_bar(len(args.lengths) * len(METHODS), args.steps) as begin:
        for length in args.lengths:
            for method in METHODS:
                outcomes.append(train(method, length, args, begin(method, length)))
    return outcomes


def show(args: Settings) -> None:
    """Train, and show the results."""
    check_plot(args.plot)
    outcomes = run(args)
    Console().print(table(outcomes, args.steps))
    draw(args.plot, outcomes, args.clip)
    print(f"figure: {args.plot}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script and return its exit status."""
    return command_line.main("rnn.py", Settings, show, argv)


if __name__ == "__main__":
    sys.exit(main())
