"""Walks through a watched program in Python, with one number for each array.

An *event* is where something bad began: an equation that made NaN or an infinity of
what was finite, one that made NaN of infinities, or an array that was given. Each value
knows the event that its bad elements come from.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from clipjax.explaining.internals import (
    Equation,
    closed,
    is_inexact,
    is_literal,
    scan_counts,
    scopes,
)
from clipjax.explaining.primitives import (
    MOVES,
    PARTS,
    SAME,
    callee,
    has_least,
    inexact_outputs,
    is_by_place,
    is_silent,
)
from clipjax.explaining.watch import ROOM

CONSTANT = "a constant"
# What has grown this many times more than usual is told.
TOLD = 3.0


class Place(NamedTuple):
    """Where an equation runs: the calls around it, and their iterations."""

    # Each jaxpr, from the outermost, with the equation that calls the next one.
    calls: tuple[tuple[Any, Equation], ...] = ()
    iterations: tuple[tuple[int, int | None], ...] = ()

    def within(self, jaxpr: Any, eqn: Equation) -> Place:
        """Return the place in what an equation calls."""
        return self._replace(calls=(*self.calls, (jaxpr, eqn)))

    def at(self, iteration: int, length: int | None) -> Place:
        """Return the place in an iteration."""
        return self._replace(iterations=(*self.iterations, (iteration, length)))


NOWHERE = Place()


@dataclasses.dataclass(eq=False)
class Event:
    """Where something bad began; with neither `eqn` nor `given`, where two met."""

    kind: str  # "nan" or "inf"
    parents: tuple[Event, ...] = ()
    jaxpr: Any = None
    eqn: Any = None
    place: Place = NOWHERE
    operands: tuple[Value, ...] = ()
    met: int = 0  # the bits of `watch._met`
    least: float | None = None  # of the operand that has ends
    order: int = 0
    given: str = ""  # the name of an argument, or "a constant"
    met_by: Event | None = None  # the first equation that it goes into
    used: Event | None = None  # the first one that does more than to move it

    @functools.cached_property
    def roots(self) -> list[Event]:
        """The first events that it comes from."""
        return [event for event in ancestors(self) if not event.parents]


class Value(NamedTuple):
    """An array, of which only the largest magnitude is known."""

    size: float = 0.0
    event: Event | None = None  # where its bad elements come from
    name: str = ""  # the argument that it is, or is a part of
    near: str = ""  # the argument that was used last on the way to it
    after_backward: bool = False  # whether it depends on a gradient
    each: tuple[Value, ...] = ()  # what a scan has stacked
    growth: float = 1.0  # how many times its size is the usual one

    @property
    def is_bad(self) -> bool:
        """Whether an element is NaN or infinite."""
        return not math.isfinite(self.size)

    @property
    def is_nan(self) -> bool:
        """Whether an element is NaN."""
        return math.isnan(self.size)


class Tape:
    """Numbers that are read one after the other."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers, self.at = numbers, 0

    def take(self, count: int) -> Any:
        """Return the next numbers."""
        self.at += count
        return self.numbers[self.at - count : self.at]

    def rows(self, count: int, width: int) -> list[Tape]:
        """Return the tapes of some iterations."""
        return [Tape(row) for row in self.take(count * width).reshape(count, width)]


def joined(values: Iterable[Value]) -> Event | None:
    """Return the event that bad values come from."""
    found: dict[int, Event] = {}
    for value in values:
        event = joined(value.each) if value.each else value.event
        if event is not None:
            found[id(event)] = event
    events = tuple(found.values())
    if len(events) < 2:
        return events[0] if events else None
    kinds = [event.kind for event in events]
    return Event("nan" if "nan" in kinds else "inf", events)


def _largest(values: Sequence[Value]) -> float:
    sizes = [value.size for value in values]
    return math.nan if any(map(math.isnan, sizes)) else max(sizes, default=0.0)


