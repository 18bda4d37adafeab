"""`python -m benchmarks`: what a bound costs, beside Optax or the formula by hand."""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Only steps are compiled, of which none should be found in a cache.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
if {"--compiled", "--collectives"} & set(sys.argv):
    # The devices that are compiled for are not here.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from benchmarks import calls, compiled, platforms, tables, timing
from benchmarks.members import MEMBERS, PEERS, weigh
from benchmarks.steps import ALONE, OF_ONE_STEP, STEPS
from benchmarks.trees import TREES

COMPARED = MEMBERS | PEERS
# What fills rows of the table.
Job = Callable[[], tables.Row | list[tables.Row]]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--compiled",
        action="store_true",
        help="compile for TPUs and GPUs instead of timing",
    )
    what.add_argument(
        "--collectives",
        action="store_true",
        help="count collectives on 256 and 4,096 TPUs",
    )
    what.add_argument(
        "--calls",
        action="store_true",
        help="time calls of a small step, by jax.jit and nnx.jit",
    )
    parser.add_argument(
        "--members",
        nargs="*",
        choices=COMPARED,
        metavar="MEMBER",
        help="public members and Optax's, beside Adam alone; all if none is named",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small tree and few repetitions, for CI"
    )
    parser.add_argument("--steps", nargs="+", choices=STEPS | ALONE, metavar="STEP")
    parser.add_argument(
        "--trees",
        nargs="+",
        choices=TREES,
        metavar="TREE",
        help="default: big gpt small",
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), metavar="DTYPE"
    )
    parser.add_argument(
        "--platforms", nargs="+", choices=platforms.PLATFORMS, metavar="PLATFORM"
    )
    parser.add_argument(
        "--rounds", type=int, default=21, help="how many ratios of times there are"
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the table as Markdown"
    )
    return parser.parse_args()


def _jobs(args: argparse.Namespace) -> tuple[list[str], list[Job]]:
    """Return the names of the first columns, and a function for each row."""
    by_clock = not (args.compiled or args.collectives)
    names = args.steps or list(STEPS | ALONE if by_clock and not args.quick else STEPS)
    steps = [(STEPS | ALONE)[name] for name in names]
    dtypes = args.dtypes or (["float32"] if args.quick else ["float32", "bfloat16"])
    trees = args.trees or (
        ["quick"] if args.quick else ["big", "gpt", "small", *OF_ONE_STEP]
    )
    if args.calls:
        rounds = 5 if args.quick else args.rounds
        return ["step", "compared with", "called by"], [
            lambda way=way: calls.compare(way, rounds) for way in ("jax.jit", "nnx.jit")
        ]
    if args.members is not None:
        return _members(args, dtypes)
    if args.collectives:
        places = args.platforms or (["v5e"] if args.quick else ["v5e", "v5p"])
        cases = itertools.product(
            places, args.trees or ["quick" if args.quick else "gpt"], steps
        )
        return ["step", "compared with", "chips", "tree"], [
            lambda p=p, t=t, s=s: compiled.count_collectives(s, p, t)
            for p, t, s in cases
        ]
    if args.compiled:
        places = args.platforms or (
            ["v5e", "h100"]
            if args.quick
            else ["v5e", "v6e", "tpu7x", "b200", "h100", "a100", "t4"]
        )
        trees = args.trees or (
            ["quick"] if args.quick else ["big", "gpt", *OF_ONE_STEP]
        )
        return ["step", "compared with", "device", "tree", "dtype"], [
            lambda p=p, t=t, d=d, s=s: compiled.compare(s, p, t, d)
            for p, t, d, s in itertools.product(places, trees, dtypes, steps)
            if s.runs_on(t)
        ]
    rounds = 5 if args.quick else args.rounds

    def race(tree: str, dtype: str, step: str) -> tables.Row:
        compiles = 1 if args.quick or tree in ("thousand", "many") else 3
        return timing.race(
            (STEPS | ALONE)[step], tree, dtype, rounds=rounds, compiles=compiles
        )

    return ["step", "compared with", "tree", "dtype"], [
        lambda t=t, d=d, s=s: race(t, d, s)
        for t, d, s in itertools.product(trees, dtypes, names)
        if (STEPS | ALONE)[s].runs_on(t)
    ]


def _members(
    args: argparse.Namespace, dtypes: list[str]
) -> tuple[list[str], list[Job]]:
    chosen = args.members or list(COMPARED)[:: 10 if args.quick else 1]
    every = [COMPARED[name] for name in chosen]
    if args.compiled:
        places = args.platforms or ["v5e", "v6e", "tpu7x", "h100", "b200"]
        trees = args.trees or ["huge", "stacked", "decoder", "convnet", *OF_ONE_STEP]
        return ["member", "device", "dtype"], [
            lambda p=p, d=d, m=m: weigh(m, p, trees, d)
            for p, d, m in itertools.product(places, dtypes, every)
            if any(map(m.step.runs_on, trees))
        ]
    trees = args.trees or ["big", "gpt", *OF_ONE_STEP]
    rounds = 5 if args.quick else args.rounds
    return ["member", "compared with", "tree", "dtype"], [
        lambda t=t, d=d, m=m: timing.race(m.step, t, d, rounds=rounds, compiles=1)
        for t, d, m in itertools.product(trees, dtypes, every)
        if m.step.runs_on(t)
    ]


def _progress(done: int, total: int, begin: float) -> None:
    """Draw a bar on stderr, if that is a terminal."""
    if sys.stderr.isatty():
        filled = 30 * done // total
        seconds = time.perf_counter() - begin
        bar = f"[{'#' * filled}{'.' * (30 - filled)}] {done}/{total}, {seconds:.0f} s"
        print(f"\r{bar}", end="" if done < total else "\n", file=sys.stderr, flush=True)


def main() -> None:
    """Run what the arguments ask for, print the table and write the files."""
    args = _arguments()
    head, jobs = _jobs(args)
    rows: list[tables.Row] = []
    begin = time.perf_counter()
    for done, job in enumerate(jobs):
        _progress(done, len(jobs), begin)
        found = job()
        rows += found if isinstance(found, list) else [found]
    _progress(len(jobs), len(jobs), begin)
    here = (
        "as compiled"
        if args.compiled or args.collectives
        else f"on {jax.devices()[0].device_kind}"
    )
    what = (
        "Every member of clipjax with Adam"
        if args.members is not None
        else "clipjax beside Optax or the formula by hand"
    )
    title = f"{what}, {here}, JAX {jax.__version__}"
    unit = (
        "Bytes that kernels move, and scratch memory, are in units of the parameters' "
        "own; `huge` has leaves of 64 MB, `stacked` of 1 GB."
        if args.members is not None and args.compiled
        else "Ratios are ours to theirs."
    )
    print(title, tables.as_text(head, rows), unit, tables.summary(rows), sep="\n\n")
    if args.markdown:
        table = tables.as_markdown(head, rows)
        args.markdown.write_text(f"# {title}\n\n{unit}\n\n{table}\n")


if __name__ == "__main__":
    main()
