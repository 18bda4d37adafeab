"""Keras's constraints, replaced by our projections: the same classes, but for what a call does."""

from __future__ import annotations

import importlib
from typing import Any

import clipjax
from tests.outside.swap import counted, replace


def swap() -> None:
    """Let what a call does be ours, in every module of Keras."""
    constraints: Any = importlib.import_module("keras.src.constraints.constraints")
    convert = importlib.import_module("keras").ops.convert_to_tensor

    def axes(axis: Any) -> Any:
        return axis if isinstance(axis, int) else tuple(axis)

    def min_max_norm(self: Any) -> Any:
        return clipjax.min_max_norm(self.min_value, self.max_value, rate=self.rate, axes=axes(self.axis))

    projections = {
        "MaxNorm": lambda self: clipjax.max_norm(self.max_value, axes=axes(self.axis)),
        "MinMaxNorm": min_max_norm,
        "UnitNorm": lambda self: clipjax.unit_norm(axes=axes(self.axis)),
        "NonNeg": lambda _: clipjax.non_negative(),
    }
    for name, projection in projections.items():
        theirs = getattr(constraints, name)
        call = counted(lambda self, w, projection=projection: projection(self)(convert(w)))
        replace("keras", theirs, type(name, (theirs,), {"__call__": call}))
