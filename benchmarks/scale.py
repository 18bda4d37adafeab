"""`python -m benchmarks --scale`: what bounds add to a step, on 1 to 4,096 chips, of 1e6 to 1e12 parameters.

    pip install -e '.[platforms-tpu]'
    python -m benchmarks --scale                # prints the tables
    python -m benchmarks --scale --docs docs    # and writes them into docs/scale.md, with the plot

Steps of a small transformer are compiled for 1, 16 and 256 chips of a TPU v5e and for 4,096 of a v5p, without
having one, in two widths. Their collectives do not depend on the width, and the bytes grow with it along a
line, which is what other widths are computed from. Times are those of a model: bytes by bandwidth, and for
each collective a latency. Beside them stand times measured on virtual CPU devices.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import sharded
from benchmarks.platforms import missing
from benchmarks.steps import Recipe, adam

STEPS = {
    "Adam": Recipe(adam()),
    "clip": sharded.STEPS["clip_by_global_norm"].ours,
    "bounded": sharded.STEPS["bounded, skip"].ours,
}
LABELS = {
    "Adam": "Adam alone",
    "clip": "clip_by_global_norm + Adam",
    "bounded": "bounded(clip, max_norm, skip)",
}
# By the number of chips: what is compiled, and in which widths: small leaves stay in a chip's own memory.
COMPILED = {
    1: ("v5e", "2x2", (1, 1), (1024, 2048)),
    16: ("v5e", "4x4", (4, 4), (4096, 8192)),
    256: ("v5e", "16x16", (16, 16), (16384, 32768)),
    4096: ("v5p", "16x16x16", (64, 64), (65536, 131072)),
}
# Layers and width of transformers of about 1e6, 1e7, … 1e12 parameters.
MODELS = {
    6: (5, 128),
    7: (6, 384),
    8: (12, 832),
    9: (20, 2048),
    10: (40, 4608),
    11: (80, 10240),
    12: (128, 25600),
}


class Chip(NamedTuple):
    """Published figures of a chip, from Google Cloud's pages "TPU v5e" and "TPU v5p"."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes/s of its memory
    link: float  # bytes/s to other chips, all links and one direction: half of what is published for both


CHIPS = {"v5e": Chip("v5e", 16e9, 819e9, 200e9), "v5p": Chip("v5p", 95e9, 2765e9, 600e9)}
# Assumed, and not published: what starting a collective takes, and each chip on its way.
START, HOP = 5e-6, 0.5e-6


class Figures(NamedTuple):
    """What a step of a model needs on each chip."""

    moved: float  # bytes read from memory and written
    sent: float  # bytes that collectives return
    collectives: int
    temporaries: float  # bytes


class Line(NamedTuple):
    """The figures of a compiled step as lines: of the parameters, and of the units on a chip."""

    moved: float  # bytes a parameter
    sent: float  # bytes a unit
    sent_besides: float  # bytes
    collectives: int
    temporaries: float  # bytes a parameter


def _counted(params: dict[str, Any]) -> tuple[int, int]:
    """The parameters and the units on a chip."""
    shapes = [x.sharding.shard_shape(x.shape) for x in params.values()]
    return sum(map(math.prod, shapes)), sum(shape[1] for shape in shapes if len(shape) > 1)


def compiled_line(chips: int, step: str) -> tuple[Line, list[dict[str, Any]]]:
    """Compile a step in two widths: the line through both, and what was compiled."""
    platform, topology, shape, widths = COMPILED[chips]
    mesh, points = sharded.mesh_of(platform, shape, topology), []
    for width in widths:
        params = sharded.transformer(mesh, layers=1, width=width, words=4 * width)
        found = sharded.compile_step(platform, STEPS[step], params)
        size, units = _counted(params)
        row = {"chips": chips, "step": step, "width": width, "size": size, "units": units}
        row |= {"moved": found.work.bytes, "sent": found.collective_bytes, "temporaries": found.temporaries}
        points.append({**row, "collectives": found.collectives})
    small, large = points
    rise = (large["sent"] - small["sent"]) / (large["units"] - small["units"])
    line = Line(
        moved=(large["moved"] - small["moved"]) / (large["size"] - small["size"]),
        sent=rise,
        sent_besides=max(0.0, small["sent"] - rise * small["units"]),
        collectives=sum(large["collectives"].values()),
        temporaries=max(0.0, (large["temporaries"] - small["temporaries"]) / (large["size"] - small["size"])),
    )
    return line, points


