"""The benchmark shows every public member that does something at each step."""

from benchmarks.members import MEMBERS
from tests.contract.members import FIRST


def test_every_member_is_in_the_table() -> None:
    shown = {word.strip(",:") for label in MEMBERS for word in label.split()}
    done = {name for name, row in FIRST.items() if row.kind in ("clip", "step")}
    done |= {name for name, row in FIRST.items() if row.kind == "projection"}
    # They cost nothing themselves.
    assert done - shown <= {"chain", "project"}
