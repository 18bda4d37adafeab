"""Keep the norms of weights: AdamH and MuonH, beside AdamW and Muon.

    python examples/kept_norms.py

A small decoder with stacked layers learns an invented language, in which the last two
words say which may come next. Each optimizer trains the matrices of the layers at three
rates, from four seeds at once; AdamW trains all else. The table shows the loss of words
that were not trained on: mean and standard deviation over the seeds.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from _pictures import BLUE, GREEN, GREY, ORANGE, save
from jax import lax

import clipjax

WORDS, LENGTH, BATCH = 64, 32, 32
WIDTH, HEADS, LAYERS = 32, 4, 2
EACH = (1, 2)  # the axes of one matrix in a stack of layers
STYLES = {
    "AdamW": (GREY, "-"),
    "Muon": (ORANGE, "-"),
    "AdamH": (GREEN, "-"),
    "MuonH": (BLUE, "--"),  # on the line of AdamH
}


def first_weights(key):
    """Draw the weights; those of the layers are stacked along their first axis."""
    keys = iter(jax.random.split(key, 9))

    def draw(*shape):
        return jax.random.normal(next(keys), shape) / shape[-2] ** 0.5

    square = dict.fromkeys(("query", "key", "value", "out"), (WIDTH, WIDTH))
    wide = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    return {
        "blocks": {name: draw(LAYERS, *size) for name, size in (square | wide).items()},
        "scales": jnp.ones((LAYERS, 2, WIDTH)),
        "words": draw(WORDS, WIDTH),
        "places": draw(LENGTH, WIDTH),
        "head": draw(WIDTH, WORDS),
    }


def logits_of(params, words):
    """Return the logits of the next words: `(batch, time, words)`."""

    def normed(x):
        return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    def block(x, layer):
        weights, scales = layer
        inner = normed(x) * scales[0]
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (
            (inner @ weights[n]).reshape(heads) for n in ("query", "key", "value")
        )
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.reshape(x.shape) @ weights["out"]
        hidden = jax.nn.relu(normed(x) * scales[1] @ weights["up"])
        return x + hidden @ weights["down"], None

    x = params["words"][words] + params["places"][: words.shape[1]]
    x, _ = lax.scan(block, x, (params["blocks"], params["scales"]))
    return normed(x) @ params["head"]


def loss_of(params, words):
    """Return the cross-entropy of each next word."""
    each = optax.softmax_cross_entropy_with_integer_labels(
        logits_of(params, words[:, :-1]), words[:, 1:]
    )
    return each.mean()


def sentences(key, count):
    """Draw sentences in which the last two words say which may come next."""
    before, last = 1.5 * jax.random.normal(jax.random.key(7), (2, WORDS, WORDS))

    def extend(pair, key):
        word = jax.random.categorical(key, before[pair[0]] + last[pair[1]])
        return (pair[1], word), word

    start = tuple(jax.random.randint(key, (2, count), 0, WORDS))
    return lax.scan(extend, start, jax.random.split(key, LENGTH))[1].T


def optimizer_of(name, rate, steps):
    """Return an optimizer for all weights, whose rates rise and then fall to 0."""
    share = optax.warmup_cosine_decay_schedule(0.0, 1.0, 20, steps)

    def rate_at(step):
        return rate * share(step)

    def rows_and_columns(tree):
        numbers = optax.contrib.MuonDimensionNumbers(1, 2)
        return jax.tree.map(lambda _: numbers, tree)

    def with_kept_norms(direction):
        return optax.chain(
            direction,
            clipjax.relative_update(axes=EACH),
            optax.scale_by_learning_rate(rate_at),
            clipjax.keep_norm(axes=EACH),
        )

    muon = {"muon_weight_dimension_numbers": rows_and_columns, "weight_decay": 0.1}
    direction = optax.contrib.scale_by_muon(weight_dimension_numbers=rows_and_columns)
    of_matrices = {
        "AdamW": optax.adamw(rate_at, b2=0.95, weight_decay=0.1),
        "AdamH": with_kept_norms(optax.scale_by_adam(b2=0.95)),
        "Muon": optax.contrib.muon(rate_at, **muon),
        "MuonH": with_kept_norms(direction),
    }
    others = optax.adamw(lambda step: 3e-3 * share(step))

    def label(params):
        return {k: "matrices" if k == "blocks" else "others" for k in params}

    parts = {"matrices": of_matrices[name], "others": others}
    log = clipjax.record_norms(["blocks/*"], of="params", stacked="blocks/*")
    return optax.chain(log, optax.partition(parts, label))


def trained(name, rate, params, text, held_out):
    """Train; return the loss of other sentences, and the norms at each step."""
    tx = optimizer_of(name, rate, len(text))

    def step(carry, words):
        params, state = carry
        grads = jax.grad(loss_of)(params, words)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), clipjax.metrics(state)

    (params, _), history = lax.scan(step, (params, tx.init(params)), text)
    return loss_of(params, held_out), history["record_norms/params/blocks/*/0"]


def draw(results, seeds):
    """Draw the norms of the first layer, and the losses at each learning rate."""
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(6, 7.6), layout="constrained")
    for name, (rates, losses, norms) in results.items():
        color, line = STYLES[name]
        style = {"color": color, "ls": line, "lw": 2.5}
        norm = norms[1].mean(axis=0)
        top.plot(norm, **style)
        if name != "AdamH":
            words, down = ("AdamH, MuonH", 18) if name == "MuonH" else (name, -6)
            at = len(norm), norm[-1]
            text = {"textcoords": "offset points", "ha": "right", "color": color}
            top.annotate(words, at, (0, -down), **text)
        mean = losses.mean(axis=1)
        bottom.errorbar(
            rates, mean, losses.std(axis=1), fmt="o", capsize=4, elinewidth=2, **style
        )
        end = 0 if name == "AdamW" else -1  # where there is room
        at = rates[end], mean[end]
        bottom.annotate(name, at, (7, 3), textcoords="offset points", color=color)
    seen = f"mean of {seeds} seeds"
    top.set(title="Norm of the first layer's matrices, at the middle rate")
    top.set(ylabel=f"norm, {seen}", ylim=(0, None), xlabel="step")
    bottom.set(title="Loss of sentences held out", xlabel="peak learning rate")
    bottom.set(ylabel=f"nats per word: mean and\nstandard deviation, {seeds} seeds")
    bottom.set(xscale="log", xlim=(0.0025, 0.35))
    each = [0.003, 0.01, 0.03, 0.08, 0.16]
    bottom.set_xticks(each, [f"{rate:g}" for rate in each])
    bottom.minorticks_off()
    return figure


def main():
    """Print the table, and draw the norms of the first layer and the losses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two, few steps, one seed")
    parser.add_argument("--plot", default="kept_norms.png", help="where to save it")
    args = parser.parse_args()
    steps, seeds = (30, 1) if args.quick else (500, 4)
    rates = {"AdamH": [0.02, 0.04, 0.08], "MuonH": [0.04, 0.08, 0.16]}
    if not args.quick:
        rates |= {"AdamW": [0.003, 0.01, 0.03], "Muon": [0.02, 0.04, 0.08]}
    text = sentences(jax.random.key(0), steps * BATCH).reshape(steps, BATCH, LENGTH)
    held_out = sentences(jax.random.key(1), 512)
    params = jax.vmap(first_weights)(jax.random.split(jax.random.key(2), seeds))
    results = {}
    print("optimizer, rate, loss, growth of the norm")
    for name, each in sorted(rates.items()):
        of_rate = jax.vmap(functools.partial(trained, name), (None, 0, None, None))
        of_rates = jax.jit(jax.vmap(of_rate, (0, None, None, None)))
        found, norms = of_rates(jnp.array(each), params, text, held_out)
        for rate, losses, size in zip(each, found, norms.mean(axis=1), strict=True):
            print(
                f"{name:5} {rate:<5} {losses.mean():.3f}±{losses.std():.3f} "
                f"{size[-1] / size[0]:.2f}"
            )
        results[name] = each, found, norms
    save(args.plot, draw, results, seeds)


if __name__ == "__main__":
    main()
