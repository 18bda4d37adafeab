"""Train one small network on handwritten digits with some broken batches, bounded in eight ways.

A broken batch has pixels a hundred times too bright and the wrong labels, which makes a spike of the
gradient, or pixels that are NaN, which makes the gradient NaN. Every method sees the same batches. The
clips also need a policy for NaN, which is `bounded(nonfinite="skip")`; only "none" has no policy.

    python examples/spikes.py
    python examples/spikes.py --steps 4000 --spikes 0.05 --plot out/more.png
    python examples/norm_log.py out/spikes.npz
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import command_line
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from command_line import Positive, Seed, Within, check_plot, figure, make_directory
from mnist import Data, load_data
from rich.console import Console
from rich.table import Table

import clipjax
from clipjax import plots

BATCH, LEARNING_RATE = 32, 0.05
BRIGHTER = 100.0
EVALUATE_EVERY = 10  # steps between two evaluations on the test set
COLORS = ("#1d1d1f", "#7f8b99", "#b8609a", "#d55e00", "#0072b2", "#009e73", "#a67c00", "#56b4e9")


class Method(NamedTuple):
    """One way of bounding an optimizer."""

    bound: Callable[[optax.GradientTransformation], optax.GradientTransformation]
    threshold: str | float | None = None  # for the norm of the whole gradient: a number, or a metric's name
    metrics: Callable[[Any], dict[str, jax.Array]] = clipjax.metrics


class Run(NamedTuple):
    """The measurements of one run: an entry for each step, or for each evaluation on the test set."""

    norms: np.ndarray
    thresholds: np.ndarray  # NaN where there is none
    clipped: np.ndarray
    skipped: np.ndarray
    losses: np.ndarray
    accuracies: np.ndarray


class Network(nn.Module):
    """Two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map pixels `(batch, pixels)` to logits `(batch, 10)`."""
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


def methods(clip: float) -> dict[str, Method]:
    """Return the methods, by their names in the table."""

    def clipping(transformation: optax.GradientTransformation, threshold: Any = None) -> Method:
        return Method(
            functools.partial(clipjax.bounded, clip=transformation, nonfinite="skip"), threshold=threshold
        )

    return {
        "none": Method(lambda optimizer: optimizer, metrics=lambda _: {}),
        "skip_nonfinite": Method(clipjax.skip_nonfinite),
        "skip_spikes": Method(clipjax.skip_spikes, "skip_spikes/threshold"),
        "clip_by_global_norm": clipping(clipjax.clip_by_global_norm(clip), clip),
        "autoclip": clipping(clipjax.autoclip(), "autoclip/threshold"),
        "zclip": clipping(clipjax.zclip(), "zclip/threshold"),
        "adagc": clipping(clipjax.adagc()),  # a threshold for each leaf
        "adaptive_grad_clip": clipping(clipjax.adaptive_grad_clip(0.01)),  # for each unit
    }


def broken_batches(steps: int, spikes: float, nans: float, seed: int) -> np.ndarray:
    """Draw the factors of each step's pixels, as float32 `(steps,)`: 1, much more, or NaN."""
    draw = np.random.default_rng(seed).random(steps)
    start = steps // 20  # the run starts without broken batches, because the statistics need some steps
    draw[:start] = 1
    factors = np.where(draw < spikes, BRIGHTER, np.where(draw < spikes + nans, np.nan, 1.0))
    return factors.astype(np.float32)


def first_params(seed: int, pixels: int) -> Any:
    """Draw the initial parameters, which are the same for every method."""
    return jax.jit(Network().init)(jax.random.key(seed), jnp.zeros((1, pixels)))


