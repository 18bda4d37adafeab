"""Train a float16 network on corrupted digits, and read where and when it broke.

    python examples/digits.py

Six residual blocks compute in float16. The first matrix of block 3 is 30 times as large
as that of the other blocks, and its second matrix 30 times smaller: the same function,
but its hidden values overflow first. Five of 160 batches are corrupted: they have wrong
labels, and their pixels are thousands of times too bright, or their loss is weighted
far too much.

Three optimizers see the same batches, from five seeds at once: clipjax, which skips
steps that are not finite and records the norm of every layer; Optax's clip and Adam,
wrapped by `apply_if_finite`, which skips these steps, too; and Optax's clip and Adam
alone. Each has the learning rate and the threshold that are best on held-out digits;
nothing is chosen on the test set. The picture shows the record of the first seed, and
what is printed is saved beside it. The arguments of its first gradient that is not
finite are kept, so that `explain` can name the line.
"""

import argparse
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from _pictures import save
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import clipjax
from clipjax import plots

SEEDS = np.arange(5)
BATCH, WIDTH, LAYERS = 64, 32, 6
STEPS, EVERY = 160, 8  # all steps, and those from one accuracy to the next
LAST = 3  # the accuracies at the end, of which the mean is reported
# The kinds of the corrupted batches, by step.
CORRUPTED = {37: 2, 52: 3, 90: 1, 113: 2, 141: 3}
# What is multiplied in a usual batch (kind 0) and in the three kinds of corrupted ones.
KINDS = [("pixels", 1), ("pixels", 3_000), ("loss", 1_000), ("loss", 30_000)]
BRIGHTNESS = np.float32([x if what == "pixels" else 1 for what, x in KINDS])
WEIGHT = np.float32([x if what == "loss" else 1 for what, x in KINDS])
# What each optimizer is tried with.
RATES = (5e-4, 2e-3, 8e-3)
THRESHOLDS = (0.3, 3.0)
RECORD = clipjax.record_norms(
    1, name="gradients", stacked="blocks/*", keep=16, probes={"blocks": LAYERS}
)


def optax_clip(rate, threshold):
    """Return Optax's clip and Adam."""
    return optax.chain(optax.clip_by_global_norm(threshold), optax.adam(rate))


def optax_best(rate, threshold):
    """Return Optax's clip and Adam, which leave out steps that are not finite."""
    return optax.apply_if_finite(optax_clip(rate, threshold), STEPS)


def with_clipjax(rate, threshold):
    """Return the same with clipjax, and a record of the norms of all layers."""
    clip = clipjax.clip_by_global_norm(threshold)
    return optax.chain(
        RECORD, clipjax.bounded(optax.adam(rate), clip=clip, nonfinite="skip")
    )


METHODS = {
    "clipjax": with_clipjax,
    "Optax's clip and apply_if_finite": optax_best,
    "Optax's clip alone": optax_clip,
}


def load():
    """Return digits to train on, held-out ones, and those of the test."""
    images, labels = load_digits(return_X_y=True)
    sets = []
    for size in (360, 360):
        images, others, labels, of_others = train_test_split(
            images, labels, test_size=size, stratify=labels, random_state=0
        )
        sets.append((others, of_others))
    test, held_out = sets
    each = ((images, labels), held_out, test)
    return [(jnp.float32(x / 16), jnp.asarray(y)) for x, y in each]


def first_params(key):
    """Draw the weights, those of the blocks stacked along their first axis."""
    keys = jax.random.split(key, 4)
    up, down = (jax.random.normal(each, (LAYERS, WIDTH, WIDTH)) for each in keys[:2])
    scale = jnp.where(jnp.arange(LAYERS) == 3, 30.0, 1.0)[:, None, None]
    return {
        "embed": {"w": jax.random.normal(keys[2], (64, WIDTH)) / 8},
        "blocks": {
            "up": scale * up / WIDTH**0.5,
            "down": down / (2 * scale * WIDTH**0.5),
        },
        "head": {"w": jax.random.normal(keys[3], (WIDTH, 10)) / WIDTH**0.5},
    }


def logits_of(params, taps, x):
    """Map pixels (batch, 64) to logits (batch, 10), with two probes in each block."""

    def block(x, inputs):
        w, tap = inputs
        x = clipjax.probe(x, tap)
        x = x + jax.nn.relu(x @ w["up"]) @ w["down"]
        return clipjax.probe(x, tap), None

    blocks = jax.tree.map(jnp.float16, params["blocks"])
    x = jnp.float16(x @ params["embed"]["w"])
    x, _ = jax.lax.scan(block, x, (blocks, taps))
    return jnp.float32(x) @ params["head"]["w"]


def loss_of(params, taps, x, y, weight):
    """Return the mean loss of a batch, times a weight."""
    logits = logits_of(params, taps, x)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return weight * losses.mean()


grad_fn = jax.value_and_grad(loss_of, argnums=(0, 1))


def show_progress():
    """Make the bar longer, by one mark for EVERY steps."""
    print("#", end="", flush=True)