def of_model(line: Line, exponent: int, chips: int) -> Figures:
    """The figures of a transformer of about 10**exponent parameters; metrics and sums for each matrix."""
    layers, width = MODELS[exponent]
    matrices, side = 6 * layers, math.isqrt(chips)
    size, units = 12 * layers * width**2 / chips, 9 * layers * width / side
    return Figures(
        moved=line.moved * size,
        sent=line.sent * units + line.sent_besides * matrices / 8,  # compiled with 8 matrices
        collectives=line.collectives,
        temporaries=line.temporaries * size,
    )


def seconds(figures: Figures, chips: int, chip: Chip) -> tuple[float, float]:
    """The time for memory, and that for collectives: what a ring along one axis of the mesh takes."""
    side = math.isqrt(chips)
    if side == 1:
        return figures.moved / chip.bandwidth, 0.0
    each = START + 2 * (side - 1) * HOP
    return figures.moved / chip.bandwidth, figures.collectives * each + 2 * figures.sent / chip.link


def measured(rounds: int) -> list[dict[str, Any]]:
    """Times of a step on virtual CPU devices, each between the others."""
    rows = []
    for shape in ((1, 1), (2, 1), (2, 2), (4, 2)):
        like = sharded.transformer(sharded.mesh_of("cpu", shape), layers=2)
        params = {k: jax.device_put(jnp.full(x.shape, 0.05, x.dtype), x.sharding) for k, x in like.items()}
        steps, times = {}, {name: [] for name in STEPS}
        for name, recipe in STEPS.items():
            fresh = jax.tree.map(jnp.copy, params)
            steps[name] = [jax.jit(recipe.step, donate_argnums=(0, 1)), fresh, recipe.tx.init(fresh)]
        for round_ in range(rounds + 1):
            for name, held in steps.items():
                begin = time.perf_counter()
                held[1:] = jax.block_until_ready(held[0](held[1], held[2], params))
                if round_:  # the first one compiles
                    times[name].append(time.perf_counter() - begin)
        rows.append(
            {"devices": math.prod(shape), **{k: 1e3 * statistics.median(v) for k, v in times.items()}}
        )
    return rows


