"""What bounding singular values costs: each way beside one SVD of the same matrix.

Run `python -m benchmarks.spectral` from the root of the repository; `--write PATH` writes Markdown.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import clipjax

_SHAPES = ((64, 64), (256, 256), (256, 1024), (1024, 1024))
_HEADER = ("matrix", "SVD", "svd", "newton_schulz", "inside", "loss, svd", "loss, newton_schulz")
_CLIPS = ("matrix", "hard", "hard, far", "soft", "soft, far", "soft, svd", "soft, svd, far")
_FAR = 1000.0

Clock = Callable[[], float]
_Contestants = dict[str, tuple[Callable[[Any], Any], jax.Array]]


def _matrix(shape: tuple[int, int], top: float) -> jax.Array:
    """Random, as a layer is, with its largest singular value at `top`."""
    matrix = np.random.default_rng(0).standard_normal(shape)
    return jnp.asarray(top * matrix / np.linalg.norm(matrix, 2), jnp.float32)


def _svd(w: jax.Array) -> Any:
    return jnp.linalg.svd(w, full_matrices=False)


def _caps(shape: tuple[int, int]) -> _Contestants:
    """A function and its matrix; for the caps three tenths above the bound, or inside it."""
    outside, inside = _matrix(shape, 1.3), _matrix(shape, 0.99)
    return {
        "SVD": (_svd, outside),
        "svd": (clipjax.spectral_cap(1.0).__call__, outside),
        "newton_schulz": (clipjax.spectral_cap(1.0, method="newton_schulz").__call__, outside),
        "inside": (clipjax.spectral_cap(1.0, method="newton_schulz").__call__, inside),
    }


def _clips(shape: tuple[int, int]) -> _Contestants:
    """The clip of gradients by default and softly, near its bound and far outside."""

    def clip(**options: Any) -> Callable[[Any], Any]:
        tx = clipjax.clip_by_spectral_norm(1.0, **options)
        return lambda w: tx.update(w, tx.init(w))

    near, far = _matrix(shape, 1.3), _matrix(shape, _FAR)
    ways = {"hard": clip(), "soft": clip(soft=True), "soft, svd": clip(soft=True, method="svd")}
    found: _Contestants = {"SVD": (_svd, near)}
    for name, function in ways.items():
        found |= {name: (function, near), f"{name}, far": (function, far)}
    return found


def _seconds(function: Callable[[Any], Any], w: jax.Array, clock: Clock = time.perf_counter) -> float:
    begin = clock()
    jax.block_until_ready(function(w))
    return clock() - begin


def _race(
    contestants: _Contestants, rounds: int, clock: Clock = time.perf_counter
) -> tuple[_Contestants, float, dict[str, float]]:
    """Let all take turns: compiled, with the least time of an SVD, and all others' times in units of it."""
    field = {name: (jax.jit(function).lower(w).compile(), w) for name, (function, w) in contestants.items()}
    for function, w in field.values():
        _seconds(function, w)
    samples: dict[str, list[float]] = {name: [] for name in field}
    names, shuffle = list(field), random.Random(0)
    for _ in range(rounds):
        for name in shuffle.sample(names, len(names)):
            samples[name].append(_seconds(*field[name], clock))
    ratios = {
        name: statistics.median(a / b for a, b in zip(samples[name], samples["SVD"], strict=True))
        for name in names[1:]
    }
    return field, min(samples["SVD"]), ratios


def measure(shape: tuple[int, int], rounds: int) -> tuple[str, ...]:
    """One row of the table of caps."""
    field, seconds, ratios = _race(_caps(shape), rounds)
    tops = [
        np.linalg.norm(np.asarray(field[name][0](field[name][1]), np.float64), 2)
        for name in ("svd", "newton_schulz")
    ]
    return (
        "x".join(map(str, shape)),
        f"{1e3 * seconds:.3g} ms",
        *(f"{ratio:.2f}" for ratio in ratios.values()),
        *(f"{1 - top:.1e}" for top in tops),
    )


def measure_clips(shape: tuple[int, int], rounds: int) -> tuple[str, ...]:
    """One row of the table of clips."""
    _, _, ratios = _race(_clips(shape), rounds, time.process_time)
    return ("x".join(map(str, shape)), *(f"{ratios[name]:.2f}" for name in _CLIPS[1:]))


