"""Every process traces the same program: otherwise hosts compile different ones, and
caches of programs miss.

The order of a set of dtypes, for example, changes from process to process.
"""

import hashlib
import os
import subprocess
import sys

import jax
import numpy as np

from tests.contract.members import ROWS
from tests.support.programs import is_transformation, program, tree_of, weights_of


def digests() -> str:
    """Return a line for each program."""
    lines = []
    for row in ROWS:
        tree, params, state = tree_of(row), weights_of(row), None
        if is_transformation(row):
            state = jax.eval_shape(row.make(1.0).init, tree)
        text = program(row).lower(tree, state, params, np.float32(1)).as_text()
        lines.append(f"{row.id} {hashlib.sha256(text.encode()).hexdigest()}\n")
    return "".join(lines)


def test_every_process_traces_the_same_programs() -> None:
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    code = "from tests.programs.test_same import digests; print(digests(), end='')"
    other = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
        check=True,
    )
    assert other.stdout == digests()
    assert len(other.stdout.splitlines()) == len(ROWS)
