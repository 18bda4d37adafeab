"""Train on handwritten digits, plain and with clipped gradients, bounded weights.

    python examples/digits.py

The digits come with scikit-learn. Both networks are trained with the right labels, and
with a fifth of them wrong, which a network can learn by heart if its weights may grow:
each from five seeds at once, by `jax.vmap`. The picture shows the runs side by side.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import clipjax
from clipjax import plots

CLIP, RADIUS, BATCH, STEPS, SEEDS = 1.0, 1.5, 64, 1200, 5
COLORS = ("#0072b2", "#d55e00", "#56b4e9", "#e69f00")


class Network(nn.Module):
    """Three dense layers."""

    @nn.compact
    def __call__(self, x):
        """Map pixels (batch, 64) to logits (batch, 10)."""
        x = nn.swish(nn.Dense(300)(x))
        x = nn.swish(nn.Dense(100)(x))
        return nn.Dense(10)(x)


def make_optimizer(constrained):
    """Return Adam, bare but for its log, or with everything around it."""
    # Infinity: measure only.
    clip = clipjax.clip_by_global_norm(CLIP if constrained else jnp.inf)
    project = clipjax.max_norm(RADIUS) if constrained else None
    return clipjax.bounded(
        optax.adam(3e-3), clip=clip, project=project, nonfinite="skip"
    )


def train(constrained, steps, data):
    """Train from each seed; return weights, log, accuracies (measurement, seed)."""
    train_x, test_x, train_y, test_y = data
    network, tx = Network(), make_optimizer(constrained)
    params = jax.vmap(network.init, (0, None))(
        jax.random.split(jax.random.key(0), SEEDS), train_x[:1]
    )
    opt_state = jax.vmap(tx.init)(params)

    def loss_of(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(
            network.apply(params, x), y
        ).mean()

    @jax.jit
    @jax.vmap
    def step(params, opt_state, x, y):
        grads = jax.grad(loss_of)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (
            optax.apply_updates(params, updates),
            opt_state,
            clipjax.metrics(opt_state),
        )

    @jax.jit
    @jax.vmap
    def accuracy(params):
        return jnp.mean(network.apply(params, test_x).argmax(-1) == test_y)

    order, log, scores = np.random.default_rng(0), [], []
    for number in range(steps):
        rows = order.integers(len(train_y), size=(SEEDS, BATCH))
        params, opt_state, metrics = step(
            params, opt_state, train_x[rows], train_y[rows]
        )
        log.append(metrics)
        if number % 20 == 19:
            scores.append(accuracy(params))
    return params, jax.device_get(log), np.array(scores)


def draw(path, runs):
    """Draw norms, weights and accuracy, with letters that can be read on a phone."""
    plt.rcParams.update({"font.size": 13, "axes.titlesize": 14, "legend.fontsize": 12})
    figure, axes = plt.subplots(1, 3, figsize=(10, 4.8), layout="constrained")
    _, log, _ = runs["with clipjax"]
    plots.norms(
        [metrics["clip_by_global_norm/norm"][0] for metrics in log],
        threshold=CLIP,
        ax=axes[0],
    )
    axes[0].set(title="Gradient norms\nof a run with clipjax", xlabel="step", ylabel="")
    axes[0].legend(loc="lower left", handlelength=1.2, borderaxespad=0.2)
    for (name, (params, log, scores)), color in zip(runs.items(), COLORS, strict=True):
        style = "--" if name.startswith("plain") else "-"
        norms = np.sort(unit_norms(params))
        axes[1].plot(np.linspace(0, 100, len(norms)), norms, style, lw=2.5, color=color)
        steps = np.linspace(0, len(log), len(scores) + 1)[1:]
        axes[2].fill_between(
            steps,
            100 * scores.min(1),
            100 * scores.max(1),
            color=color,
            alpha=0.15,
            lw=0,
        )
        axes[2].plot(
            steps,
            100 * scores.mean(1),
            style,
            lw=2.5,
            color=color,
            label=f"{name}: {scores[-5:].mean():.1%}",
        )
    axes[1].axhline(RADIUS, color="black", lw=1, ls=":")
    axes[1].annotate(f"radius {RADIUS}", (55, RADIUS - 0.3))
    axes[1].set(
        title="Norms of the weights\nof each unit",
        xlabel="units, sorted (%)",
        yticks=range(1, 5),
    )
    axes[2].set(
        title="Accuracy on the test set\n(%), from five seeds",
        xlabel="step",
        ylim=(78, 100),
    )
    axes[2].set(yticks=range(80, 101, 5))
    for ax in (axes[0], axes[2]):
        ax.set_xticks(np.linspace(0, len(log), 3).astype(int))
    figure.legend(
        *axes[2].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        title="accuracy at the end",
    )
    figure.savefig(path, dpi=120)


def unit_norms(params):
    """Return the norms of all units' incoming weights, of all seeds."""
    norms = jax.vmap(
        lambda params: clipjax.functional.unitwise_norms(params, clipjax.fan_in)
    )(params)
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(norms)])


def main():
    """Train the networks, print their accuracies and draw them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument(
        "--plot", default="digits.png", help="where to save the picture"
    )
    args = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    data = train_test_split(
        np.float32(images / 16), labels, test_size=0.2, stratify=labels, random_state=0
    )
    wrong = np.random.default_rng(1).random(len(data[2])) < 0.2
    noisy = [*data[:2], np.where(wrong, (data[2] + 1) % 10, data[2]), data[3]]
    runs = {}
    for suffix, labeled in (("", data), (", 20% wrong labels", noisy)):
        for name, constrained in (("plain", False), ("with clipjax", True)):
            runs[name + suffix] = train(
                constrained, 200 if args.quick else STEPS, labeled
            )
            params, log, scores = runs[name + suffix]
            print(
                f"{name + suffix + ':':32} accuracy {scores[-5:].mean():.1%}, "
                f"{log[-1]['clip_by_global_norm/clipped_fraction'].mean():.1%} of the "
                "gradients clipped, largest norm of a unit's weights "
                f"{unit_norms(params).max():.2f}"
            )
    draw(args.plot, runs)
    print(f"Accuracies are means of the last five measurements, from {SEEDS} seeds.")
    if args.quick:
        print("This run is too short for the weights to grow.")
    print(f"picture: {args.plot}")


if __name__ == "__main__":
    main()
