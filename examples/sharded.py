"""Train on a mesh of eight devices, and see that the bounds are those of one device.

    python examples/sharded.py

Without accelerators JAX makes eight virtual devices of one CPU. The batch is split over
the axis `data`, the weights over `model`. Under `jit` nothing is special: the gradient
norm is that of the whole model. All arrays keep their shardings from step to step.
"""

import argparse
import functools
import os

# Before JAX starts.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from _pictures import BLUE, ORANGE, save
from jax.sharding import NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import clipjax

WIDTH, BATCH, BOUND = 256, 128, 1.5
SPECS = {
    "w1": PartitionSpec(None, "model"),
    "b1": PartitionSpec("model"),
    "w2": PartitionSpec("model", None),
    "b2": PartitionSpec(),
}


def first_params():
    """Draw the weights of two dense layers."""
    keys = jax.random.split(jax.random.key(0))
    return {
        "w1": jax.random.normal(keys[0], (64, WIDTH)) / 8,
        "b1": jnp.zeros(WIDTH),
        "w2": jax.random.normal(keys[1], (WIDTH, 10)) / 16,
        "b2": jnp.zeros(10),
    }


def loss_of(params, x, y):
    """Return the mean cross entropy."""
    logits = jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def train(mesh, steps, images, labels):
    """Train on a mesh; return the losses, the norms and the weights."""
    tx = clipjax.bounded(
        optax.adam(3e-3),
        clip=clipjax.clip_by_global_norm(0.5),
        project=clipjax.max_norm(BOUND),
        nonfinite="skip",
    )
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params = jax.device_put(first_params(), shardings)
    of_batch = NamedSharding(mesh, PartitionSpec("data"))
    on_each_device = NamedSharding(mesh, PartitionSpec())

    def on_mesh(x):
        is_placed = isinstance(x.sharding, NamedSharding)
        return x if is_placed else jax.device_put(x, on_each_device)

    state = jax.tree.map(on_mesh, tx.init(params))
    placed = jax.tree.map(lambda x: x.sharding, (params, state))

    @functools.partial(jax.jit, donate_argnums=(0, 1), out_shardings=(*placed, None))
    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = tx.update(grads, state, params)
        return (
            optax.apply_updates(params, updates),
            state,
            {"loss": loss} | clipjax.metrics(state),
        )

    order, history = np.random.default_rng(0), []
    for _ in range(steps):
        rows = order.integers(len(labels), size=BATCH)
        batch = jax.device_put((images[rows], labels[rows]), of_batch)
        params, state, metrics = step(params, state, *batch)
        history.append(metrics)
    return clipjax.series(history, "loss"), history, params


def draw(losses, others):
    """Draw the loss, and by how much that of one device differs."""
    figure, ax = plt.subplots(figsize=(6, 4.2), layout="constrained")
    ax.semilogy(losses, color=BLUE, lw=2)
    difference = np.abs(losses - others)
    ax.semilogy(difference, ".", color=ORANGE)
    ax.text(len(losses), 0.3, "loss on 8 devices", color=BLUE, ha="right")
    ax.text(
        len(losses), 2e-6, "its difference from one device", color=ORANGE, ha="right"
    )
    ax.set(xlabel="step", ylabel="nats, log scale")
    return figure


def main():
    """Train on eight devices and on one, compare, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument(
        "--plot", default="sharded.png", help="where to save the picture"
    )
    args = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    images, steps = np.float32(images / 16), 50 if args.quick else 300

    devices = np.array(jax.devices())
    many = devices.reshape(-1, 2) if len(devices) > 1 else devices.reshape(1, 1)
    results = {}
    for name, each in (
        (f"{len(devices)} devices", many),
        ("1 device", devices[:1].reshape(1, 1)),
    ):
        results[name] = train(
            jax.sharding.Mesh(each, ("data", "model")), steps, images, labels
        )
        losses, history, params = results[name]
        norms = clipjax.series(history, "clip_by_global_norm")
        print(
            f"{name:10} last loss {losses[-1]:.4f}, first norm {norms[0]:.6f}, w1: "
            f"{params['w1'].sharding.spec}"
        )
    (losses, history, params), (others, _, _) = results.values()
    print(f"largest difference of the losses: {np.abs(losses - others).max():.1e}")
    print(
        "output units above the bound: "
        f"{len(clipjax.violations(params, clipjax.max_norm(BOUND)))}"
    )
    save(args.plot, draw, losses, others)


if __name__ == "__main__":
    main()
