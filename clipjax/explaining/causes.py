"""A cause, and how it is told."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from clipjax.explaining.events import CONSTANT


class Input(NamedTuple):
    """An operand of an operation."""

    name: str  # the argument that it is, or a part of; "" if it was computed
    dtype: str
    shape: tuple[int, ...]
    # The largest magnitude; None for integers, and beside harmless infinities.
    greatest: float | None
    least: float | None = None  # the least element, where that matters, as for a log
    moved: bool = False  # whether its elements have other places in what has the name

    def __str__(self) -> str:
        shape = f"[{', '.join(map(str, self.shape))}]" if self.shape else ""
        text = self.name or self.dtype + shape
        if self.name and self.moved and shape:
            text += f" as {self.dtype}{shape}"
        if self.greatest is None:
            return text
        signed = 0.0 if self.greatest == 0 else self.least
        if not self.shape and not self.name and signed is not None:
            return f"{signed:.3g}"
        is_known = math.isfinite(self.greatest) or self.least == -math.inf
        if self.least is not None and is_known:
            return f"{text}, least {self.least:.3g}"
        return f"{text} up to {self.greatest:.3g}"


class Bad(NamedTuple):
    """Which elements of an array are bad."""

    elements: int  # how many
    shape: tuple[int, ...]
    first: tuple[int, ...]  # the index of the first one
    dtype: str = ""
    limit: float | None = None  # where the dtype ends, if that made them infinite

    @property
    def size(self) -> int:
        """The number of all elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        if self.elements == self.size:
            return f"all {self.size} elements"
        place = f"at [{', '.join(map(str, self.first))}]"
        first = place if self.elements == 1 else f"first {place}"
        return f"{self.elements} of {self.size} elements, {first}"


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
    # "forward", "backward", "update", or "after" for what else uses a gradient
    began_in: str = ""
    # The index and the number of iterations, None for a while loop, outermost first.
    iterations: tuple[tuple[int, int | None], ...] = ()
    inputs: tuple[Input, ...] = ()
    given: str = ""  # the argument that was bad, or "a constant"
    after: str = ""  # the argument that was used last on the way to it
    what: str = ""  # the operation and its inputs, in words
    bad: Bad | None = None  # the elements that were NaN or infinite
    became_nan: Cause | None = None  # where the infinity became NaN
    handled: bool = False  # whether the result is finite, since a check caught it
    times: float = 1.0  # how many times as large as usual
    again: int = 0  # how often the same line did it once more
    results: tuple[str, ...] = ()  # the paths of the bad results

    def __str__(self) -> str:
        text = self._of_operation() if self.operation else self._of_given()
        if self.handled:
            text = f"the result is finite; a check of finiteness caught: {text}"
        if self.became_nan is not None:
            text += f"; it became nan {self._later(self.became_nan)}"
        more = "once" if self.again == 1 else f"{self.again} times"
        return f"{text} (and {more} more)" if self.again else text

    def _of_given(self) -> str:
        if self.kind == "unseen":
            return (
                f"{', '.join(self.results)}: bad in the call, but finite when the same "
                "program is watched, since watching changes how XLA fuses and rounds"
            )
        if self.kind == "large":
            times = f"{self.times:.3g} times as large as usual"
            return f"{self.given} is {times}: {self.what}"
        if self.given == CONSTANT:
            return f"{self.kind} from a constant{self._place()}"
        text = f"{self.kind} in {self.given}"
        text += f": {self.bad}" if self.bad and self.bad.size > 1 else ""
        return f"{text}, first used{self._place()[1:]}" if self.file else text

    def _of_operation(self) -> str:
        what = self.kind
        if what == "large":
            what = f"{self.times:.3g} times its usual growth"
        text = f"{what} {self._pass()}"
        for index, length in self.iterations:
            text += f", iteration {index} of {length}" if length else ""
            text += f", iteration {index}" if not length else ""
        text += f"{self._place()}: {self.what}"
        if self.bad and self.bad.size > 1:
            text += f", in {self.bad}"
        if self.bad and self.bad.limit is not None:
            text += f"; {self.bad.dtype} ends at {self.bad.limit:.6g}"
        text += f"; the infinity is from {self.given}" if self.given else ""
        return f"{text}, after {self.after}" if self.after else text

    def _later(self, nan: Cause) -> str:
        if (nan.file, nan.line) == (self.file, self.line):
            return f"there ({nan.what})"
        where = "" if nan.began_in == self.began_in else f"{nan._pass()}, "
        return f"{where}{nan._place()[2:]} ({nan.what})"

    def _pass(self) -> str:
        words = {"update": "in the update", "after": "after the backward pass"}
        return words.get(self.began_in, f"in the {self.began_in} pass")

    def _place(self) -> str:
        """Return the line, with its function and the library function it calls."""
        if not self.file:
            return ""
        text = f", at {Path(self.file).name}:{self.line} ({self.function})"
        return f"{text}, by {self.library}" if self.library else text
