"""Every process traces the same program: otherwise hosts compile different ones, and
caches of programs miss.

The order of a set of dtypes, for example, changes from process to process.
"""

import ast
import hashlib
import os
import subprocess
import sys

import jax
import numpy as np

from tests.contract.members import FIRST, Row
from tests.support.programs import is_transformation, program, tree_of

# One of each kind of memory, of grouping and of measuring.
NAMES = (
    *("clip_by_group_norm", "autoclip", "adagc", "skip_spikes", "record_norms"),
    *("bounded", "max_norm", "box", "clip_gradient_by_global_norm"),
)


def digests() -> dict[str, str]:
    """Return a digest of each program."""

    def text(row: Row) -> str:
        # One leaf of each dtype is enough.
        tree = {k: x for k, x in tree_of(row).items() if not k.startswith("d_")}
        params, state = tree if row.params else None, None
        if is_transformation(row):
            state = jax.eval_shape(row.make(1.0).init, tree)
        lowered = program(row).lower(tree, state, params, np.float32(1))
        return lowered.as_text()

    texts = {name: text(FIRST[name]) for name in NAMES}
    return {k: hashlib.sha256(x.encode()).hexdigest() for k, x in texts.items()}


def test_every_process_traces_the_same_programs() -> None:
    """In two fresh ones, since what was traced before gives functions other names."""
    code = "from tests.programs.test_same import digests; print(digests())"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    one, other = [ast.literal_eval(each.communicate()[0]) for each in processes]
    assert one == other