_INTRODUCTION = """# What bounding singular values costs

Measured on {date} with {versions} on a {device}, by
`python -m benchmarks.spectral --write docs/spectral.md`.

The matrices are random, float32, with a largest singular value of 1.3 for a bound of 1. `SVD` is the least
time of one `jnp.linalg.svd` in float32, as the machine is shared. `svd` and `newton_schulz` are the times of
the two methods divided by that in the same round, the median over rounds, and `inside` that of a matrix that
is inside, whichever the method. A loss is by how much the largest singular value, in float64, ends below the
bound.

{table}

Both methods compute in float64 and prove their result by a Cholesky factorization. `svd` takes the
eigenvectors of the Gram matrix, which are the left singular vectors. Where `newton_schulz` is the slower of
the two, `svd` is the better choice in every respect.

## Clipping gradients or updates

```python
import clipjax, optax

of_gradients = optax.chain(clipjax.clip_by_spectral_norm(1.0), optax.adam(1e-3))
of_updates = optax.chain(
    optax.scale_by_adam(), clipjax.clip_by_spectral_norm(10.0, soft=True), optax.scale_by_learning_rate(1e-3)
)
```

`clip_by_spectral_norm` does to a gradient what `spectral_cap` does to a weight, each step anew. Hard, it
costs what the cap costs: for a matrix that is inside, the proof. Softly, there is work to do for every matrix
at every step.

| | hard | `soft=True` |
|---|---|---|
| a singular value s becomes | min(s, bound) | s / sqrt(1 + s² / bound²) |
| one at the bound | stays | becomes 0.71 of the bound |
| what is inside | stays bit for bit | comes down too: at a tenth of the bound by half a percent |
| smooth | but for values at the bound | everywhere |
| for | a safeguard, which acts on spikes alone | a bound that shapes every update, as published |

In units of one SVD of the same matrix in the same run, by the time of the processor, on one thread (with
`XLA_FLAGS=--xla_cpu_multi_thread_eigen=false OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1`), where products cost
more than on several; `far` is a matrix {far:.0f} times outside:

{clips}

Both are Newton-Schulz iterations by default. Products are what accelerators do best, and the thousandth that
the hard clip may end below its bound is nothing to a gradient. On a CPU `method="svd"` can be faster: compare
on your shapes. Leaves of rank 0 and 1 are no matrices and pass: clip them with another clip, by its `where`.

## On a TPU

A TPU has no SVD in float64, and XLA takes minutes to compile one in float32 for matrices of more than 512. So
both methods are Newton-Schulz iterations in float32 there; where not soft, `svd` aims closer to the bound.
The proof is in integers, and its allowance d is larger: 2e-6 times the square root of the shorter side. The
same arithmetic, carried out on a CPU:

| matrix | d | loss, svd | loss, newton_schulz |
|---|---|---|---|
| 64x64 | 1.5e-05 | 6.1e-05 | 4.9e-04 |
| 256x1024 | 3.1e-05 | 1.2e-04 | 4.9e-04 |
| 1024x1024 | 6.1e-05 | 1.8e-04 | 4.9e-04 |

The loss is largest for singular values that were at the bound or above; smaller ones lose the same share. A
matrix thousands of times outside loses digits: from 10⁶ times the bound, singular values are off by some
hundredths of it. The derivative takes an SVD in float32, with the time that compiling it takes.
"""


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def _markdown(rows: list[tuple[str, ...]], clips: list[tuple[str, ...]]) -> str:
    return _INTRODUCTION.format(
        date=f"{datetime.datetime.now(datetime.UTC):%d %B %Y}",
        versions=f"jax {jax.__version__}, numpy {np.__version__}",
        device=f"{jax.devices()[0].device_kind} ({jax.default_backend()}, {os.cpu_count()} cores)",
        table=_table(_HEADER, rows),
        clips=_table(_CLIPS, clips),
        far=_FAR,
    )


def main(argv: list[str] | None = None) -> None:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spectral", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="how often each is timed")
    parser.add_argument("--write", type=Path, metavar="PATH", help="write a Markdown page there")
    args = parser.parse_args(argv)
    caps = [measure(shape, args.rounds) for shape in _SHAPES]
    clips = [measure_clips(shape, args.rounds) for shape in _SHAPES[:3]]
    for header, rows in ((_HEADER, caps), (_CLIPS, clips)):
        table = Table(*header)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
    if args.write:
        args.write.write_text(_markdown(caps, clips))


if __name__ == "__main__":
    main()
