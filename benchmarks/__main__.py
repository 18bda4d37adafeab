"""Command line: `python -m benchmarks`, from the root of the repository."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from benchmarks import members, tables, trees
from benchmarks.measure import race_in_groups
from benchmarks.steps import ADAM, STEPS, Recipe, Step, adam
from benchmarks.trees import Problem

_MEMORY_SCHEDULER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
_DTYPES = {"f32": "float32", "bf16": "bfloat16"}
_GROWTH_STEPS = ("global_norm", "max_norm")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [step.name for step in STEPS]
    parser.add_argument("--trees", nargs="+", choices=list(trees.TREES), default=list(trees.TREES))
    parser.add_argument("--dtypes", nargs="+", choices=list(_DTYPES), default=list(_DTYPES))
    parser.add_argument("--steps", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=20, help="how often each step is timed")
    parser.add_argument("--compile-repeats", type=int, default=2, help="how often each step is compiled")
    parser.add_argument("--memory", type=float, default=8.0, metavar="GiB", help="held by steps at a time")
    parser.add_argument("--bandwidth", type=float, metavar="GB/s", help="of the device's memory")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there, too")
    parser.add_argument("--markdown", type=Path, metavar="PATH", help="write the tables there, too")
    parser.add_argument("--growth", action="store_true", help="the second table: growth with size and leaves")
    parser.add_argument(
        "--members", action="store_true", help="the third table: what other members cost (float32)"
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="as compiled for TPUs and GPUs instead: with options of its own, see --compiled --help",
    )
    parser.add_argument(
        "--scale",
        action="store_true",
        help="from one chip to 4,096 instead: with options of its own, see --scale --help",
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, one compilation, float32")
    parser.add_argument(
        "--scheduler",
        choices=["default", "memory", "both"],
        default="default",
        help="XLA's scheduler on CPU; `both` measures the links under the other one, too",
    )
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.compile_repeats, args.dtypes = min(args.rounds, 7), 1, args.dtypes[:1]
    return args


def _memory_scheduler() -> bool:
    return _MEMORY_SCHEDULER in os.environ.get("XLA_FLAGS", "")


def _has_baseline(problem: Problem) -> bool:
    """Whether to race the baseline: 16 bits XLA would store widened, and growth has no column for it."""
    return problem.name != tables.GROWTH and problem.dtype == "float32"


def _run(steps: Iterable[Step], problem: Problem, args: argparse.Namespace) -> list[dict[str, Any]]:
    families = []
    for step in steps:
        family = {step.name: step.ours(problem.limits), f"{step.name}/peer": step.peer(problem.limits)}
        if step.baseline and _has_baseline(problem):
            family[f"{step.name}/baseline"] = step.baseline(problem.limits)
        families.append(family)
    results = race_in_groups(
        families,
        problem,
        memory=args.memory * 2**30,
        reference=(ADAM, Recipe(adam())),
        rounds=args.rounds,
        compile_repeats=args.compile_repeats,
    )
    return [
        tables.row_of(step, problem, results, memory_scheduler=_memory_scheduler(), bandwidth=args.bandwidth)
        for step in steps
    ]


def _steps(console: Console, args: argparse.Namespace) -> list[dict[str, Any]]:
    steps = [step for step in STEPS if step.name in args.steps]
    absolute = jax.default_backend() != "cpu" or args.bandwidth is not None
    rows = []
    for tree in args.trees:
        for dtype in args.dtypes:
            rows += _run(steps, trees.make(tree, trees.TREES[tree](), _DTYPES[dtype]), args)
            console.print(tables.table_of(rows[-len(steps) :], absolute=absolute))
    return rows


def _growth(console: Console, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Grow the parameters in 8 leaves, then the leaves of 1024 parameters each."""
    steps = [step for step in STEPS if step.name in _GROWTH_STEPS]
    widths = (112, 354, 1118) if args.quick else (112, 354, 1118, 3536)
    leaves = (1, 10, 100) if args.quick else (1, 10, 100, 500, 2000)
    shapes = [trees.square(8, width) for width in widths] + [trees.square(n, 32) for n in leaves]
    rows = []
    for shape in shapes:
        rows += _run(steps, trees.make(tables.GROWTH, shape, _DTYPES[args.dtypes[0]]), args)
    console.print(tables.growth_table(rows))
    return rows


def _under_memory_scheduler(
    console: Console, args: argparse.Namespace, argv: list[str]
) -> list[dict[str, Any]]:
    """Measure in a process of its own: XLA reads its flags once."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "rows.json"
        options = [*argv, "--scheduler", "default", "--json", str(found)]
        if args.scheduler == "both":
            links = [step.name for step in STEPS if step.is_link and step.name in args.steps]
            if not links:
                return []
            options += ["--steps", *links]
        flags = f"{os.environ.get('XLA_FLAGS', '')} {_MEMORY_SCHEDULER}".strip()
        console.print(f"with XLA_FLAGS={flags}")
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", *options],
            env={**os.environ, "XLA_FLAGS": flags},
            check=False,
        )
        if done.returncode:
            sys.exit(done.returncode)  # it has said why
        rows: list[dict[str, Any]] = json.loads(found.read_text())["rows"]
        return rows


def main(argv: list[str] | None = None) -> None:
    """Measure, show and write what was asked for."""
    argv = sys.argv[1:] if argv is None else argv
    if "--compiled" in argv:
        from benchmarks import compiled  # what it needs is not installed with the other benchmarks

        compiled.main([option for option in argv if option != "--compiled"])
        return
    if "--scale" in argv:
        from benchmarks import scale

        scale.main([option for option in argv if option != "--scale"])
        return
    args = _arguments(argv)
    if args.members:
        options = ["--trees", *args.trees, "--rounds", str(args.rounds), "--memory", str(args.memory)]
        members.main(options + (["--markdown", str(args.markdown)] if args.markdown else []))
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    where = tables.environment()
    rows: list[dict[str, Any]] = []
    if args.scheduler != "memory":
        console.print(", ".join(f"{key} {value}" for key, value in where.items() if value != ""))
        rows += _growth(console, args) if args.growth else _steps(console, args)
    if args.scheduler != "default":
        rows += _under_memory_scheduler(console, args, argv)
    if args.markdown:
        args.markdown.write_text(tables.markdown_of(where, rows))
    if args.json:
        args.json.write_text(json.dumps({"environment": where, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