def _measured_apart(rounds: int) -> list[dict[str, Any]]:
    """The same in a process with eight devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
    code = f"import json; from benchmarks import scale; print(json.dumps(scale.measured({rounds})))"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def model_rows(lines: dict[tuple[int, str], Line]) -> list[dict[str, Any]]:
    """Each model on each number of chips."""
    rows = []
    for exponent in MODELS:
        for chips, (platform, *_) in COMPILED.items():
            chip, size = CHIPS[platform], 12 * MODELS[exponent][0] * MODELS[exponent][1] ** 2 / chips
            row = {"exponent": exponent, "chips": chips, "chip": chip.name}
            for step in STEPS:
                figures = of_model(lines[chips, step], exponent, chips)
                memory, waiting = seconds(figures, chips, chip)
                # Parameters, gradients and two moments in float32, and what the step needs besides.
                held = 16 * size + figures.temporaries
                row[step] = {**figures._asdict(), "memory": memory, "waiting": waiting, "held": held}
            row["fits"] = row["bounded"]["held"] < 0.6 * chip.memory  # the rest is for activations
            rows.append(row)
    return rows


def _amount(x: float, unit: str) -> str:
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= factor:
            return f"{x / factor:.3g} {prefix}{unit}"
    return f"{x:.3g} {unit}"


def _ms(x: float) -> str:
    return f"{1e3 * x:.2g}" if x < 0.1 else f"{1e3 * x:.0f}"


def _table(*rows: Sequence[Any]) -> list[str]:
    """Rows as Markdown, the first of which is the head."""
    head, *others = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return [head, f"|{'--:|' * len(rows[0])}", *others, ""]


def _compiled_cells(p: dict[str, Any]) -> tuple[Any, ...]:
    reduces = p["collectives"].get("all-reduce", 0)
    others = sum(p["collectives"].values()) - reduces
    sent, scratch = _amount(p["sent"], "B"), _amount(p["temporaries"], "B")
    return f"{p['chips']:,}", LABELS[p["step"]], f"{p['width']:,}", reduces, others, sent, scratch


def _model_cells(row: dict[str, Any]) -> tuple[str, ...]:
    adam_, clip, bounded = (row[step] for step in STEPS)
    base = adam_["memory"] + adam_["waiting"]
    added = [_ms(max(0.0, x["memory"] + x["waiting"] - base)) for x in (clip, bounded)]
    held, sent = _amount(bounded["held"], "B"), _amount(bounded["sent"], "B")
    where = f"1e{row['exponent']}", f"{row['chips']:,} {row['chip']}"
    return *where, held, _ms(base), *added, _ms(bounded["waiting"]), sent


def tables(points: list[dict[str, Any]], rows: list[dict[str, Any]], timed: list[dict[str, Any]]) -> str:
    """The tables as Markdown."""
    chips = ("chips", "step", "width", "all-reduces", "other collectives", "sent", "scratch")
    added = ("Adam, ms", "clip adds", "bounded adds", "of it waiting", "bounded sends")
    more = [step for step in STEPS if step != "Adam"]
    ratios = [
        (row["devices"], f"{row['Adam']:.0f}", *(f"{row[step] / row['Adam']:.2f}" for step in more))
        for row in timed
    ]
    lines = [
        *_table(chips, *map(_compiled_cells, points)),
        *_table(
            ("parameters", "chips", "memory a chip", *added),
            *(_model_cells(row) for row in rows if row["fits"]),
        ),
        *_table(("virtual CPU devices", "Adam, ms", *(f"{LABELS[step]}, to it" for step in more)), *ratios),
    ]
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """What bounds add to Adam, over the number of chips, a line for each size of model."""
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(7, 4.2), dpi=150)
    colors = plt.get_cmap("viridis")
    for i, exponent in enumerate(MODELS):
        here = [row for row in rows if row["exponent"] == exponent and row["fits"]]
        if not here:
            continue
        chips, color = [row["chips"] for row in here], colors(i / len(MODELS))
        total = [1e3 * sum(row["bounded"][k] - row["Adam"][k] for k in ("memory", "waiting")) for row in here]
        panel.loglog(chips, total, "o-", color=color, label=f"1e{exponent}")
        panel.loglog(chips, [1e3 * row["bounded"]["waiting"] or math.nan for row in here], ":", color=color)
    panel.set(xlabel="chips (to 256: v5e; 4,096: v5p)", ylabel="added to Adam's step, ms")
    panel.set_title("bounded(clip, max_norm, skip): solid in all, dotted waiting for collectives", fontsize=9)
    panel.set_xticks(list(COMPILED), [f"{n:,}" for n in COMPILED])
    panel.legend(title="parameters", fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    panel.grid(visible=True, which="major", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def main(argv: list[str]) -> None:
    """Compile, measure, compute, and print or write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks --scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--docs", type=Path, metavar="FOLDER", help="write scale.md's tables and plot there")
    parser.add_argument("--rounds", type=int, default=15, help="how often each step is timed")
    args = parser.parse_args(argv)
    if reason := missing("v5e"):
        sys.exit(reason)
    lines, points = {}, []
    for chips in COMPILED:
        for step in STEPS:
            lines[chips, step], found = compiled_line(chips, step)
            points += found
            print(f"compiled {LABELS[step]} for {chips:,} chips", file=sys.stderr)
    rows = model_rows(lines)
    text = tables(points, rows, _measured_apart(args.rounds))
    print(text)
    if args.docs:
        page = args.docs / "scale.md"
        before, _, rest = page.read_text().partition("<!-- tables -->\n")
        page.write_text(f"{before}<!-- tables -->\n{text}\n<!-- end -->{rest.partition('<!-- end -->')[2]}")
        plot(rows, args.docs / "scale.png")