class Walk:
    """Reads what a watched program has written.

    `usual` has the sizes of a usual call, if there is one; `grown` has the operations
    whose outputs are more times as large as usual than their inputs are.
    """

    def __init__(
        self,
        widths: dict[int, int],
        room: dict[int, int],
        usual: dict[Any, list[float]] | None = None,
    ) -> None:
        self.widths, self.room = widths, room
        self.short: dict[int, int] = {}  # loops with more iterations than were written
        self.checks: list[tuple[Any, Event, Event]] = []
        self.usual = usual
        self.sizes: dict[Any, list[float]] = {}
        self.grown: list[tuple[float, Event]] = []
        self._count = 0
        self._transposed: dict[int, bool] = {}

    def run(
        self,
        jaxpr: Any,
        constants: Sequence[Any],
        arguments: Sequence[Value],
        tape: Tape,
        place: Place = NOWHERE,
    ) -> list[Value]:
        """Return the values of the results of a jaxpr."""
        values = dict(zip(jaxpr.constvars, map(constant, constants), strict=True))
        values |= dict(zip(jaxpr.invars, arguments, strict=True))

        def read(variable: Any) -> Value:
            if not is_literal(variable):
                return values[variable]
            return constant(np.asarray(variable.val, variable.aval.dtype))

        for eqn in jaxpr.eqns:
            operands = [read(v) for v in eqn.invars]
            outs = self._step(jaxpr, eqn, operands, tape, place)
            values.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _step(
        self, jaxpr: Any, eqn: Equation, operands: list[Value], tape: Tape, place: Place
    ) -> list[Value]:
        name, inside = eqn.primitive.name, place.within(jaxpr, eqn)
        if name == "scan":
            return self._scan(eqn, operands, tape, inside)
        if name == "while":
            return self._while(eqn, operands, tape, inside)
        if name == "cond":
            branch = eqn.params["branches"][int(tape.take(1)[0])]
            (row,) = tape.rows(1, self.widths[id(eqn)])
            return self.run(branch.jaxpr, branch.consts, operands[1:], row, inside)
        if is_silent(eqn):
            return []
        called = callee(eqn)
        if called is not None:
            return self.run(called.jaxpr, called.consts, operands, tape, inside)
        if name in SAME:
            pairs = zip(operands, eqn.outvars, strict=False)
            return [
                value._replace(each=(), event=joined([value])) for value, _ in pairs
            ]
        return self._operation(jaxpr, eqn, operands, tape, place)

    def _operation(
        self, jaxpr: Any, eqn: Equation, operands: list[Value], tape: Tape, place: Place
    ) -> list[Value]:
        places = inexact_outputs(eqn)
        sizes = dict(zip(places, map(float, tape.take(len(places))), strict=True))
        met = int(tape.take(1)[0]) if places and is_by_place(eqn) else None
        least = float(tape.take(1)[0]) if places and has_least(eqn) else None
        self._count += 1
        bad = [
            value
            for k, value in enumerate(operands)
            if value.is_bad and (met is None or met & (2 << k))
        ]
        here = Event(
            "", (), jaxpr, eqn, place, tuple(operands), met or 0, least, self._count
        )
        if not all(map(math.isfinite, sizes.values())):
            _mark_use(bad, here)
        if eqn.primitive.name == "is_finite" and operands[0].is_bad:
            seen = joined(operands)
            self.checks += [(jaxpr, here, seen)] if seen else []
        growth = self._growth(here, list(sizes.values()))
        like = self._like(eqn, operands)
        events = {
            kind: _origin(here, kind, bad)
            for kind in {_kind(size) for size in sizes.values()} - {""}
        }
        return [
            like._replace(size=size, event=events.get(_kind(size)), growth=growth)
            for size in (sizes.get(k, 0.0) for k in range(len(eqn.outvars)))
        ]

    def _growth(self, here: Event, sizes: list[float]) -> float:
        """Return how many times as large as usual the outputs are."""
        if self.usual is None:
            return 1.0
        callers = tuple(id(eqn) for _, eqn in here.place.calls)
        key = id(here.eqn), callers, here.place.iterations
        self.sizes[key] = sizes
        pairs = zip(sizes, self.usual.get(key, ()), strict=False)
        times = max((now / was for now, was in pairs if now and was), default=1.0)
        before = max((value.growth for value in here.operands), default=1.0)
        if times > TOLD * max(before, 1.0):
            self.grown.append((times / max(before, 1.0), here))
        return times

    def _like(self, eqn: Equation, operands: list[Value]) -> Value:
        """Return an output's value, but for its size."""
        pairs = zip(eqn.invars, operands, strict=True)
        names = [value.name for v, value in pairs if value.name and is_inexact(v.aval)]
        nears = [value.near for value in operands if value.near]
        name = operands[0].name if operands else ""
        return Value(
            name=_named(eqn, name) if name else "",
            near=(names or nears or [""])[-1],
            after_backward=self._is_transposed(eqn)
            or any(value.after_backward for value in operands),
        )

    def _is_transposed(self, eqn: Equation) -> bool:
        if id(eqn) not in self._transposed:
            self._transposed[id(eqn)] = "transpose(" in scopes(eqn)
        return self._transposed[id(eqn)]

    def _scan(
        self, eqn: Equation, operands: list[Value], tape: Tape, inside: Place
    ) -> list[Value]:
        params, body = eqn.params, closed(eqn.params["jaxpr"])
        first, carried = scan_counts(params)
        length = params["length"]
        constants, rest = operands[:first], operands[first:]
        carry, xs = rest[:carried], rest[carried:]
        of_xs = body.jaxpr.invars[first + carried :]
        rows = tape.rows(length, self.widths[id(eqn)])
        ys: list[list[Value]] = [[] for _ in body.jaxpr.outvars[carried:]]
        order = range(length)[::-1] if params["reverse"] else range(length)
        for i in order:
            parts = [
                _part(x, i, float(rows[i].take(1)[0]) if is_inexact(v.aval) else 0.0)
                for x, v in zip(xs, of_xs, strict=True)
            ]
            arguments = [*constants, *carry, *parts]
            place = inside.at(i, length)
            outs = self.run(body.jaxpr, body.consts, arguments, rows[i], place)
            carry = outs[:carried]
            for stack, y in zip(ys, outs[carried:], strict=True):
                stack.append(y)
        return [
            *carry,
            *(_stacked(stack[:: -1 if params["reverse"] else 1]) for stack in ys),
        ]

    def _while(
        self, eqn: Equation, operands: list[Value], tape: Tape, inside: Place
    ) -> list[Value]:
        params, room = eqn.params, self.room.get(id(eqn), ROOM)
        count = int(tape.take(1)[0])
        rows = tape.rows(room, self.widths[id(eqn)])
        if count > room:
            self.short[id(eqn)] = max(count, self.short.get(id(eqn), 0))
        rest = operands[params["cond_nconsts"] :]
        constants, carry = (
            rest[: params["body_nconsts"]],
            rest[params["body_nconsts"] :],
        )
        body = params["body_jaxpr"]
        for i, row in enumerate(rows[:count]):
            arguments, place = [*constants, *carry], inside.at(i, None)
            carry = self.run(body.jaxpr, body.consts, arguments, row, place)
        return carry


