"""Train a small network of Flax NNX with constrained filters, and log its metrics.

    python examples/nnx_cnn.py

`clipjax.flax.unit_axes(model)` asks the layers which weights belong to one unit: the
filter of a convolution, the incoming weights of a dense unit. The digits come with
scikit-learn.
"""

import argparse

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from _pictures import save
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import clipjax
from clipjax import plots
from clipjax.flax import unit_axes

BATCH, RADIUS = 64, 2.0


class Network(nnx.Module):
    """Two convolutions and a dense layer."""

    def __init__(self, rngs):
        """Make the layers."""
        self.first = nnx.Conv(1, 16, (3, 3), strides=2, rngs=rngs)
        self.second = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.out = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, x):
        """Map images (batch, 8, 8, 1) to logits (batch, 10)."""
        x = nnx.relu(self.second(nnx.relu(self.first(x))))
        return self.out(x.reshape(len(x), -1))


def loss_of(model, x, y):
    """Return the mean cross entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


@nnx.jit
def step(model, optimizer, x, y):
    """Take one step."""
    loss, grads = nnx.value_and_grad(loss_of)(model, x, y)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def accuracy(model, x, y):
    """Return the share of right answers."""
    return jnp.mean(model(x).argmax(-1) == y)


def draw(history, params, axes):
    """Draw the norms of gradients, and those of the units of the weights."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(6, 8), layout="constrained")
    plots.group_norms(history, ax=top)
    top.set(title="Norm of each layer's gradient", ylabel="norm, log scale")
    plots.unit_norms(params, axes=axes, radius=RADIUS, ax=bottom)
    bottom.set_title("Norms of filters and of dense units")
    return figure


def main():
    """Train, log and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer epochs")
    parser.add_argument(
        "--plot", default="nnx_cnn.png", help="where to save the picture"
    )
    args = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    images = np.float32(images / 16).reshape(-1, 8, 8, 1)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=0.2, random_state=0
    )

    model = Network(nnx.Rngs(0))
    axes = unit_axes(model)
    print(
        "axes that are reduced:",
        *(f"  {path}: {reduced}" for path, reduced in axes.items()),
        sep="\n",
    )
    tx = clipjax.bounded(
        optax.adam(3e-3),
        clip=[
            clipjax.record_norms(1, name="gradients"),
            clipjax.clip_by_global_norm(3.0),
        ],
        project=clipjax.max_norm(RADIUS, axes=axes),
        nonfinite="skip",
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    order, history = np.random.default_rng(0), []
    for epoch in range(2 if args.quick else 10):
        for rows in np.array_split(
            order.permutation(len(train_y)), len(train_y) // BATCH
        ):
            step(model, optimizer, train_x[rows[:BATCH]], train_y[rows[:BATCH]])
            history.append(clipjax.metrics(optimizer))
        clipped = history[-1]["clip_by_global_norm/clipped_fraction"]
        right = accuracy(model, test_x, test_y)
        print(
            f"epoch {epoch}: accuracy {right:.1%}, {clipped:.1%} of the gradients "
            "clipped"
        )
    save(args.plot, draw, history, nnx.state(model, nnx.Param), axes)


if __name__ == "__main__":
    main()
