"""Train a small language model whose attention logits would grow, and bound them.

    python examples/transformer.py
    python examples/transformer.py --devices 8      # on 8 virtual devices of one CPU

A decoder in Flax NNX, with stacked layers, activations in bfloat16 and weights in
float32. Its data are random words that are said twice: only attention can know the
second half. Muon trains the matrices, which needs no clip, since it takes no notice of
a gradient's scale; AdamW with a clip trains the rest. `qk_clip` bounds the attention
logits of each head, which the forward pass returns; `skip_spikes` watches norm and
loss; `record_norms` measures each layer.
"""

import argparse
import os

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--quick", action="store_true", help="fewer steps")
parser.add_argument(
    "--devices", type=int, default=1, help="how many virtual devices share a batch"
)
parser.add_argument(
    "--plot", default="transformer.png", help="where to save the picture"
)
args = parser.parse_args()
# Before JAX starts.
os.environ.setdefault(
    "XLA_FLAGS", f"--xla_force_host_platform_device_count={args.devices}"
)

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from _pictures import BLUE, GREY, save
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import clipjax

WORDS, LENGTH, BATCH = 64, 64, 32
WIDTH, HEADS, LAYERS, THRESHOLD = 64, 4, 3, 25.0


class Block(nnx.Module):
    """Attention and a perceptron, each after a norm and beside a shortcut."""

    def __init__(self, rngs):
        """Make the layers."""
        share = {"use_bias": False, "dtype": jnp.bfloat16, "rngs": rngs}
        heads = (HEADS, WIDTH // HEADS)
        self.query, self.key, self.value = (
            nnx.LinearGeneral(WIDTH, heads, **share) for _ in range(3)
        )
        self.out = nnx.LinearGeneral(heads, WIDTH, axis=(-2, -1), **share)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, **share)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, **share)
        self.norm_1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.norm_2 = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        """Return the activations, and the largest logit of each head as it is used."""
        normed = self.norm_1(x)
        q, k, v = self.query(normed), self.key(normed), self.value(normed)
        logits = (
            jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32)
            / (WIDTH // HEADS) ** 0.5
        )
        logits = jnp.where(jnp.tri(x.shape[1], dtype=bool), logits, -1e30)
        x = x + self.out(
            jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(logits).astype(v.dtype), v)
        )
        return x + self.down(nnx.relu(self.up(self.norm_2(x)))), logits.max(
            axis=(0, 2, 3)
        )


class Decoder(nnx.Module):
    """Words and their places, a stack of blocks, and the words that may come next."""

    def __init__(self, rngs):
        """Make the layers; those of the blocks are stacked along their first axis."""
        self.words = nnx.Embed(WORDS, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Block))(rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, words):
        """Return logits of next words, and the largest of attention (layers, heads)."""
        x = self.words(words) + self.places(jnp.arange(words.shape[1]))
        run = nnx.scan(
            lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0)
        )
        x, max_logits = run(self.blocks, x)
        return self.words.attend(self.norm(x)).astype(jnp.float32), max_logits


def matrices(params):
    """Say for Muon which axes of stacked kernels are rows, columns; None is AdamW."""

    def numbers(path, leaf):
        if leaf.ndim < 3:  # embeddings, and the scales of norms, stacked or not
            return None
        # Heads are rows of `out`, else columns.
        rows = leaf.ndim - 2 if "out" in jax.tree_util.keystr(path) else 1
        return optax.contrib.MuonDimensionNumbers(
            tuple(range(1, rows + 1)), tuple(range(rows + 1, leaf.ndim))
        )

    return jax.tree_util.tree_map_with_path(numbers, params)


def optimizer_of(project):
    """Return all that happens to a gradient on its way into the weights."""
    rates = [optax.warmup_constant_schedule(0.0, peak, 20) for peak in (0.05, 3e-3)]
    return clipjax.skip_spikes(
        optax.chain(
            clipjax.record_norms(1, name="gradients", stacked="blocks/*"),
            optax.masked(
                clipjax.clip_by_global_norm(1.0), clipjax.matching("embedding", "scale")
            ),
            optax.contrib.muon(
                rates[0],
                adam_learning_rate=rates[1],
                muon_weight_dimension_numbers=matrices,
            ),
            *project,
        ),
        window=32,
    )


@nnx.jit
def step(model, optimizer, words):
    """Take one step; return the loss and the largest attention logit."""

    def loss_of(model):
        logits, max_logits = model(words[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, words[:, 1:]
        ).mean(), max_logits

    (loss, max_logits), grads = nnx.value_and_grad(loss_of, has_aux=True)(model)
    optimizer.update(model, grads, loss=loss, max_logits={"blocks": max_logits})
    return loss, max_logits.max()


def train(steps, mesh, *project):
    """Train a model; return losses, largest logits, and the metrics of each step."""
    model = Decoder(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optimizer_of(project), wrt=nnx.Param)
    nnx.update(
        (model, optimizer),
        jax.device_put(
            nnx.state((model, optimizer)), NamedSharding(mesh, PartitionSpec())
        ),
    )
    keys, seen = jax.random.split(jax.random.key(1), steps), []
    for key in keys:
        half = jax.random.randint(key, (BATCH, LENGTH // 2), 0, WORDS)
        words = jax.device_put(
            jnp.concatenate([half, half], axis=1),
            NamedSharding(mesh, PartitionSpec("data")),
        )
        seen.append((*step(model, optimizer, words), clipjax.metrics(optimizer)))
    losses, largest, history = zip(*jax.device_get(seen), strict=True)
    return losses, largest, history


def draw(largest):
    """Draw the largest logits without and with a bound."""
    figure, ax = plt.subplots(figsize=(6, 4.2), layout="constrained")
    for color, (name, each) in zip((GREY, BLUE), largest.items(), strict=True):
        ax.plot(each, color=color, lw=2, label=name)
    ink = plt.rcParams["text.color"]
    ax.axhline(THRESHOLD, color=ink, ls="--", label=f"threshold {THRESHOLD:.0f}")
    ax.set(title="Largest attention logit of all heads", xlabel="step")
    ax.set(ylabel="logit", ylim=(0, None))
    ax.legend(loc="upper left")
    return figure


def main():
    """Train without and with a bound on the logits, and draw both."""
    mesh = jax.make_mesh((args.devices,), ("data",), axis_types=(AxisType.Auto,))
    each_largest = {}
    runs = {"without": (), "with qk_clip": (clipjax.qk_clip(THRESHOLD),)}
    for name, project in runs.items():
        losses, largest, history = train(40 if args.quick else 300, mesh, *project)
        each_largest[name] = largest
        skipped = int(history[-1]["skip_spikes/skipped"])
        print(
            f"{name}: loss {losses[-1]:.2f}, largest attention logit "
            f"{largest[-1]:.0f}, {skipped} steps skipped"
        )
    save(args.plot, draw, each_largest)


if __name__ == "__main__":
    main()
