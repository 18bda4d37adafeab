"""Draw thresholds that follow the past, at a new level and after norms of 0.

    python examples/levels.py

The norms are drawn at random, about 1. The first 100 are 0, as of a buffer that is not
filled yet. At step 500 they rise threefold, for good, and from step 1,900 to 2,100 they
are 0 again. A threshold at a norm of 0 is not drawn.
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from _pictures import GREY, ORANGE, save

import clipjax

RULES = {
    "autoclip": clipjax.autoclip(),
    "clip_by_quantile": clipjax.clip_by_quantile(),
    "clip_by_lognormal": clipjax.clip_by_lognormal(),
    "zclip": clipjax.zclip(),
    "adagc": clipjax.adagc(),
    "skip_spikes": clipjax.skip_spikes(optax.identity()),
}


def thresholds_of(name, norms):
    """Return the threshold at each step, and on how many of the last 500 it acts.

    It is NaN where the norm is 0.
    """
    tx = optax.with_extra_args_support(RULES[name])

    def step(state, norm):
        _, state = tx.update(norm[None], state)
        return state, clipjax.metrics(state)[f"{name}/threshold"]

    _, found = jax.jit(lambda: jax.lax.scan(step, tx.init(jnp.zeros(1)), norms))()
    return np.where(norms > 0, found, np.nan), np.mean(norms[-500:] > found[-500:])


def draw(norms, thresholds):
    """Draw the norms and the threshold of each rule."""
    figure, axes = plt.subplots(
        3, 2, figsize=(6, 7), layout="constrained", sharex=True, sharey=True
    )
    for (name, limits), ax in zip(thresholds.items(), axes.flat, strict=True):
        zeros = {"where": norms == 0, "transform": ax.get_xaxis_transform()}
        style = {"color": GREY, "alpha": 0.3, "lw": 0, "label": "norms are 0"}
        ax.fill_between(np.arange(len(norms)), 0, 1, **zeros, **style)
        style = {"color": plt.rcParams["text.color"], "lw": 1, "ls": ":"}
        ax.axvline(500, label="norms rise threefold", **style)
        seen = np.where(norms > 0, norms, np.nan)
        ax.plot(seen, color=GREY, lw=0.6, label="norm")
        limits = np.where(np.isfinite(limits), limits, np.nan)
        ax.plot(limits, color=ORANGE, lw=1.5, label="threshold")
        ax.set(title=name, yscale="log", ylim=(0.5, 20), yticks=[0.5, 1, 2, 4, 8, 16])
        ax.yaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
    for ax in axes[-1]:
        ax.set_xlabel("step")
    figure.supylabel("norm of the gradient, log scale")
    figure.legend(
        *ax.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
    )
    return figure


def main():
    """Follow the norms by each rule, print how often it acts at the end, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument(
        "--plot", default="levels.png", help="where to save the picture"
    )
    args = parser.parse_args()
    at = np.arange(1000 if args.quick else 2700)
    level = np.select([at < 100, at < 500, at < 1900, at < 2100], [0, 1, 3, 0], 3)
    norms = np.float32(
        level * np.exp(0.1 * np.random.default_rng(0).normal(size=at.size))
    )

    thresholds = {}
    for name in RULES:
        thresholds[name], share = thresholds_of(name, norms)
        print(f"{name} acts on {share:.0%} of the last 500 steps")
    save(args.plot, draw, norms, thresholds)


if __name__ == "__main__":
    main()
