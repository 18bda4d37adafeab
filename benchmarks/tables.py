"""Showing results: a table on the terminal, and rows for JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import jax
from rich import box
from rich.table import Table

from benchmarks.measure import Result
from benchmarks.steps import (
    ADAM,
    COMPILE_TARGET,
    LINK_TARGET_MEMORY_SCHEDULER,
    SCRATCH_TARGET,
    SMALL_TARGET,
    Step,
    bytes_moved,
)
from benchmarks.trees import Problem


def environment() -> dict[str, Any]:
    """Where and when this was measured."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": f"{len(jax.devices())} x {device.device_kind}",
        "platform": device.platform,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        **{name: importlib.metadata.version(name) for name in ("clipjax", "jax", "jaxlib", "optax")},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.processor())


def target_of(step: Step, tree: str, *, memory_scheduler: bool) -> float:
    """The highest ratio to Adam alone that is allowed on two CPU cores."""
    if tree == "small":
        return SMALL_TARGET
    return LINK_TARGET_MEMORY_SCHEDULER if step.is_link and memory_scheduler else step.target


def row_of(
    step: Step,
    problem: Problem,
    results: dict[str, Result],
    *,
    memory_scheduler: bool,
    bandwidth: float | None,
) -> dict[str, Any]:
    """Put one step's results beside its peer's, its floor and its target."""
    ours, peer = results[step.name], results[f"{step.name}/peer"]
    baseline = results.get(f"{step.name}/baseline")
    moved = bytes_moved(step, problem.dtype)
    row: dict[str, Any] = {
        "tree": problem.name,
        "dtype": problem.dtype,
        "parameters": problem.size,
        "leaves": len(problem.params),
        "scheduler": "memory" if memory_scheduler else "default",
        "step": step.name,
        "label": step.label,
        "peer": step.peer_label,
        "floor": moved / bytes_moved(None, problem.dtype),
        "target": target_of(step, problem.name, memory_scheduler=memory_scheduler),
        "ours": ours._asdict(),
        "theirs": peer._asdict(),
        "baseline": baseline._asdict() if baseline else None,
        "adam": results[ADAM]._asdict(),
        "compile_ratio": ours.compile_seconds / peer.compile_seconds,
    }
    row["misses"] = _misses(step, ours, row)
    if bandwidth:
        row["bandwidth_share"] = moved * problem.size / ours.seconds / (bandwidth * 1e9)
    return row


def _misses(step: Step, ours: Result, row: dict[str, Any]) -> list[str]:
    """Which targets a row misses; `time?` where that may be noise."""
    missed = []
    if ours.ratio > row["target"]:
        missed.append("time" if ours.is_above(row["target"]) else "time?")
    if row["tree"] != "small" and step.sweeps and not step.is_link and ours.scratch > SCRATCH_TARGET:
        missed.append("memory")
    if row["tree"] == "small" and row["compile_ratio"] > COMPILE_TARGET:
        missed.append("compile")
    return missed


GROWTH = "growth"

PLAIN: dict[str, Any] = {
    "box": box.SIMPLE_HEAD,
    "padding": (0, 1, 0, 0),
    "collapse_padding": True,
    "pad_edge": False,
    "title_justify": "left",
    "caption_justify": "left",
}


def _baseline(row: dict[str, Any]) -> str:
    return f"{row['baseline']['ratio']:.2f}" if row["baseline"] else ""


def _percent(ours: float, theirs: float) -> str:
    return " | ".join(f"{x:.1%}" if x < 0.1 else f"{x:.0%}" for x in (ours, theirs))