def train(method: Method, params: Any, data: Data, factors: np.ndarray, seed: int) -> Run:
    """Train with one method: all steps in one scan, without fetching any numbers in between."""
    network, tx = Network(), method.bound(optax.sgd(LEARNING_RATE, momentum=0.9))
    train_x, train_y = jnp.asarray(data.train_x), jnp.asarray(data.train_y)

    def loss_of(params: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = network.apply(params, x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, jnp.mean(logits.argmax(-1) == y)

    def step(carry: Any, inputs: Any) -> Any:
        params, state = carry
        rows, factor = inputs
        y = jnp.where(factor == 1, train_y[rows], (train_y[rows] + 1) % 10)
        grads = jax.grad(loss_of, has_aux=True)(params, factor * train_x[rows], y)[0]
        updates, after = tx.update(grads, state, params)
        norm = clipjax.functional.global_norm(grads)  # the same as the method's own, if it measures one
        seen, before = method.metrics(after), method.metrics(state)
        report = {
            "norms": norm,
            "thresholds": threshold_of(method, seen),
            "clipped": clips(seen) > clips(before) + 0.5,
            "skipped": count(seen, "/skipped") > count(before, "/skipped"),
        }
        return (optax.apply_updates(params, updates), after), report

    def block(carry: Any, inputs: Any) -> Any:
        carry, report = jax.lax.scan(step, carry, inputs)
        return carry, (report, loss_of(carry[0], data.test_x, data.test_y))

    rows = np.random.default_rng([seed, 1]).integers(len(data.train_y), size=(len(factors), BATCH))
    inputs = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, EVALUATE_EVERY, *x.shape[1:]), (rows, factors))

    scan = jax.jit(lambda carry, inputs: jax.lax.scan(block, carry, inputs)[1])
    report, (losses, accuracies) = jax.device_get(scan((params, tx.init(params)), inputs))
    return Run(**{key: value.ravel() for key, value in report.items()}, losses=losses, accuracies=accuracies)


def threshold_of(method: Method, seen: Mapping[str, Any]) -> Any:
    """Return the norm above which the method acts at this step; NaN if there is none."""
    limit = seen[method.threshold] if isinstance(method.threshold, str) else method.threshold
    limit = jnp.asarray(jnp.nan if limit is None else limit, jnp.float32)
    return jnp.where(limit < jnp.inf, limit, jnp.nan)


def count(seen: Mapping[str, Any], ending: str) -> Any:
    """Add up the metrics whose names have this ending."""
    return sum((value for key, value in seen.items() if key.endswith(ending)), jnp.zeros(()))


def clips(seen: Mapping[str, Any]) -> Any:
    """Count the steps that were clipped so far."""
    share = count(seen, "/clipped_fraction")
    names = [key.removesuffix("/clipped_fraction") for key in seen if key.endswith("/clipped_fraction")]
    return share * seen[f"{names[0]}/steps"] if names else share


def table_of(runs: Mapping[str, Run]) -> Table:
    """Put the results into a table: test accuracy and loss, and the counts of steps by what happened."""
    table = Table()
    table.add_column("method", no_wrap=True)
    for column in ("accuracy", "test loss", "clipped", "skipped", "not finite"):
        table.add_column(column, justify="right")
    for name, run in runs.items():
        table.add_row(
            name,
            f"{run.accuracies[-1]:.1%}",
            f"{run.losses[-1]:.3f}",
            *(str(np.sum(x)) for x in (run.clipped, run.skipped, ~np.isfinite(run.norms))),
        )
    return table


