"""Is what `python -m tests.outside` swaps in really what the peers' tests then use?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.outside.differences import DIFFERENCES
from tests.outside.runs import RUNS
from tests.outside.sources import only_tests

# In a process of its own, as what is swapped stays swapped. Keeping weights non-negative by changing nothing
# is the defect.
TWICE = """
import json, sys
import optax
from tests.outside import optax_members, sources, swap, worker

place = "transforms/_constraining_test.py::ConstraintsTest::test_keep_params_nonnegative"
folder = sources.optax_tests().folder
right = worker.run(folder, [place], optax_members.swap)
swap.replace("optax", optax.keep_params_nonnegative, swap.counted(optax.identity))
wrong = worker.run(folder, [place], None)
print("\\n" + json.dumps([*right.values(), *wrong.values()]))
"""


def test_a_defect_is_seen() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWICE],
        cwd=Path(__file__).parent.parent.parent,
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    right, wrong = json.loads(done.stdout.splitlines()[-1])
    assert (right["outcome"], right["ours"]) == ("passed", True), right
    assert (wrong["outcome"], wrong["ours"]) == ("failed", True), wrong


def test_only_the_tests_that_are_asked_for_are_left() -> None:
    source = """
import math, no_such_module
from math import inf, no_such_name

limit = no_such_module.limit

class Clips(Base):
    def helper(self): return inf

    @decorated
    def test_clip(self): assert self.helper() == math.inf

    def test_other(self): raise AssertionError

class Others(Base):
    def test_other(self): raise AssertionError

instantiate(Clips, globals())
instantiate(Others, globals())
"""
    made: list[type] = []
    space = {"Base": object, "decorated": lambda f: f, "instantiate": lambda cls, _: made.append(cls)}
    exec(only_tests(source, ["clip"]), space)
    assert [cls.__name__ for cls in made] == ["Clips"]
    assert not hasattr(made[0], "test_other")
    made[0]().test_clip()


def test_what_differs_is_in_the_documentation() -> None:
    page = " ".join((Path(__file__).parent.parent.parent / "docs/outside.md").read_text().split())
    for difference in DIFFERENCES:
        assert difference.why in page, difference.why
    assert all(run in page for run in RUNS)
