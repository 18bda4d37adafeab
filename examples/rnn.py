"""Train a recurrent network to remember, with clipped gradients and without.

    python examples/rnn.py

The temporal-order task of Pascanu et al. (2013, arXiv 1211.5063): a sequence of noise
has an A or a B near its start and another in its middle, and at its end the network
says which they were. Now and then the gradient explodes in the backward pass, and one
such step of plain SGD destroys what was learned. `slow` takes steps of a tenth, without
a clip. `global` clips the whole gradient, in the optimizer; `step` clips, within the
network, what each time step passes back to the one before, and a tap logs what that
clip sees.
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from _pictures import BLUE, GREEN, GREY, ORANGE, save

import clipjax

HIDDEN, BATCH, TEST, BLOCK = 50, 20, 2000, 250
SYMBOLS, CLASSES = 6, 4  # A, B and four symbols of noise; AA, AB, BA, BB
METHODS = {
    "none": (GREY, "-", 0.1, "no clip"),
    "slow": (GREEN, "-.", 0.01, "no clip, learning rate / 10"),
    "global": (BLUE, "-", 0.1, "clip of the whole gradient"),
    "step": (ORANGE, "--", 0.1, "clip between time steps"),
}


def sequences(key, count, length):
    """Draw sequences (count, length) of symbols, and their classes (count,)."""
    of_noise, of_symbols, of_places = jax.random.split(key, 3)
    noise = jax.random.randint(of_noise, (count, length), 2, SYMBOLS)
    symbols = jax.random.randint(of_symbols, (count, 2), 0, 2)
    places = jnp.array([length // 10, length // 2]) + jax.random.randint(
        of_places, (count, 2), 0, length // 10
    )
    return noise.at[jnp.arange(count)[:, None], places].set(
        symbols
    ), symbols @ jnp.array([2, 1])


def first_params(key):
    """Draw the weights; the recurrent ones are sparse, of spectral radius 0.95."""
    keys = jax.random.split(key, 4)
    recurrent = jax.random.normal(keys[0], (HIDDEN, HIDDEN))
    recurrent = jnp.where(
        jax.random.uniform(keys[1], (HIDDEN, HIDDEN)).argsort(1).argsort(1) < 15,
        recurrent,
        0,
    )
    return {
        "recurrent": recurrent * (0.95 / jnp.abs(jnp.linalg.eigvals(recurrent)).max()),
        "input": 0.01 * jax.random.normal(keys[2], (SYMBOLS, HIDDEN)),
        "out": 0.01 * jax.random.normal(keys[3], (HIDDEN, CLASSES)),
        "hidden_bias": jnp.zeros(HIDDEN),
        "out_bias": jnp.zeros(CLASSES),
    }


def logits_of(params, x, method, tap=None):
    """Read the sequences, and classify them by the last hidden state."""

    def cell(hidden, symbol):
        if method == "step":
            hidden = clipjax.clip_gradient_by_norm(hidden, 0.01, tap=tap)
        return jnp.tanh(
            hidden @ params["recurrent"]
            + params["input"][symbol]
            + params["hidden_bias"]
        ), None

    hidden, _ = jax.lax.scan(cell, jnp.zeros((len(x), HIDDEN)), x.T)
    return hidden @ params["out"] + params["out_bias"]


def train(method, length, seeds, steps):
    """Train one network for each seed; return errors (blocks, seeds) and metrics.

    Metrics are a dict of arrays (steps, seeds).
    """
    bound = 1.0 if method == "global" else jnp.inf  # infinity: measure only
    rate = METHODS[method][2]
    tx = optax.chain(clipjax.clip_by_global_norm(bound), optax.sgd(rate))

    def loss_of(params, tap, x, y):
        logits = logits_of(params, x, method, tap)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def step(carry, batch):
        params, state = carry
        grads, seen = jax.grad(loss_of, argnums=(0, 1))(params, clipjax.tap(), *batch)
        updates, state = tx.update(grads, state, params)
        metrics = clipjax.metrics(state) | clipjax.tapped(seen)
        return (optax.apply_updates(params, updates), state), metrics

    def block(carry, key):
        x, y = sequences(key, BLOCK * BATCH + TEST, length)
        batches = x[TEST:].reshape(BLOCK, BATCH, length), y[TEST:].reshape(BLOCK, BATCH)
        carry, metrics = jax.lax.scan(step, carry, batches)
        wrong = logits_of(carry[0], x[:TEST], method).argmax(-1) != y[:TEST]
        return carry, jnp.mean(wrong), metrics

    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    params = jax.jit(jax.vmap(first_params))(keys)
    carry, blocks = (params, jax.vmap(tx.init)(params)), jax.jit(jax.vmap(block))
    errors, history = [], []
    for number in range(steps // BLOCK):
        carry, error, seen = blocks(
            carry, jax.vmap(jax.random.fold_in, (0, None))(keys, number)
        )
        errors.append(np.asarray(error))
        history.append(jax.tree.map(lambda x: np.asarray(x).T, seen))
        if np.all(np.min(errors, axis=0) < 0.01):
            break
    return np.array(errors), jax.tree.map(lambda *x: np.concatenate(x), *history)


def draw(results, seeds):
    """Draw the errors of each method."""
    figure, ax = plt.subplots(figsize=(6, 5.6), layout="constrained")
    for method, errors in results.items():
        color, style, _, words = METHODS[method]
        at = BLOCK * np.arange(1, len(errors) + 1)
        solved = np.sum(np.min(errors, axis=0) < 0.01)
        label = f"{words}: {solved} of {seeds} learn"
        median = 100 * np.median(errors, axis=1)
        ax.plot(at, median, style, color=color, lw=2.5, label=label)
        ax.plot(at[-1], median[-1], "o", color=color, clip_on=False, zorder=3)
    ax.set(title="Sequences in error", xlabel="step", ylim=(0, 100))
    ax.set_ylabel(f"%, median of {seeds} networks")
    figure.legend(loc="outside lower center")
    return figure


def main():
    """Train with each method, print how many networks learned the task, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two networks, short sequences and few steps",
    )
    parser.add_argument(
        "--length", type=int, default=30, help="how long the sequences are"
    )
    parser.add_argument("--plot", default="rnn.png", help="where to save the picture")
    args = parser.parse_args()
    seeds, length, steps = (2, 20, 500) if args.quick else (8, args.length, 6000)
    results = {}
    for method in METHODS:
        errors, metrics = train(method, length, seeds, steps)
        norms = metrics["clip_by_global_norm/norm"]
        solved = np.sum(np.min(errors, axis=0) < 0.01)
        print(
            f"{method:7} {solved} of {seeds} networks learned the task, largest "
            f"gradient norm {norms.max():.3g}"
        )
        if method == "step":
            share = metrics["clipped_fraction"].mean()
            mean = metrics["mean_norm"].mean()
            seen = f"norms between time steps: mean {mean:.2g}, {share:.0%} clipped"
            print(f"{'':7} {seen}")
        results[method] = errors
    if args.quick:
        print("This run is too short to learn the task.")
    save(args.plot, draw, results, seeds)


if __name__ == "__main__":
    main()
