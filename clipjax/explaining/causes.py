"""A cause, and how it is told."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

from clipjax.explaining.walk import CONSTANT


class Input(NamedTuple):
    """An operand of an operation."""

    name: str  # the argument that it is, or a part of; "" if it was computed
    dtype: str
    shape: tuple[int, ...]
    greatest: float | None  # the largest magnitude; None for integers
    least: float | None = None  # the least element, where that matters, as for a log

    def __str__(self) -> str:
        shape = f"{self.dtype}[{', '.join(map(str, self.shape))}]"
        text = self.name or (shape if self.shape else self.dtype)
        if self.greatest is None:
            return text
        if not self.shape and not self.name:
            return f"{self.greatest if self.least is None else self.least:.3g}"
        if self.least is not None and math.isfinite(self.greatest):
            return f"{text}, least {self.least:.3g}"
        return f"{text} up to {self.greatest:.3g}"


class Cause(NamedTuple):
    """What made a result NaN or infinite; `print` tells it in a line."""

    # "nan", "inf", "large" for what is larger than usual, or "unseen" for a result that
    # is bad in the call, but not where it is watched.
    kind: str
    operation: str = ""  # as JAX calls it; "" for what was given
    file: str = ""
    line: int = 0
    function: str = ""
    library: str = ""  # the library function which that line calls, as "flax Linear"
    began_in: str = ""  # "forward", "backward" or "update"
    # The index and the number of iterations, None for a while loop, outermost first.
    iterations: tuple[tuple[int, int | None], ...] = ()
    inputs: tuple[Input, ...] = ()
    given: str = ""  # the argument that was bad, or "a constant"
    after: str = ""  # the argument that was used last on the way to it
    slope_of: str = ""  # in the backward pass: the operation it differentiates
    what: str = ""  # the operation and its inputs, in words
    became_nan: Cause | None = None  # where the infinity became NaN
    handled: bool = False  # whether the result is finite, since a check caught it
    times: float = 1.0  # how many times as large as usual
    again: int = 0  # how often the same line did it once more
    results: tuple[str, ...] = ()  # the paths of the bad results

    @property
    def place(self) -> str:
        """The line, with its function, and the library function that it calls."""
        if not self.file:
            return "at an unknown line"
        text = f"at {Path(self.file).name}:{self.line} ({self.function})"
        return f"{text}, by {self.library}" if self.library else text

    def __str__(self) -> str:
        if self.kind == "unseen":
            return (
                f"{', '.join(self.results)}: bad in the call, but finite when the same "
                "program is watched, since watching changes how XLA fuses and rounds"
            )
        text = self._of_operation() if self.operation else self._of_given()
        if self.handled:
            text = f"the result is finite; a check of finiteness caught: {text}"
        if self.became_nan is not None:
            text += f"; it became nan {self._later(self.became_nan)}"
        return f"{text} (and {self.again} times more)" if self.again else text

    def _of_given(self) -> str:
        if self.kind == "large":
            return (
                f"{self.given} is {self.times:.3g} times as large as usual: {self.what}"
            )
        if self.given == CONSTANT:
            return f"{self.kind} from a constant, {self.place}"
        text = f"{self.kind} in {self.given}"
        text += f": {self.what}" if self.what else ""
        return f"{text}, first used {self.place}" if self.file else text

    def _of_operation(self) -> str:
        where = (
            "the update" if self.began_in == "update" else f"the {self.began_in} pass"
        )
        loops = "".join(_loop(*each) for each in self.iterations)
        start = f"{self.kind} in {where}{loops}, {self.place}: {self.what}"
        if self.kind == "large":
            growth = f"{self.times:,.0f} times its usual growth"
            start = f"{growth} in {where}{loops}, {self.place}: {self.what}"
        start += f"; the infinity is from {self.given}" if self.given else ""
        return f"{start}, after {self.after}" if self.after else start

    def _later(self, nan: Cause) -> str:
        if (nan.file, nan.line) == (self.file, self.line):
            return f"there ({nan.what})"
        is_same = nan.began_in == self.began_in
        where = "" if is_same else f"in the {nan.began_in} pass, "
        return f"{where}{nan.place} ({nan.what})"


def _loop(index: int, length: int | None) -> str:
    return f", iteration {index} of {length}" if length else f", iteration {index}"


def in_words(
    operation: str,
    slope_of: str,
    kind: str,
    inputs: tuple[Input, ...],
    dtype: str,
    *,
    is_negative: bool,
) -> str:
    """Say what an operation did: `is_negative` if NaN arose of -inf."""
    operands = " and ".join(map(str, inputs))
    least = next((each.least for each in inputs if each.least is not None), None)
    is_infinite = any(math.isinf(each.greatest or 0.0) for each in inputs)
    if kind == "nan" and is_infinite:
        return _of_infinities(operation, operands, is_negative=is_negative)
    if slope_of:
        at = " at 0" if least == 0 else ""
        return f"the slope of {slope_of}{at} ({operation} of {operands})"
    if operation == "div" and least == 0:
        return f"{'0 / 0' if kind == 'nan' else 'a division by 0'} (div of {operands})"
    if operation == "cholesky":
        return f"cholesky of {operands}, which is not positive definite"
    if operation == "gather" and kind == "nan":
        return f"gather of {operands}, with an index out of bounds"
    if kind == "inf" and least != 0:
        end = float(jnp.finfo(dtype).max)
        return f"{operation} of {operands}; {dtype} ends at {end:.6g}"
    return f"{operation} of {operands}"


def _of_infinities(operation: str, operands: str, *, is_negative: bool) -> str:
    """Say how an operation made NaN of infinities."""
    if operation == "sub" and is_negative:
        return "-inf - -inf, as in a softmax of which a whole row is masked"
    signs = {"mul": "0 · inf", "div": "inf / inf", "sub": "inf - inf"}
    signs |= dict.fromkeys(("add", "add_any"), "inf - inf")
    return signs.get(operation, f"{operation} of {operands}")
