"""`SKIP`, by which a rule leaves a leaf alone."""

from __future__ import annotations

import copy
import pickle

from clipjax import SKIP


def test_skip_stays_itself_in_copies() -> None:
    assert copy.deepcopy(SKIP) is pickle.loads(pickle.dumps(SKIP)) is SKIP
