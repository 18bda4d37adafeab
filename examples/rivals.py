"""Train on digits with corrupted batches: a clip, a bound of weights, and their rivals.

    python examples/rivals.py

One batch in fifty has pixels a hundred times too bright and wrong labels. Each method
sees the same batches, from five seeds at once: nothing but SGD, a clip of gradients, a
bound on the weights, both, and the simplest rivals. The rivals are weight decay,
smaller learning rates, and Adam in place of SGD, each the best of several on held-out
digits, and the weights of the step that was best there. Nothing is chosen on the test
set.
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from _pictures import save
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import clipjax

SEEDS = np.arange(5)
BATCH = 32
CLIP = 1.0
BOUND = 2.0
RATE = 0.05
NONE = np.inf
# The threshold of the gradient norm, the bound on the norm of an output unit's weights,
# the weight decay, and the learning rate. Of several, one is chosen on held-out digits.
WITH_SGD = {
    "nothing": [(NONE, NONE, 0.0, RATE)],
    "max_norm alone": [(NONE, BOUND, 0.0, RATE)],
    "clip_by_global_norm alone": [(CLIP, NONE, 0.0, RATE)],
    "both": [(CLIP, BOUND, 0.0, RATE)],
    "weight decay": [(NONE, NONE, x, RATE) for x in (1e-4, 1e-3, 1e-2, 0.1, 0.3)],
    "smaller learning rate": [
        (NONE, NONE, 0.0, x) for x in (2e-2, 1e-2, 3e-3, 1e-3, 3e-4)
    ],
}
WITH_ADAM = {
    "Adam": [(NONE, NONE, 0.0, x) for x in (3e-2, 1e-2, 3e-3, 1e-3, 1e-4)],
    "Adam, clipped": [(CLIP, NONE, 0.0, x) for x in (1e-2, 3e-3, 1e-3, 3e-4, 1e-4)],
}
STYLES = {
    "nothing": ("#d55e00", "-"),
    "max_norm alone": ("#cc79a7", "--"),
    "weight decay": ("#8c8c8c", "-"),
    "Adam": ("#e69f00", "-."),
    "smaller learning rate": ("#009e73", "-."),
    "clip_by_global_norm alone": ("#2a8cc9", "-"),
    "both": ("#7cc8f2", "--"),
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
    """Draw the weights of two dense layers."""
    keys = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(keys[0], (64, 64)) / 8, "b": jnp.zeros(64)},
        "out": {"w": jax.random.normal(keys[1], (64, 10)) / 8, "b": jnp.zeros(10)},
    }


def logits_of(params, x):
    """Map pixels (batch, 64) to logits (batch, 10)."""
    hidden = jax.nn.relu(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def train(optimizer, sets, steps, seed, settings):
    """Train from a seed; return two norms and two accuracies of each step."""
    max_norm, bound, decay, rate = settings
    tx = clipjax.bounded(
        optax.chain(optax.add_decayed_weights(decay), optimizer(rate)),
        clip=clipjax.clip_by_global_norm(max_norm),
        project=clipjax.max_norm(bound),
    )
    (train_x, train_y), *others = sets
    key, of_rows, of_draws = jax.random.split(jax.random.key(seed), 3)
    rows = jax.random.randint(of_rows, (steps, BATCH), 0, len(train_y))
    draws = jax.random.uniform(of_draws, (steps,))
    corrupted = (draws < 0.02) & (jnp.arange(steps) >= 100)

    def loss_of(params, x, y):
        losses = optax.softmax_cross_entropy_with_integer_labels
        return losses(logits_of(params, x), y).mean()

    def step(carry, inputs):
        params, state = carry
        rows, corrupted = inputs
        x = jnp.where(corrupted, 100.0, 1.0) * train_x[rows]
        y = jnp.where(corrupted, (train_y[rows] + 1) % 10, train_y[rows])
        grads = jax.grad(loss_of)(params, x, y)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        right = [jnp.mean(logits_of(params, x).argmax(-1) == y) for x, y in others]
        weights = [layer["w"] for layer in params.values()]
        of_units = clipjax.functional.unitwise_norms(weights, axes=0)
        seen = {
            "gradient": clipjax.metrics(state)["clip_by_global_norm/norm"],
            "weights": jnp.concatenate(of_units).max(),
            "held out": right[0],
            "test": right[1],
        }
        return (params, state), seen

    params = first_params(key)
    return jax.lax.scan(step, (params, tx.init(params)), (rows, corrupted))[1]


def run(optimizer, methods, sets, steps):
    """Train with all settings from all seeds, in one program; choose among several.

    Returns:
      For each method what `train` returns, (seeds, steps), and the settings that were
      chosen.
    """

    def one(seed, settings):
        return train(optimizer, sets, steps, seed, settings)

    of_seeds = jax.vmap(one, (0, None))
    of_settings = jax.jit(jax.vmap(of_seeds, (None, 0)))
    every = [each for several in methods.values() for each in several]
    results = jax.device_get(of_settings(SEEDS, np.float32(every)))
    chosen = {}
    start = 0
    for name, several in methods.items():
        places = range(start, start + len(several))
        best = max(places, key=lambda at: results["held out"][at, :, -50:].mean())
        chosen[name] = {key: x[best] for key, x in results.items()}
        chosen[name]["settings"] = every[best]
        start += len(several)
    return chosen


def compare(sets, steps):
    """Return all results, and the accuracies at the end by what was tried."""
    results = run(sgd, WITH_SGD, sets, steps)
    results |= run(optax.adam, WITH_ADAM, sets, steps)
    ends = {}
    for name, result in results.items():
        several = len((WITH_SGD | WITH_ADAM)[name])
        *_, decay, rate = result["settings"]
        tuned = f": {decay or rate:g}, the best of {several}"
        ends[name + tuned * (several > 1)] = result["test"][:, -50:].mean(1)
    nothing = results["nothing"]
    best = nothing["held out"].argmax(1)
    ends["nothing, its best step"] = nothing["test"][np.arange(len(SEEDS)), best]
    return results, ends


def sgd(rate):
    """Return SGD with momentum."""
    return optax.sgd(rate, momentum=0.9)


def draw(results, ends):
    """Draw the norms of gradients and weights of one seed, and all accuracies."""
    rows = [["gradient", "test"], ["weights", "test"]]
    figure, axes = plt.subplot_mosaic(rows, figsize=(10, 6.4), layout="constrained")
    dotted = {"color": plt.rcParams["text.color"], "lw": 1.2, "ls": ":"}
    axes["gradient"].set(title="Gradient norm, before the clip", ylim=(0.01, 1e8))
    axes["weights"].set(title="Largest norm of an output unit's weights")
    norms = [
        (
            "gradient",
            CLIP,
            "threshold",
            "clip_by_global_norm alone",
            0.9,
            "upper right",
        ),
        ("weights", BOUND, "bound", "max_norm alone", 2, "center right"),
    ]
    for key, most, word, method, width, place in norms:
        for name in (method, "nothing"):
            color, _ = STYLES[name]
            axes[key].plot(results[name][key][0], color=color, lw=width, label=name)
        axes[key].axhline(most, label=f"{word} {most:g}", **dotted)
        axes[key].set(yscale="log", xlabel="step")
        axes[key].legend(fontsize=11, loc=place)
    right = axes["test"]
    for name, (color, line) in STYLES.items():
        mean_of_10 = np.ones(10) / 10
        test = 100 * results[name]["test"]
        each = [np.convolve(x, mean_of_10, "valid") for x in test]
        steps = np.arange(10, len(each[0]) + 10)
        band = np.min(each, 0), np.max(each, 0)
        right.fill_between(steps, *band, color=color, alpha=0.15, lw=0)
        right.plot(steps, np.mean(each, 0), line, color=color, lw=2, label=name)
    stopped = 100 * ends["nothing, its best step"].mean()
    right.axhline(stopped, label="nothing, its best step", **dotted)
    right.set(title="Accuracy on the test set (%), five seeds", xlabel="step")
    handles = right.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3, fontsize=11)
    return figure


def main():
    """Train, print a table, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument(
        "--plot", default="rivals.png", help="where to save the picture"
    )
    args = parser.parse_args()
    results, ends = compare(load(), 150 if args.quick else 1000)
    print("test accuracy at the end, mean of five seeds (worst seed)")
    for name, each in ends.items():
        print(f"  {name:36} {each.mean():6.1%} ({each.min():.1%})")
    if args.quick:
        print("This run is too short to compare anything.")
    save(args.plot, draw, results, ends)


if __name__ == "__main__":
    main()
