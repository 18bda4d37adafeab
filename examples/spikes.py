"""Train with broken batches, bounded in several ways, and choose a threshold.

    python examples/spikes.py

A broken batch has pixels a hundred times too bright and wrong labels, which makes a
spike of the gradient norm, or pixels that are NaN. Every method has its defaults, and
sees the same batches from five seeds at once; nothing is tuned. `suggest` replays the
norms of the first run, and says which threshold each rule would have used. `bad_steps`
says which layer the last bad steps came from.
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import clipjax
from clipjax import plots

SEEDS, BATCH = 5, 32


def methods():
    """Return optimizers by name."""
    sgd = optax.sgd(0.05, momentum=0.9)

    def clipped(clip):
        return clipjax.bounded(sgd, clip=clip, nonfinite="skip")

    return {
        "nothing but a skip of NaN": clipped(clipjax.clip_by_global_norm(jnp.inf)),
        "clip_by_global_norm(1.0)": clipped(clipjax.clip_by_global_norm(1.0)),
        "autoclip()": clipped(clipjax.autoclip()),
        "zclip()": clipped(clipjax.zclip()),
        "adaptive_grad_clip()": clipped(clipjax.adaptive_grad_clip()),
        "skip_spikes()": clipjax.skip_spikes(sgd),
    }


def logits_of(params, x):
    """Apply two dense layers."""
    return jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def train(tx, data, factors):
    """Train from all seeds in one scan.

    Returns:
      The history of the first seed, the accuracies (seeds, steps), and its last state.
    """
    tx = optax.chain(clipjax.record_norms("leaf", name="gradients", keep=8), tx)
    train_x, test_x, train_y, test_y = data

    def loss_of(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(
            logits_of(params, x), y
        ).mean()

    def step(carry, inputs):
        params, state = carry
        rows, factor = inputs
        y = jnp.where(factor == 1, train_y[rows], (train_y[rows] + 1) % 10)
        loss, grads = jax.value_and_grad(loss_of)(params, factor * train_x[rows], y)
        updates, state = tx.update(grads, state, params, loss=loss)
        params = optax.apply_updates(params, updates)
        right = jnp.mean(logits_of(params, test_x).argmax(-1) == test_y)
        return (params, state), (clipjax.metrics(state), right)

    def run(seed):
        keys = jax.random.split(jax.random.key(seed), 3)
        params = {
            "w1": jax.random.normal(keys[0], (64, 64)) / 8,
            "b1": jnp.zeros(64),
            "w2": jax.random.normal(keys[1], (64, 10)) / 8,
            "b2": jnp.zeros(10),
        }
        rows = jax.random.randint(keys[2], (len(factors), BATCH), 0, len(train_y))
        return jax.lax.scan(step, (params, tx.init(params)), (rows, factors))

    (_, state), (history, accuracies) = jax.jit(jax.vmap(run))(jnp.arange(SEEDS))
    first = jax.tree.map(lambda x: x[0], (history, state))
    return first[0], np.asarray(accuracies), first[1]


def main():
    """Train with each method, print a table, suggest thresholds, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument(
        "--spikes", type=float, default=0.02, help="the share of broken batches"
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
    draws = np.random.default_rng(0).random(300 if args.quick else 2000)
    draws[:100] = 1  # statistics need some steps
    broken = np.where(
        draws < args.spikes, 100.0, np.where(draws < 1.5 * args.spikes, np.nan, 1.0)
    )

    results = {}
    for name, tx in methods().items():
        results[name] = train(tx, data, np.float32(broken))
        _, accuracies, _ = results[name]
        ends = accuracies[:, -50:].mean(1)
        print(
            f"{name:28} accuracy: mean after step 100 {accuracies[:, 100:].mean():.1%},"
            f" at the end {ends.mean():.1%}, of the worst seed {ends.min():.1%}"
        )
    history, _, _ = results["nothing but a skip of NaN"]
    norms = clipjax.series(history, "skip_nonfinite")
    print("\nwhat each rule would have done with these norms:")
    for rule, found in clipjax.suggest(norms).items():
        print(
            f"  {rule:22} threshold {found['threshold']:.3g}, clips "
            f"{found['clip_rate']:.1%} of the steps"
        )

    plt.rcParams["font.size"] = 13
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(6, 8), layout="constrained")
    history, _, _ = results["clip_by_global_norm(1.0)"]
    plots.norms(history, ax=top).set_title("Gradient norms, spikes and NaN")
    for (name, (_, accuracies, _)), style in zip(
        results.items(), ("-", "--", "-.", ":", "-", "--"), strict=True
    ):
        smooth = np.convolve(accuracies.mean(0), np.ones(20) / 20, "valid")
        bottom.plot(100 * smooth, style, lw=1.5, label=name)
    bottom.set(title="Test accuracy, mean of 5 seeds", xlabel="step", ylabel="%")
    bottom.legend(fontsize=11)
    figure.savefig(args.plot, dpi=90)

    _, _, state = results["skip_spikes()"]
    print("\nthe last bad steps of the run with skip_spikes():")
    for each in clipjax.bad_steps(state):
        print(f"  {each}")
    print(f"picture: {args.plot}")


if __name__ == "__main__":
    main()
