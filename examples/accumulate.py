"""Accumulate gradients, leave out one that is NaN, and plot the norm of each layer.

    python examples/accumulate.py

`bounded(..., accumulate=4, nonfinite="skip")` clips the mean of four micro-batches and
takes one step for them. A micro-batch whose gradient is not finite is left out and
counted, and the next one takes its place. The training loop is that of a Flax
`TrainState`.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from _pictures import save
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import clipjax
from clipjax import plots

MICRO_BATCH, ACCUMULATE = 16, 4


class Network(nn.Module):
    """Three dense layers."""

    @nn.compact
    def __call__(self, x):
        """Map pixels (batch, 64) to logits (batch, 10)."""
        x = nn.relu(nn.Dense(128, name="first")(x))
        x = nn.relu(nn.Dense(64, name="second")(x))
        return nn.Dense(10, name="out")(x)


@jax.jit
def step(state, x, y):
    """Take in one micro-batch."""

    def loss_of(params):
        logits = state.apply_fn({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    state = state.apply_gradients(grads=grads)
    return state, loss, clipjax.metrics(state.opt_state)


def draw(losses, history):
    """Draw the losses, and the norms of the layers."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(6, 8), layout="constrained")
    top.plot(losses, color=plots.COLORS[0], lw=1, label="loss")
    # A loss of NaN has no height.
    left_out = np.flatnonzero(np.isnan(losses))
    style = {"ymin": 0.95, "color": plots.COLORS[1], "lw": 1.5}
    for number in left_out:
        top.axvline(number, **style)
    top.plot([], [], "|", ms=9, mew=1.5, color=plots.COLORS[1], label="NaN, left out")
    top.set(title="Loss of each micro-batch of 16 images", xlabel="micro-batch")
    top.set(ylabel="loss (nats)", ylim=(0, 1.15 * np.nanmax(losses)))
    top.legend(loc="center right", frameon=False)
    plots.group_norms(history, ax=bottom)
    bottom.set_title("Norm of each layer's mean gradient")
    bottom.set_xlabel("step of the optimizer, of 4 micro-batches")
    return figure


def main():
    """Train, log and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer micro-batches")
    parser.add_argument(
        "--plot", default="accumulate.png", help="where to save the picture"
    )
    args = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    images = np.float32(images / 16)

    network = Network()
    params = network.init(jax.random.key(0), images[:1])["params"]
    tx = clipjax.bounded(
        optax.adam(3e-3),
        clip=[
            clipjax.record_norms(1, name="gradients"),
            clipjax.clip_by_global_norm(0.5),
        ],
        nonfinite="skip",
        accumulate=ACCUMULATE,
    )
    state = TrainState.create(apply_fn=network.apply, params=params, tx=tx)

    order, losses, history = np.random.default_rng(0), [], []
    for number in range(200 if args.quick else 1200):
        rows = order.integers(len(labels), size=MICRO_BATCH)
        # A broken micro-batch now and then.
        x = images[rows] * (jnp.nan if number % 50 == 30 else 1)
        state, loss, metrics = step(state, x, labels[rows])
        losses.append(loss)
        history.append(metrics)
    losses, last = np.array(losses), history[-1]
    print(f"micro-batches: {len(losses)}, left out: {last['skip_nonfinite/skipped']}")
    print(f"steps of the optimizer: {last['clip_by_global_norm/steps']}")
    print(
        f"loss: {np.nanmean(losses[:50]):.2f} at first, "
        f"{np.nanmean(losses[-50:]):.2f} at the end"
    )
    save(args.plot, draw, losses, history)


if __name__ == "__main__":
    main()