def train(tx, sets, kinds, seed):
    """Train from a seed.

    Returns:
      The metrics of each step, if there are some; the accuracies on held-out digits and
      on the test set, (steps / EVERY, 2); the last state of the optimizer; and the
      arguments of the first gradient that was not finite.
    """
    tx = optax.with_extra_args_support(tx)
    (train_x, train_y), *others = sets
    key, of_rows = jax.random.split(jax.random.key(seed))
    rows = jax.random.randint(of_rows, (len(kinds), BATCH), 0, len(train_y))
    no_taps = clipjax.tap(LAYERS, probe=True)

    def batch(rows, kind):
        x = jnp.asarray(BRIGHTNESS)[kind] * train_x[rows]
        y = (train_y[rows] + (kind > 0)) % 10
        return x, y, jnp.asarray(WEIGHT)[kind]

    def accuracy(params, x, y):
        return jnp.mean(logits_of(params, no_taps, x).argmax(-1) == y)

    def step(carry, inputs):
        params, state, kept, is_kept = carry
        args = params, no_taps, *batch(*inputs)
        loss, (grads, taps) = grad_fn(*args)
        keep = ~jnp.isfinite(optax.tree.norm(grads)) & ~is_kept
        kept = jax.tree.map(lambda new, old: jnp.where(keep, new, old), args, kept)
        extra = {"loss": loss, "taps": {"blocks": taps}}
        updates, state = tx.update(grads, state, params, **extra)
        try:
            history = clipjax.metrics(state)
        except ValueError:  # Optax has none
            history = {}
        params = optax.apply_updates(params, updates)
        return (params, state, kept, is_kept | keep), history

    def some_steps(carry, inputs):
        jax.debug.callback(show_progress)
        carry, history = jax.lax.scan(step, carry, inputs)
        return carry, (history, jnp.stack([accuracy(carry[0], *x) for x in others]))

    params = first_params(key)
    kept = params, no_taps, *batch(rows[0], kinds[0])
    parts = rows.reshape(-1, EVERY, BATCH), kinds.reshape(-1, EVERY)
    (_, state, kept, _), (history, right) = jax.lax.scan(
        some_steps, (params, tx.init(params), kept, False), parts
    )
    return {key: x.reshape(-1) for key, x in history.items()}, right, state, kept


def best_of(make, settings, sets, kinds, before):
    """Train with all settings from all seeds in one program, and choose one setting.

    Where all end with the same accuracy, as at chance, it is the one chosen before.

    Returns:
      The index of the setting; the test accuracies, (seeds, steps / EVERY); and of the
      first seed the history, the last state, and the arguments that were kept.
    """

    def one(setting, seed):
        return train(make(*setting), sets, kinds, seed)

    every = jax.jit(jax.vmap(jax.vmap(one, (None, 0)), (0, None)))
    history, right, *rest = every(jnp.float32(settings), SEEDS)
    held_out, test = np.moveaxis(np.asarray(right), -1, 0)
    scores = [(x[:, -LAST:].mean(), i == before) for i, x in enumerate(held_out)]
    best = scores.index(max(scores))
    first = jax.tree.map(lambda x: x[best, 0], (history, *rest))
    return best, test[best], *jax.device_get(first)


def summary(accuracies, bad, causes):
    """Return what the run showed, in words."""
    lines = ["Test accuracy at the end, mean of five seeds (worst seed):"]
    for name, each in accuracies.items():
        ends = each[:, -LAST:].mean(1)
        lines.append(f"  {name:32} {ends.mean():.0%} ({ends.min():.0%})")
    lines += ["", "Bad steps of clipjax, first seed:", *(f"  {step}" for step in bad)]
    lines += ["", "Its first gradient that is not finite, explained:"]
    lines += [f"  {cause}" for cause in causes]
    return "\n".join(lines)


def draw(history, bad, tall):
    """Draw the norms of the layers of one seed, and what was done to its batches."""
    size = (4.2, 4.4) if tall else (8, 4.4)
    figure, ax = plt.subplots(figsize=size, layout="constrained")
    rows = ["gradients/embed", "gradients/blocks/*", "gradients/head"]
    plots.heat_map(history, only=rows, bad=bad, ax=ax)
    for step, kind in CORRUPTED.items():
        what, factor = KINDS[kind]
        ax.annotate(
            rf"{what} $\times$ {factor:,.0f}",
            (step, 1.04),
            (-2, 8),
            xycoords=ax.get_xaxis_transform(),
            textcoords="offset points",
            rotation=40,
        )
    return figure


def main():
    """Train, print a table and the bad steps, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--plot", default="digits.png", help="where to save the picture"
    )
    args = parser.parse_args()
    sets = load()
    kinds = np.array([CORRUPTED.get(step, 0) for step in range(STEPS)])
    settings = list(itertools.product(RATES, THRESHOLDS))
    accuracies, records, best = {}, {}, 0
    for name, make in METHODS.items():
        print(f"training: {name:34}|", end="", flush=True)
        best, accuracies[name], *records[name] = best_of(
            make, settings, sets, kinds, best
        )
        jax.effects_barrier()
        print("|")
    history, state, kept = records["clipjax"]
    bad = clipjax.bad_steps(state)
    text = summary(accuracies, bad, clipjax.explain(grad_fn, *kept))
    print(f"\n{text}")
    path = Path(args.plot)
    path.with_suffix(".txt").write_text(f"{text}\n")
    tall = path.with_name(f"{path.stem}-tall{path.suffix}")
    save(tall, draw, history, bad, True, size=9)
    save(path, draw, history, bad, False, size=11)


if __name__ == "__main__":
    main()
