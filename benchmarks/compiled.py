"""`python -m benchmarks --compiled`: functions as XLA compiles them for TPUs and GPUs, without having one.

pip install -e '.[platforms]'
python -m benchmarks --compiled                                   # all that has a limit
python -m benchmarks --compiled --platforms v5e h100 --steps global_norm max_norm --trees big --dtypes bf16

A figure is absolute, and in parentheses its ratio to what the function is compared with. For a TPU, bytes and
operations are those of the compiler's cost analysis; for a GPU, the operands and results of all kernels, and
what their bodies compute. "From memory" is read in the program for both: a condition takes its cheaper
branch, and a TPU's own memory does not count. Float64 is operations for each parameter. Compile time is
processor time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks import tables
from benchmarks.compiled_rows import DTYPES, LIMITS, ROWS, TREES, Limit, Row, Task, shapes_of
from benchmarks.platforms import PLATFORMS, Cost, compile_for, missing

_QUICK = 5.0  # seconds: what compiles faster is compiled again, since the first time may take longer


def cost_of(platform: str, task: Task) -> Cost:
    """Compile a task, without anything that JAX has kept of others."""
    jax.clear_caches()
    cost = compile_for(platform, task.function, *task.arguments, donate=task.donate)
    if cost.compile_seconds > _QUICK:
        return cost
    jax.clear_caches()
    again = compile_for(platform, task.function, *task.arguments, donate=task.donate)
    return min(cost, again, key=lambda cost: cost.compile_seconds)


def figures(row: Row, ours: Cost, theirs: Cost, params: dict[str, Any]) -> dict[str, float]:
    """What can have a limit."""
    size = sum(x.size for x in params.values())
    nbytes = sum(x.size * x.dtype.itemsize for x in params.values())

    def ratio(figure: str) -> float:
        mine, other = getattr(ours, figure), getattr(theirs, figure)
        return mine / other if other else float("nan")

    return {
        "bytes": ratio("bytes"),
        "from memory": ours.usual.bytes / theirs.usual.bytes,
        "floor": ours.bytes / (row.floor * size) if row.floor else float("nan"),
        "operations": ratio("operations"),
        "kernels": ratio("kernels"),
        "scratch": ours.temporaries / nbytes,
        "copies": ours.copies,
        "float64": ours.most.float64 / size,
        "compile": ratio("compile_seconds"),
    }


def _told(cost: Cost) -> dict[str, Any]:
    told = {k: v for k, v in cost._asdict().items() if k not in ("text", "usual", "most")}
    return {**told, "usual": cost.usual._asdict(), "most": cost.most._asdict()}


def measure(limit: Limit) -> dict[str, Any]:
    """Compile what a limit is about, and what it is compared with."""
    row = next(row for row in ROWS if row.name == limit.name)
    params = shapes_of(limit.tree, limit.dtype)
    found: dict[str, Any] = {**limit._asdict(), "label": row.label, "baseline": row.baseline_label}
    try:
        ours = cost_of(limit.platform, row.ours(params))
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        return {**found, "error": str(error).splitlines()[0], "over": list(limit.at_most) or ["error"]}
    theirs = cost_of(limit.platform, row.baseline(params))
    shown = figures(row, ours, theirs, params)
    # A figure that is not a number is over its limit, too.
    over = [name for name, most in limit.at_most.items() if not shown[name] <= most]
    return {**found, "ours": _told(ours), "theirs": _told(theirs), "figures": shown, "over": over}


def _cells(row: dict[str, Any]) -> list[str]:
    ours, shown = row["ours"], row["figures"]
    tpu = PLATFORMS[row["platform"]].compiler == "tpu"
    floor = "" if shown["floor"] != shown["floor"] else f", {shown['floor']:.2f} of floor"
    return [
        f"{ours['bytes'] / 1e6:.0f} ({shown['bytes']:.2f}{floor})",
        f"{ours['usual']['bytes'] / 1e6:.0f} ({shown['from memory']:.2f})",
        f"{ours['operations'] / 1e6:.0f} ({shown['operations']:.2f})",
        f"{shown['float64']:.2g}",
        "" if tpu else f"{ours['kernels']} ({shown['kernels']:.2f})",
        "" if tpu else f"{ours['copies']}",
        f"{ours['temporaries'] / 1e6:.1f} ({shown['scratch']:.1%})",
        f"{ours['compile_seconds']:.1f} ({shown['compile']:.2f})",
    ]


def table_of(rows: list[dict[str, Any]]) -> Table:
    """One table for one platform, tree and dtype."""
    first = rows[0]
    title = f"{PLATFORMS[first['platform']].label}, {first['tree']}, {first['dtype']}"
    table = Table(**tables.PLAIN, title=title)
    table.add_column("")
    columns = ("MB", "MB from memory", "M operations", "float64", "kernels", "copies", "scratch MB", "s")
    for column in (*columns, "at most", ""):
        table.add_column(column, justify="right", no_wrap=column in columns)
    for row in rows:
        cells = _cells(row) if "ours" in row else ["does not compile", *[""] * (len(columns) - 1)]
        at_most = ", ".join(f"{name} {most:g}" for name, most in row["at_most"].items())
        holds = "[green]ok[/]" if row["at_most"] else ""
        over = f"[red]over: {', '.join(row['over'])}[/]" if row["over"] else holds
        table.add_row(f"{row['label']} | {row['baseline']}", *cells, at_most, over)
    return table


def _chosen(args: argparse.Namespace) -> list[Limit]:
    limits = {limit[:4]: limit for limit in LIMITS}
    if not (args.platforms or args.trees or args.dtypes or args.steps):
        return list(LIMITS)
    every = [
        (platform, tree, dtype, name)
        for platform in args.platforms or PLATFORMS
        for tree in args.trees or ("big", "transformer", "leaves")
        for dtype in args.dtypes or ("f32",)
        for name in args.steps or [row.name for row in ROWS]
    ]
    return [limits.get(key) or Limit(*key, {}) for key in every]


def _grouped(limits: Iterable[Limit]) -> list[list[Limit]]:
    groups: dict[Any, list[Limit]] = {}
    for limit in limits:
        groups.setdefault(limit[:3], []).append(limit)
    return list(groups.values())


def main(argv: list[str]) -> None:
    """Compile what was asked for, and show it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks --compiled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--platforms", nargs="+", choices=list(PLATFORMS))
    parser.add_argument("--trees", nargs="+", choices=list(TREES))
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES))
    parser.add_argument("--steps", nargs="+", choices=[row.name for row in ROWS])
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there, too")
    args = parser.parse_args(argv)
    console = Console()
    console = console if console.is_terminal else Console(width=200)
    rows: list[dict[str, Any]] = []
    for group in _grouped(_chosen(args)):
        platform = group[0].platform
        if reason := missing(platform):
            console.print(f"{PLATFORMS[platform].label}: {reason}", markup=False)
            continue
        warm = jax.ShapeDtypeStruct((8, 128), jnp.float32)
        compile_for(platform, jnp.sum, warm)  # the first program waits for the compiler to start
        rows += (measured := [measure(limit) for limit in group])
        console.print(table_of(measured))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
