"""What ends inside counts as inside: the same program does not change it again."""

import pytest

from tests.contract.members import ROWS, UNCHANGED, Row
from tests.contract.test_ends import BOUND, RUNS
from tests.support.programs import run, tree_of, weights_of
from tests.support.trees import changed


@pytest.mark.parametrize(
    "row",
    # Where there is no bound, the result differs or only rounds to the same.
    [row for row in ROWS if row.bounds or row.oracle is UNCHANGED],
    ids=lambda row: row.id,
)
def test_twice_is_once(row: Row) -> None:
    params = weights_of(row)
    for kind, exponent in RUNS[:3]:
        bound = BOUND * row.times * 2.0**exponent
        once, _ = run(row, tree_of(row, kind, exponent), bound, params)
        twice, _ = run(row, once, bound, params)
        assert not changed(once, twice), (kind, exponent)