def draw(path: Path, runs: Mapping[str, Run]) -> None:
    """Draw the norms and thresholds of each method, and below them the losses of all methods."""
    with figure(path, 14, 9.5, fontsize=11) as drawn:
        drawn.get_layout_engine().set(hspace=0.03)
        above, below = drawn.subfigures(2, 1, height_ratios=(1.5, 1))
        grid = above.subplots(2, 4, sharex=True, sharey=True)
        handles: dict[str, Any] = {}
        for axes, (name, run) in zip(grid.flat, runs.items(), strict=True):
            plots.norms(run.norms, bound=run.thresholds, clipped=run.clipped, skipped=run.skipped, ax=axes)
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                kind = "not clipped" if label == "each step" else label.partition(" (")[0]
                handles.setdefault(kind, handle)
            axes.legend_.remove()  # one legend serves all panels
            axes.set(xlabel="", ylabel="")
            acted = np.mean(run.clipped | run.skipped)
            axes.set_title(f"{name}\nclips or skips {acted:.0%} of the steps", fontsize="medium")
        every = np.concatenate([run.norms for run in runs.values()])
        finite = every[np.isfinite(every) & (every > 0)]
        grid[0, 0].set_ylim(np.quantile(finite, 0.001) / 2, finite.max() * 6)
        above.supxlabel("step", fontsize="medium")
        above.supylabel("norm of the gradient", fontsize="medium")
        above.legend(
            handles.values(), handles, loc="outside upper left", ncols=6, frameon=False, markerscale=2
        )
        draw_losses(below.subplots(), runs)


def draw_losses(axes: Any, runs: Mapping[str, Run]) -> None:
    """Draw the loss on the test set, up to where it becomes NaN."""
    for (name, run), color in zip(runs.items(), COLORS, strict=True):
        steps, finite = EVALUATE_EVERY * (1 + np.arange(len(run.losses))), np.isfinite(run.losses)
        width = 3 if name == "skip_nonfinite" else 1.4  # "none" is the same until it ends
        axes.plot(steps, run.losses, color=color, linewidth=width, label=name, zorder=3 - width / 2)
        if not finite.all():
            axes.plot(steps[finite][-1:], run.losses[finite][-1:], "x", color=color, markersize=9, zorder=4)
    lowest = min(np.min(run.losses[np.isfinite(run.losses)]) for run in runs.values())
    axes.set(xlabel="step", ylabel="test loss", yscale="log", xlim=(0, steps[-1]), ylim=(0.8 * lowest, 6))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


Share = Annotated[float, Within(0, 0.5, "a number from 0 to 0.5")]
Blocks = Annotated[int | None, Within(EVALUATE_EVERY, 10**7, f"a whole number of at least {EVALUATE_EVERY}")]


@dataclass
class Settings:
    """Train on broken batches, bounded in eight ways."""

    steps: Blocks = None
    """training steps; None: 3000"""
    spikes: Share = 0.01
    """fraction of batches that are too bright"""
    nans: Share = 0.01
    """fraction of batches that are NaN"""
    clip: Positive = 1.0
    """the fixed threshold"""
    seed: Seed = 0
    """seed of the weights and the batches"""
    plot: Path = Path("out/spikes.png")
    """figure"""
    log: Path = Path("out/spikes.npz")
    """the norms of skip_spikes, for norm_log.py"""
    quick: bool = False
    """300 steps, to check that it runs"""

    def __post_init__(self) -> None:
        """Fill in the default that depends on another flag."""
        if self.steps is None:
            self.steps = 300 if self.quick else 3000


def run(args: Settings) -> None:
    """Train with every method, and show the results."""
    check_plot(args.plot)
    make_directory("--log", args.log.parent)
    data = load_data(None)
    steps = args.steps // EVALUATE_EVERY * EVALUATE_EVERY
    factors = broken_batches(steps, args.spikes, args.nans, args.seed)
    params = first_params(args.seed, data.train_x.shape[1])
    runs = {
        name: train(method, params, data, factors, args.seed) for name, method in methods(args.clip).items()
    }
    Console().print(table_of(runs))
    draw(args.plot, runs)
    log = clipjax.NormLog("skip_spikes")
    log.extend(runs["skip_spikes"].norms)
    log.save(args.log)
    print(f"figure: {args.plot}, norms: {args.log}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script and return its exit status."""
    return command_line.main("spikes.py", Settings, run, argv)


if __name__ == "__main__":
    sys.exit(main())