def table_of(rows: list[dict[str, Any]], *, absolute: bool) -> Table:
    """One table for one tree and dtype."""
    first = rows[0]
    adam = first["adam"]
    # Each cell: what clipjax takes, then what its peer does.
    table = Table(
        **PLAIN,
        title=(
            f"{first['tree']}, {first['dtype']}: {first['parameters']:,} parameters in {first['leaves']} "
            f"leaves, {first['scheduler']} scheduler. Adam alone: {adam['seconds'] * 1e3:.3g} ms, "
            f"scratch memory {adam['scratch']:.0%}, compiled in {adam['compile_seconds']:.2g} s"
        ),
        caption=(
            "clipjax | Optax. time: to Adam alone (median of paired ratios, and its standard error); "
            "baseline: the same passes with nothing exact; floor: by bytes moved; scratch: memory, to the "
            "parameters' bytes; ratio: of the compile times"
        ),
    )
    table.add_column("step", no_wrap=True)
    columns = ["time", "baseline", "floor", "target", "scratch", "compile", "ratio"]
    for column in columns + (["ms", "of bandwidth"] if absolute else []) + [""]:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        ours, theirs = row["ours"], row["theirs"]
        cells = [
            row["label"],
            f"{ours['ratio']:.2f} ±{ours['error']:.2f} | {theirs['ratio']:.2f}",
            _baseline(row),
            f"{row['floor']:.2f}",
            f"{row['target']:.2f}",
            _percent(ours["scratch"], theirs["scratch"]),
            f"{ours['compile_seconds']:.2f} s",
            f"{row['compile_ratio']:.2f}",
        ]
        if absolute:
            share = row.get("bandwidth_share")
            cells += [f"{ours['seconds'] * 1e3:.3f}", f"{share:.0%}" if share else "-"]
        over = ", ".join(row["misses"])
        table.add_row(*cells, f"[red]over: {over}[/]" if over else "[green]ok[/]")
    return table


def growth_table(rows: list[dict[str, Any]]) -> Table:
    """How time, memory and compile time grow, one step after the other."""
    table = Table(
        **PLAIN,
        title="growth: clipjax | Optax",
        caption="ratio to Adam alone; ns per parameter of the whole step; compile time in ms per leaf",
    )
    columns = [
        "step",
        "parameters",
        "leaves",
        "Adam ms",
        "ratio",
        "ns/parameter",
        "scratch",
        "compile s",
        "ms/leaf",
    ]
    for column in columns:
        table.add_column(column, justify="left" if column == "step" else "right", no_wrap=True)
    for row in sorted(rows, key=lambda r: r["step"]):
        ours, theirs = row["ours"], row["theirs"]
        table.add_row(
            row["step"],
            f"{row['parameters']:.1e}",
            str(row["leaves"]),
            f"{row['adam']['seconds'] * 1e3:.3g}",
            f"{ours['ratio']:.2f} | {theirs['ratio']:.2f}",
            f"{ours['seconds'] / row['parameters'] * 1e9:.2f}",
            _percent(ours["scratch"], theirs["scratch"]),
            f"{ours['compile_seconds']:.2f} | {theirs['compile_seconds']:.2f}",
            f"{ours['compile_seconds'] / row['leaves'] * 1e3:.1f}",
        )
    return table


def _growth_lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| step | parameters | leaves | Adam, ms | clipjax | Optax | scratch memory, ours and theirs "
        "| compile, ours and theirs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda r: r["step"]):
        ours, theirs = row["ours"], row["theirs"]
        scratch = _percent(ours["scratch"], theirs["scratch"]).replace(" |", ",")
        lines.append(
            f"| {row['label']} | {row['parameters']:.1e} | {row['leaves']} "
            f"| {row['adam']['seconds'] * 1e3:.3g} | {ours['ratio']:.2f} | {theirs['ratio']:.2f} "
            f"| {scratch} | {ours['compile_seconds']:.2f}, {theirs['compile_seconds']:.2f} s |"
        )
    return lines


def markdown_of(where: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Write the rows as Markdown tables, one for each tree, dtype and scheduler."""
    lines = [", ".join(f"{key} {value}" for key, value in where.items() if value != ""), ""]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["tree"], row["dtype"], row["scheduler"]), []).append(row)
    for (tree, dtype, scheduler), group in groups.items():
        if tree == GROWTH:
            lines += [*_growth_lines(group), ""]
            continue
        first = group[0]
        lines += [
            f"**{tree}, {dtype}**, {first['parameters']:,} parameters in {first['leaves']} leaves, "
            f"{scheduler} scheduler; Adam alone {first['adam']['seconds'] * 1e3:.3g} ms",
            "",
            "| step | clipjax | Optax | baseline | floor | target | scratch memory, ours and theirs "
            "| compile, to Optax |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in group:
            ours, theirs = row["ours"], row["theirs"]
            scratch = _percent(ours["scratch"], theirs["scratch"]).replace(" |", ",")
            lines.append(
                f"| {row['label']} | {ours['ratio']:.2f} ± {ours['error']:.2f} | {theirs['ratio']:.2f} "
                f"| {_baseline(row)} | {row['floor']:.2f} | {row['target']:.2f} | {scratch} "
                f"| {row['compile_ratio']:.1f} |"
            )
        lines.append("")
    return "\n".join(lines)
