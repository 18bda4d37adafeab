"""What a walk through a watched program knows of its arrays.

An *event* is where something bad began: an equation that made NaN or an infinity of
what was finite, one that made NaN of infinities, or an array that was given. Each value
knows the events that its NaN and its infinities come from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from clipjax.explaining.internals import Equation

CONSTANT = "a constant"
# The `Value.at` of a part with the first axis of the whole, of which it is one index.
ONE = -1


class Place(NamedTuple):
    """Where an equation runs."""

    # The equations around it, outermost first, and itself, each with its jaxpr.
    path: tuple[tuple[Any, Equation], ...] = ()
    # The index and the length of each loop around it; a while loop has no length.
    iterations: tuple[tuple[int, int | None], ...] = ()

    def at(self, jaxpr: Any, eqn: Equation) -> Place:
        """Return the place of an equation in what the last one calls."""
        return self._replace(path=(*self.path, (jaxpr, eqn)))

    def during(self, iteration: int, length: int | None) -> Place:
        """Return the place in an iteration."""
        return self._replace(iterations=(*self.iterations, (iteration, length)))

    @property
    def key(self) -> tuple[int, ...]:
        """What is the same in all iterations."""
        return tuple(map(id, self.eqns))

    @property
    def eqns(self) -> list[Equation]:
        """The equation, and those around it, innermost first."""
        return [eqn for _, eqn in self.path[::-1]]


NOWHERE = Place()


class Output(NamedTuple):
    """What was written down of an output."""

    size: float = 0.0  # the largest magnitude
    # How many elements are NaN, how many are infinite, and the place of the first of
    # them, as if the array had one axis; of an operation by place, those that are so
    # where no operand is.
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)


@dataclasses.dataclass(eq=False)
class Event:
    """An operation that ran, or an array that was given, as what made things bad.

    One that neither ran nor was given is where bad values of several events met.
    """

    kind: str = ""  # "nan" or "inf"
    parents: tuple[Event, ...] = ()  # where the infinities that it met come from
    place: Place = NOWHERE
    operands: tuple[Value, ...] = ()
    outputs: tuple[Output, ...] = ()
    met: int = 0  # the bits of `watch._met`
    # Of the operand that is judged, where it made the output bad.
    least: float | None = None
    order: int = 0
    given: str = ""  # the name of an argument, or "a constant"
    first_used: Event | None = None
    used: Event | None = None  # what used it first, if possible not only moved it
    roots: frozenset[Event] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        """Find the first events that it comes from."""
        of_parents = (parent.roots for parent in self.parents)
        self.roots = frozenset().union(*of_parents) or frozenset([self])

    @property
    def eqn(self) -> Any:
        """The equation that ran, or None."""
        return self.place.path[-1][1] if self.place.path else None

    @property
    def name(self) -> str:
        """The name of the primitive that ran, or ""."""
        return self.eqn.primitive.name if self.place.path else ""

    @property
    def parts(self) -> list[Event]:
        """The events that met here; the event itself if it is no meeting."""
        return [self] if self.eqn is not None or self.given else [*self.parents]

    @property
    def ancestors(self) -> list[Event]:
        """The event, and all that it comes from."""
        found: dict[int, Event] = {}
        waiting = [self]
        while waiting:
            event = waiting.pop()
            if id(event) not in found:
                found[id(event)] = event
                waiting += event.parents
        return list(found.values())


class Value(NamedTuple):
    """An array, of which only the largest magnitude is known."""

    size: float = 0.0
    nan: Event | None = None  # where elements that are NaN come from
    inf: Event | None = None  # likewise for infinite ones
    lost: Event | None = None  # where what was bad, and is finite here, comes from
    name: str = ""  # the argument that it is, or is a part of
    # Where it begins in what has the name, along the first axis; None if its elements
    # are in another order.
    at: int | None = 0
    near: str = ""  # the argument that was used last on the way to it
    after_backward: bool = False  # whether it depends on a gradient
    each: tuple[Value, ...] = ()  # what a scan has stacked

    @property
    def event(self) -> Event | None:
        """Where bad elements of both kinds come from."""
        return joined([self.nan, self.inf])

    @property
    def is_bad(self) -> bool:
        """Whether an element is NaN or infinite."""
        return not math.isfinite(self.size)


def kind_of(size: float) -> str:
    """Return "nan", "inf", or "" for what is finite."""
    return "nan" if math.isnan(size) else "inf" if math.isinf(size) else ""


def joined(events: Iterable[Event | None]) -> Event | None:
    """Return the event that bad elements of several values come from."""
    found = {id(part): part for event in events if event for part in event.parts}
    if len(found) < 2:
        return next(iter(found.values()), None)
    kinds = [event.kind for event in found.values()]
    return Event("nan" if "nan" in kinds else "inf", tuple(found.values()))
