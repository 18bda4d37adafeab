"""Bounds of weights: which leaves have one, and what must fit together."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from clipjax._core.bounds import CheckedBound, check_bound, check_order, in_float64
from clipjax._core.leaves import Leaves
from clipjax._core.messages import short_repr


def are_given(limits: Sequence[CheckedBound], leaves: Leaves) -> list[bool]:
    """Return for each leaf whether one of several bounds is given for it."""
    of_leaves = zip(*(each.given(leaves) for each in limits), strict=True)
    return [any(value is not None for value in values) for values in of_leaves]


def check_order_by_path(
    low: CheckedBound, high: CheckedBound, leaves: Leaves, chosen: Sequence[bool]
) -> None:
    """Raise if a lower bound is above the upper one, where mappings give them by path.

    Schedules are not compared.
    """
    if not (low.is_by_path or high.is_by_path):
        return
    rows = zip(leaves.each, low.given(leaves), high.given(leaves), chosen, strict=True)
    for leaf, lowest, highest, is_chosen in rows:
        if is_chosen and lowest is not None and highest is not None:
            check_order(lowest, highest, leaf)


def check_rate(rate: Any) -> CheckedBound:
    """Check a fraction of the way to a bound, which is the same for all leaves."""
    checked = check_bound("rate", rate)
    check_at_most("rate", rate, 1, "at most 1")
    return checked


def check_at_most(name: str, value: Any, most: float, wanted: str) -> None:
    """Raise if a bound that is known is above `most`."""
    is_known = not (callable(value) or isinstance(value, jax.core.Tracer))
    if is_known and np.any(in_float64(value) > most):
        raise ValueError(f"{name} must be {wanted}, got {short_repr(value)}")
