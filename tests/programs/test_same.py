"""Every process traces the same program: otherwise hosts compile different ones, and
caches of programs miss.

The order of a set of dtypes, for example, changes from process to process.
"""

import os
import subprocess
import sys

PRINT_PROGRAMS = """
import hashlib, jax, numpy as np
from tests.contract.members import ROWS
from tests.support.programs import program, tree_of, weights_of
for row in ROWS:
    tree, params = tree_of(row), weights_of(row)
    state = None
    if row.kind in ("clip", "step"):
        state = jax.eval_shape(lambda tree: row.make(1.0).init(tree), tree)
    text = program(row).lower(tree, state, params, np.float32(1)).as_text()
    print(row.id, hashlib.sha256(text.encode()).hexdigest())
"""


def test_every_process_traces_the_same_programs() -> None:
    found = []
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", PRINT_PROGRAMS],
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
        found.append(done.stdout.splitlines())
    assert len(found[0]) > 30
    assert all(each == found[0] for each in found)
