"""Train a stack of layers with corrupted batches, and read which layer broke.

    python examples/spikes.py

A corrupted batch has pixels a hundred times too bright and wrong labels, which makes an
outlier of the gradient norm. One comes at step 40, while norms still fall, and others
at random from step 100 on. At other random steps one element of what layer 3 returns is
infinite, as a flipped bit makes it. Every method has its defaults, and sees the same
batches from five seeds at once; nothing is tuned.

The run with `skip_spikes` is saved. `bad_steps` reads from the checkpoint, without a
template, the norms of outlier steps, and in which pass and at which layer others broke.
"""

import argparse
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from _pictures import save
from flax import serialization
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import clipjax
from clipjax import plots

SEEDS, BATCH, WIDTH, LAYERS = 5, 32, 32, 6
EARLY = 40  # the step of the first corrupted batch
FAULTY = 3  # the layer with faults
RECORD = clipjax.record_norms(
    "leaf",
    name="gradients",
    stacked="blocks",
    keep=16,
    probes={"blocks": LAYERS},
)


def methods():
    """Return optimizers by name."""
    sgd = optax.sgd(0.02, momentum=0.9)

    def clipped(clip):
        return clipjax.bounded(sgd, clip=clip, nonfinite="skip")

    return {
        "nothing but a skip of NaN": clipped(clipjax.clip_by_global_norm(jnp.inf)),
        "clip_by_global_norm(1.0)": clipped(clipjax.clip_by_global_norm(1.0)),
        "zclip()": clipped(clipjax.zclip()),
        "skip_spikes()": optax.chain(RECORD, clipjax.skip_spikes(sgd)),
    }


def logits_of(params, x, taps=None, has_fault=False):
    """Apply residual layers, with a probe at the start and at the end of each."""
    if taps is None:
        taps = clipjax.tap(LAYERS, probe=True)

    def layer(x, inputs):
        w, tap, i = inputs
        x = clipjax.probe(x, tap)
        x = x + jax.nn.relu(x @ w)
        first = np.arange(x.size).reshape(x.shape) == 0
        x = jnp.where(has_fault & (i == FAULTY) & first, jnp.inf, x)
        return clipjax.probe(x, tap), None

    x = x @ params["embed"]
    x, _ = jax.lax.scan(layer, x, (params["blocks"], taps, jnp.arange(LAYERS)))
    return x @ params["head"]


def drawn(steps, examples):
    """Draw weights, those of the layers stacked, and the rows of batches, by seed."""
    each = []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        blocks = 0.5 * rng.normal(size=(LAYERS, WIDTH, WIDTH))
        params = {
            "embed": rng.normal(size=(64, WIDTH)) / 8,
            "blocks": blocks / WIDTH**0.5,
            "head": 3 * rng.normal(size=(WIDTH, 10)) / WIDTH**0.5,
        }
        rows = rng.integers(examples, size=(steps, BATCH))
        each.append((jax.tree.map(jnp.float32, params), rows))
    return jax.tree.map(lambda *x: jnp.stack(x), *each)


def train(tx, data, is_corrupted, has_fault):
    """Train from all seeds in one scan.

    Returns:
      The metrics (seeds, steps), the accuracies (seeds, steps), and the last state of
      the first seed.
    """
    train_x, test_x, train_y, test_y = data

    def loss_of(params, taps, x, y, has_fault):
        logits = logits_of(params, x, taps, has_fault)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def step(carry, inputs):
        params, state = carry
        rows, bad, fault = inputs
        x = jnp.where(bad, 100.0, 1.0) * train_x[rows]
        y = (train_y[rows] + bad) % 10
        taps = clipjax.tap(LAYERS, probe=True)
        grad_fn = jax.value_and_grad(loss_of, argnums=(0, 1))
        loss, (grads, taps) = grad_fn(params, taps, x, y, fault)
        extra = {"loss": loss, "taps": {"blocks": taps}}
        updates, state = tx.update(grads, state, params, **extra)
        params = optax.apply_updates(params, updates)
        right = jnp.mean(logits_of(params, test_x).argmax(-1) == test_y)
        return (params, state), (clipjax.metrics(state), right)

    def run(params, rows):
        inputs = rows, is_corrupted, has_fault
        return jax.lax.scan(step, (params, tx.init(params)), inputs)

    params, rows = drawn(len(is_corrupted), len(train_y))
    (_, state), (history, accuracies) = jax.jit(jax.vmap(run))(params, rows)
    return history, np.asarray(accuracies), jax.tree.map(lambda x: x[0], state)


def draw(history):
    """Draw the norms of one run."""
    figure, ax = plt.subplots(figsize=(6, 4.8), layout="constrained")
    plots.norms(history, name="skip_spikes", ax=ax)
    return figure


def of_first_seed(history):
    """Return the history of one run."""
    return {name: values[0] for name, values in history.items()}


def main():
    """Train with each method, print a table and bad steps, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--spikes", type=float, default=0.02, help="the fraction of corrupted batches"
    )
    parser.add_argument(
        "--plot", default="spikes.png", help="where to save the picture"
    )
    args = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    data = train_test_split(
        np.float32(images / 16), labels, test_size=0.2, random_state=0
    )
    data = [jnp.asarray(each) for each in data]
    draws = np.random.default_rng(0).random(600)
    draws[:100] = 1
    draws[EARLY] = 0
    is_corrupted = draws < args.spikes
    has_fault = ~is_corrupted & (draws < 1.5 * args.spikes)

    results = {}
    for name, tx in methods().items():
        results[name] = train(tx, data, is_corrupted, has_fault)
        _, accuracies, _ = results[name]
        ends = accuracies[:, -50:].mean(1)
        print(
            f"{name:28} accuracy: mean after step {EARLY} "
            f"{accuracies[:, EARLY:].mean():.1%}, at the end {ends.mean():.1%}, "
            f"of the worst seed {ends.min():.1%}"
        )
    history, _, state = results["skip_spikes()"]  # the state of the first seed
    skipped = np.diff(history["skip_spikes/skipped"], axis=1, prepend=0) > 0
    ordinary = ~(is_corrupted | has_fault)
    print(
        f"\nskip_spikes() skipped step {EARLY} from {skipped[:, EARLY].sum()} of "
        f"{SEEDS} seeds, {skipped[:, is_corrupted].mean():.0%} of the corrupted "
        f"batches, {skipped[:, has_fault].mean():.0%} of the faults and "
        f"{skipped[:, ordinary].mean():.2%} of the other steps"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.msgpack"
        path.write_bytes(serialization.to_bytes(state))
        restored = serialization.msgpack_restore(path.read_bytes())
    print("\nbad steps of the run with skip_spikes(), read from its checkpoint:")
    for each in clipjax.bad_steps(restored):
        print(f"  {each}")
    history = of_first_seed(history)
    save(args.plot, draw, history)


if __name__ == "__main__":
    main()
