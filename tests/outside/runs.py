"""What is run: which of ours stand in for what, in which of a peer's test files."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from tests.outside import keras_constraints, optax_members, optax_optimizers, torch_clips

MEMBERS = """
    _src/float64_test.py _src/linear_algebra_test.py projections/_projections_test.py
    schedules/_inject_test.py transforms/_accumulation_test.py transforms/_clipping_test.py
    transforms/_conditionality_test.py transforms/_constraining_test.py transforms/_monitoring_test.py
    tree_utils/_tree_math_test.py
"""
OPTIMIZERS = """
    _src/alias_test.py _src/sharding_test.py contrib/_common_test.py contrib/_sam_test.py
    contrib/_schedule_free_test.py transforms/_accumulation_test.py transforms/_combining_test.py
    transforms/_conditionality_test.py transforms/_freezing_test.py transforms/_layouts_test.py
    transforms/_masking_test.py transforms/_monitoring_test.py tree_utils/_state_utils_test.py
"""


class Run(NamedTuple):
    """One of our sets of stand-ins, and the tests that it is put under."""

    peer: str
    files: str  # within the peer's folder of tests
    swap: Callable[[], None]


RUNS = {
    "optax-members": Run("optax", MEMBERS, optax_members.swap),
    **{
        f"optax-{name}": Run("optax", OPTIMIZERS, functools.partial(optax_optimizers.swap, wrap))
        for name, wrap in optax_optimizers.WRAPS.items()
    },
    "keras-constraints": Run("keras", "constraints_test.py", keras_constraints.swap),
    "torch-clips": Run("torch", "test_clip_grad.py", torch_clips.swap),
}
