"""What the other members cost, beside `clip_by_global_norm`: `python -m benchmarks --members`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import optax
from rich import box
from rich.console import Console
from rich.table import Table

import clipjax
from benchmarks import tables, trees
from benchmarks.measure import Result, race_in_groups
from benchmarks.steps import ADAM, Recipe, adam
from benchmarks.trees import Problem

REFERENCE = "clip_by_global_norm"
TARGET = 1.05  # of the step with the reference, for what measures the gradient once, as it does


class Contestant(NamedTuple):
    """A train step, compared with the one with `clip_by_global_norm`."""

    tx: optax.GradientTransformation
    floor: float  # bytes that it must move, to the 32 of the reference for each float32 parameter
    target: float | None = TARGET


def contestants(max_norm: float) -> dict[str, Contestant]:
    """Make them all.

    The gradients of a benchmark are the same at each step, which changes no cost: every step measures,
    rescales and remembers, whatever comes of it. Transformations that skip steps skip none here.
    """
    steps = {
        ADAM: Contestant(adam(), floor=28 / 32, target=None),
        REFERENCE: Contestant(
            optax.chain(clipjax.clip_by_global_norm(max_norm), adam()), floor=1, target=None
        ),
    }
    clips = {
        "clip_by_group_norm": clipjax.clip_by_group_norm({"*[13579]*": max_norm, "*": max_norm}),
        "autoclip": clipjax.autoclip(),
        "zclip": clipjax.zclip(),
        "clip_by_lognormal": clipjax.clip_by_lognormal(),
        "clip_by_quantile": clipjax.clip_by_quantile(),
        "adagc": clipjax.adagc(),
        "clip_by_moving_max": clipjax.clip_by_moving_max(),
        "normalize_by_moving_norm": clipjax.normalize_by_moving_norm(),
        "record_norms, clip_by_norm": optax.chain(clipjax.record_norms("leaf"), clipjax.clip_by_norm(1.0)),
    }
    steps |= {name: Contestant(optax.chain(clip, adam()), floor=1) for name, clip in clips.items()}
    read_weights = {
        "adaptive_grad_clip": clipjax.adaptive_grad_clip(),
        "tangent_cone": clipjax.tangent_cone(1e-3),
        "tangent_space": clipjax.tangent_space(),
    }
    steps |= {
        name: Contestant(optax.chain(clip, adam()), floor=36 / 32, target=None)
        for name, clip in read_weights.items()
    }
    # Replaces the learning rate: what Adam makes of the gradient is written, measured and read.
    sphere = optax.chain(optax.scale_by_adam(mu_dtype="float32"), clipjax.hyperball(1e-2))
    steps["hyperball"] = Contestant(sphere, floor=40 / 32, target=None)
    # Keep the update until it is known whether the step is taken.
    steps["skip_nonfinite"] = Contestant(clipjax.skip_nonfinite(adam()), floor=1, target=None)
    steps["skip_spikes"] = Contestant(clipjax.skip_spikes(adam()), floor=1, target=None)
    peer = optax.apply_if_finite(adam(), max_consecutive_errors=100)
    steps["optax.apply_if_finite"] = Contestant(peer, floor=1, target=None)
    return steps


STEPS = contestants(1.0)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.members", description=__doc__)
    names = [name for name in STEPS if name != REFERENCE]
    parser.add_argument("--trees", nargs="+", choices=list(trees.TREES), default=["big", "transformer"])
    parser.add_argument("--steps", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=20, help="how often each step is timed")
    parser.add_argument("--memory", type=float, default=8.0, metavar="GiB", help="held by steps at a time")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write the tables there, too")
    return parser.parse_args(argv)


def _run(problem: Problem, args: argparse.Namespace) -> dict[str, Result]:
    field = contestants(problem.limits.global_norm)
    recipes = {name: Recipe(field[name].tx) for name in (REFERENCE, *args.steps)}
    reference = REFERENCE, recipes.pop(REFERENCE)
    return race_in_groups(
        [{name: recipe} for name, recipe in recipes.items()],
        problem,
        memory=args.memory * 2**30,
        rounds=args.rounds,
        compile_repeats=1,
        reference=reference,
    )


def _cells(name: str, result: Result) -> list[str]:
    contestant = STEPS[name]
    return [
        name,
        f"{result.ratio:.2f} ± {result.error:.2f}",
        f"{contestant.floor:.2f}",
        f"{contestant.target:.2f}" if contestant.target else "-",
        f"{result.scratch:.0%}",
    ]


COLUMNS = ["step", "time", "floor", "target", "scratch memory"]


def _title(problem: Problem, results: dict[str, Result]) -> str:
    return (
        f"{problem.name}, {problem.dtype}: {problem.size:,} parameters in {len(problem.params)} leaves; "
        f"clip_by_global_norm and Adam {results[REFERENCE].seconds * 1e3:.3g} ms"
    )


def _table(problem: Problem, results: dict[str, Result]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title=_title(problem, results),
        title_justify="left",
        caption=(
            "time: to the step with clip_by_global_norm and Adam (median of paired ratios, and its "
            "standard error)"
        ),
        caption_justify="left",
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "step" else "right", no_wrap=True)
    for name, result in results.items():
        target = STEPS[name].target
        over = target is not None and result.is_above(target)
        table.add_row(*_cells(name, result), style="red" if over else None)
    return table


def _markdown(problem: Problem, results: dict[str, Result]) -> str:
    lines = [f"**{_title(problem, results)}**", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(_cells(name, result))} |" for name, result in results.items()]
    return "\n".join([*lines, ""])


def main(argv: list[str] | None = None) -> None:
    """Measure, show and write what was asked for."""
    args = _arguments(sys.argv[1:] if argv is None else argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    where = ", ".join(f"{key} {value}" for key, value in tables.environment().items() if value != "")
    console.print(where)
    written = [where, ""]
    for tree in args.trees:
        problem = trees.make(tree, trees.TREES[tree](), "float32")
        results = _run(problem, args)
        console.print(_table(problem, results))
        written.append(_markdown(problem, results))
    if args.markdown:
        args.markdown.write_text("\n".join(written))


if __name__ == "__main__":
    main()