def given(size: float, name: str) -> Value:
    """Return the value of an argument, or of a constant, whose name is ""."""
    kind = _kind(size)
    event = Event(kind, given=name or CONSTANT) if kind else None
    return Value(size, event, name)


def constant(x: Any) -> Value:
    """Return the value of a constant; those of the whole program are Values."""
    if isinstance(x, Value) or not is_inexact(x):
        return x if isinstance(x, Value) else Value()
    array = np.asarray(x)
    wide = array.astype(complex if np.iscomplexobj(array) else float)
    return given(float(np.max(np.abs(wide), initial=0.0)), "")


def _kind(size: float) -> str:
    """Return "nan", "inf", or "" for what is finite."""
    return "nan" if math.isnan(size) else "inf" if math.isinf(size) else ""


def _origin(here: Event, kind: str, bad: list[Value]) -> Event | None:
    """Return the event that a bad output comes from: what is here, or before it."""
    before = [value for value in bad if value.is_nan] if kind == "nan" else bad
    if before:
        return joined(before)
    cause = joined(bad)
    return dataclasses.replace(here, kind=kind, parents=(cause,) if cause else ())


def _mark_use(bad: list[Value], here: Event) -> None:
    """Remember the equation that made a bad result of what was given."""
    given_ones = [value.event for value in bad if value.event and value.event.given]
    for event in given_ones:
        event.met_by = event.met_by or here
        if here.eqn.primitive.name not in MOVES:
            event.used = event.used or here


def _named(eqn: Any, name: str) -> str:
    """Return what an output is called, if its first operand has a name."""
    kind = eqn.primitive.name
    if kind == "slice" and eqn.params["start_indices"]:
        start, limit = eqn.params["start_indices"][0], eqn.params["limit_indices"][0]
        is_one = limit - start == 1 and len(eqn.outvars[0].aval.shape)
        return f"{name}[{start}]" if is_one else name
    if kind in PARTS:
        return name
    return f"the sum of {name}" if kind == "reduce_sum" else ""


def _part(stack: Value, i: int, size: float) -> Value:
    """Return a slice of what a scan goes through."""
    if stack.each:
        return stack.each[i]
    name = f"{stack.name}[{i}]" if stack.name else ""
    event = None if math.isfinite(size) else stack.event
    return stack._replace(size=size, event=event, name=name)


def _stacked(values: list[Value]) -> Value:
    """Return what a scan has stacked."""
    after = any(value.after_backward for value in values)
    near = values[-1].near if values else ""
    return Value(_largest(values), None, "", near, after, tuple(values))


def ancestors(event: Event) -> Iterator[Event]:
    """Return an event and all that it comes from."""
    seen, waiting = set(), [event]
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += each.parents
