"""What a type checker makes of the public names: a tree keeps its type, and nothing public is unknown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
from typing import assert_type

import jax

import clipjax
from clipjax import functional

Params = dict[str, jax.Array]


def project(params: Params, projection: clipjax.Projection) -> Params:
    return projection(params)


def use(params: Params, x: jax.Array, axes: clipjax.Axes, bound: clipjax.Bound) -> list[clipjax.Violation]:
    assert_type(clipjax.max_norm(bound, axes=axes), clipjax.Projection)
    assert_type(clipjax.max_norm(1.0)(params), Params)
    assert_type(functional.clip_by_value(params, -1.0, 1.0), Params)
    assert_type(functional.clip_by_norm(params, 1.0), Params)
    assert_type(functional.clip_by_global_norm(params, 1.0), tuple[Params, jax.Array])
    assert_type(functional.leaf_norms(params), Params)
    assert_type(functional.global_norm(params), jax.Array)
    assert_type(clipjax.clip_gradient_by_norm(x, 1.0), jax.Array)
    assert_type(clipjax.clip_gradient_by_global_norm(params, 1.0), Params)
    assert_type(clipjax.metrics(params), dict[str, jax.Array])
    assert_type(clipjax.NormLog().suggest(), dict[str, clipjax.Suggestion])
    clipjax.clip_by_value(1.0)
    clipjax.clip_by_value(-1.0, 1.0)
    clipjax.clip_by_value(low=-1.0, high=1.0)
    clipjax.clip_by_value(max_delta=1.0)
    return clipjax.verify(project(params, clipjax.unit_norm()), clipjax.unit_norm())


clipjax.max_norm()  # error
clipjax.max_norm(1.0, axis=0)  # error
clipjax.clip_by_value(low=0.0)  # error
clipjax.max_norms(1.0)  # error
functional.clip_by_norm({}, "1.0")  # error
clipjax.bounded(1.0, nonfinite="zeros")  # error
"""


def test_types_are_kept_and_mistakes_are_seen(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--follow-untyped-imports", str(program)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    lines = PROGRAM.splitlines()
    expected = {i for i, line in enumerate(lines, 1) if line.endswith("# error")}
    found = {int(line.split(":")[1]) for line in run.stdout.splitlines() if ": error:" in line}
    assert found == expected, run.stdout + run.stderr
