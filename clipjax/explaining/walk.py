"""Walks through a watched program in Python, with some numbers for each array."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from clipjax.explaining.events import (
    CONSTANT,
    NOWHERE,
    ONE,
    Event,
    Output,
    Place,
    Value,
    joined,
    kind_of,
)
from clipjax.explaining.internals import (
    Equation,
    closed,
    interpret,
    is_inexact,
    scan_counts,
    scopes,
)
from clipjax.explaining.primitives import (
    LOSES,
    MOVES,
    PARTS,
    REARRANGED,
    SAME,
    callee,
    is_silent,
    measured,
)
from clipjax.explaining.watch import ROOM, Watch, as_float, numbers_of


class Tape:
    """Numbers that are read one after the other: counts, or the bits of floats."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers, self.at = numbers, 0

    def take(self, count: int) -> Any:
        """Return the next numbers."""
        self.at += count
        return self.numbers[self.at - count : self.at]

    def count(self) -> int:
        """Return the next number as a whole one."""
        return int(self.take(1)[0])

    def pair(self) -> tuple[int, int]:
        """Return the next two numbers as whole ones."""
        return self.count(), self.count()

    def size(self) -> float:
        """Return the next number as a float."""
        return as_float(self.take(1)[0])

    def rows(self, count: int, width: int) -> list[Tape]:
        """Return the tapes of some iterations."""
        return [Tape(row) for row in self.take(count * width).reshape(count, width)]


class Walk:
    """Reads what a watched program has written."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.short: dict[int, int] = {}  # loops with more iterations than were written
        self.operations: list[Event] = []

    def run(
        self,
        jaxpr: Any,
        constants: Sequence[Any],
        arguments: Sequence[Value],
        tape: Tape,
        place: Place = NOWHERE,
    ) -> list[Value]:
        """Return the values of the results of a jaxpr."""

        def step(eqn: Equation, operands: list[Value]) -> list[Value]:
            return self._step(eqn, operands, tape, place.at(jaxpr, eqn))

        return interpret(jaxpr, constants, arguments, _constant, step)

    def _step(
        self, eqn: Equation, operands: list[Value], tape: Tape, place: Place
    ) -> list[Value]:
        """Return the values of the outputs of an equation."""
        name, called = eqn.primitive.name, callee(eqn)
        if name == "scan":
            return self._scan(eqn, operands, tape, place)
        if name == "while":
            return self._while(eqn, operands, tape, place)
        predicate = operands[0] if name == "cond" else Value()
        if name == "cond":
            called, operands = eqn.params["branches"][tape.count()], operands[1:]
            (tape,) = tape.rows(1, self.watch.widths[id(eqn)])
        if is_silent(eqn):
            return []
        if called is not None:
            outs = self.run(called.jaxpr, called.consts, operands, tape, place)
            return [_decided(each, predicate) for each in outs]
        if name in SAME:
            same = [each._replace(each=()) for each in operands[: len(eqn.outvars)]]
            return [each._replace(at=_place_of(eqn, each)) for each in same]
        return self._operation(eqn, operands, tape, place)

    def _scan(
        self, eqn: Equation, operands: list[Value], tape: Tape, place: Place
    ) -> list[Value]:
        params, body = eqn.params, closed(eqn.params["jaxpr"])
        length, (first, carried) = params["length"], scan_counts(params)
        constants, rest = operands[:first], operands[first:]
        carry, xs = rest[:carried], rest[carried:]
        of_xs = body.jaxpr.invars[first + carried :]
        rows = tape.rows(length, self.watch.widths[id(eqn)])
        ys: list[list[Value]] = [[] for _ in range(length)]
        for i in range(length)[:: -1 if params["reverse"] else 1]:
            parts = [
                _part(x, i, rows[i].size() if is_inexact(v.aval) else 0.0)
                for x, v in zip(xs, of_xs, strict=True)
            ]
            arguments, during = [*constants, *carry, *parts], place.during(i, length)
            outs = self.run(body.jaxpr, body.consts, arguments, rows[i], during)
            carry, ys[i] = outs[:carried], outs[carried:]
        stacks = (
            zip(*ys, strict=True) if length else [()] * (len(eqn.outvars) - carried)
        )
        return [*carry, *map(_stacked, stacks)]

    def _while(
        self, eqn: Equation, operands: list[Value], tape: Tape, place: Place
    ) -> list[Value]:
        params, room = eqn.params, self.watch.room.get(id(eqn), ROOM)
        rest = operands[params["cond_nconsts"] :]
        first, body = params["body_nconsts"], params["body_jaxpr"]
        constants, carry = rest[:first], rest[first:]
        count = tape.count()
        rows = tape.rows(room, self.watch.widths[id(eqn)])
        if count > room:
            self.short[id(eqn)] = max(count, self.short.get(id(eqn), 0))
        for i, row in enumerate(rows[:count]):
            arguments, during = [*constants, *carry], place.during(i, None)
            carry = self.run(body.jaxpr, body.consts, arguments, row, during)
        return carry

    def _operation(
        self, eqn: Equation, operands: list[Value], tape: Tape, place: Place
    ) -> list[Value]:
        what, operands = measured(eqn), _picked(eqn, operands)
        outputs = [_output(tape) for _ in what.outputs]
        here = Event(
            place=place,
            operands=tuple(operands),
            outputs=tuple(outputs),
            met=tape.count() if what.by_place else 0,
            order=len(self.operations),
        )
        least = [None] * 2 if what.judged is None else [tape.size(), tape.size()]
        self.operations.append(here)
        like = _like(eqn, operands)
        found = dict(zip(what.outputs, outputs, strict=True))
        return [
            _bad_by(here, found[k], like, least, by_place=what.by_place)
            if k in found
            else _about(operands, like)
            for k in range(len(eqn.outvars))
        ]


def _about(operands: Sequence[Value], like: Value) -> Value:
    """Return a bool, which is about what was compared."""
    return like._replace(
        nan=joined(value.nan for value in operands),
        inf=joined(value.inf for value in operands),
    )


def _output(tape: Tape) -> Output:
    return Output(tape.size(), tape.pair(), tape.pair())


def given(x: Any, name: str = "") -> Value:
    """Return the value of an argument, or of a constant, which has no name."""
    seen = _output(Tape(numbers_of(jnp.asarray(x))))
    nan, inf = (
        Event(kind, given=name or CONSTANT) if count else None
        for kind, (count, _) in (("nan", seen.nan), ("inf", seen.inf))
    )
    return Value(seen.size, nan, inf, name=name)


def _constant(x: Any, aval: Any) -> Value:
    if not is_inexact(aval):
        return Value()
    is_fine = not aval.shape and np.isfinite(x)
    return Value(float(np.abs(x))) if is_fine else given(x)


def _bad_by(
    here: Event, out: Output, like: Value, least: Sequence[Any], *, by_place: bool
) -> Value:
    """Return an output, whose bad elements come from operands, or began here.

    If not `by_place`, each may come from any element of the operands. NaN that arose
    here comes from the infinities that it was made of.
    """

    def met(bit: int) -> list[Value]:
        pairs = enumerate(here.operands)
        return [value for k, value in pairs if here.met >> (3 * k + bit) & 1]

    inf: list[Event | None]
    nan: list[Event | None]
    if by_place:
        inf = [value.inf or value.event for value in met(1)]
        nan = [value.nan or value.event for value in met(2)]
        made_of = met(3)
        new_inf, new_nan = out.inf[0] > 0, out.nan[0] > 0
        reason = _chosen(here, met(1) + met(2))
    else:
        made_of = [value for value in here.operands if value.inf]
        inf = [value.inf for value in made_of] if out.inf[0] else []
        nan = [value.nan for value in here.operands if value.nan] if out.nan[0] else []
        new_inf, new_nan = out.inf[0] > 0 and not inf, out.nan[0] > 0 and not nan
        reason = None
    source = joined(value.inf or value.event for value in made_of)
    before = _lost_before(here)
    if new_inf:
        inf.append(before or dataclasses.replace(here, kind="inf", least=least[1]))
    if new_nan and not made_of and before:
        source = before
    if new_nan and not (made_of and _is_known(made_of, joined(nan))):
        parents = (source,) if source else ()
        began = dataclasses.replace(here, kind="nan", least=least[0], parents=parents)
        nan.append(began)
    _mark_use([*inf, *nan, source if new_nan else None], here)
    field = LOSES.get(here.name)
    lost = joined(getattr(value, field) for value in here.operands) if field else None
    return like._replace(
        size=out.size,
        lost=lost,
        nan=reason if reason and nan else joined(nan),
        inf=reason if reason and inf else joined(inf),
    )


def _lost_before(here: Event) -> Event | None:
    """Return what made an operand reach an end of the domain, if it was a fault."""
    judged = measured(here.eqn).judged
    lost = None if judged is None else here.operands[judged].lost
    is_fault = lost and any(root.eqn is not None for root in lost.roots)
    return lost if is_fault else None


def _is_known(made_of: Sequence[Value], nan: Event | None) -> bool:
    """Whether NaN that was made of infinities tells nothing new.

    NaN of the same ones is there already, or was lost in a maximum.
    """
    infinities = joined(value.inf or value.event for value in made_of)
    roots = nan.roots if nan else frozenset()
    is_same = infinities is not None and infinities.roots <= roots
    lost = [value.lost for value in made_of if value.lost]
    return is_same or (bool(roots) and any(event.kind == "nan" for event in lost))


def _chosen(here: Event, bad: list[Value]) -> Event | None:
    """Return what made a select take a constant, if it was something bad.

    So `jnp.median` returns NaN if an element is NaN. An infinity is a mask, unless one
    bool decides about all elements.
    """
    if here.name != "select_n" or not all(map(_is_constant, bad)):
        return None
    if here.eqn.invars[0].aval.shape and not any(value.nan for value in bad):
        return None
    return _as_reason(here.operands[0])


def _decided(out: Value, predicate: Value) -> Value:
    """Return what a cond returns; a bad constant comes from what it decided by."""
    reason = _as_reason(predicate) if _is_constant(out) else None
    if reason is None:
        return out
    return out._replace(nan=out.nan and reason, inf=out.inf and reason)


def _is_constant(value: Value) -> bool:
    return value.event is not None and value.event.given == CONSTANT


def _as_reason(predicate: Value) -> Event | None:
    """Return what a predicate is about, unless it is an infinity that was given."""
    event = predicate.event
    is_made = event and any(root.eqn or root.kind == "nan" for root in event.roots)
    return event if is_made else None


def _mark_use(events: Iterable[Event | None], here: Event) -> None:
    """Remember the operations that made a bad result of what was given."""
    met = [part for event in events if event for part in event.parts]
    for event in [each for each in met if each.given]:
        event.first_used = event.first_used or here
        if event.used is None or (event.used.name in MOVES and here.name not in MOVES):
            event.used = here


def _like(eqn: Equation, operands: list[Value]) -> Value:
    """Return the value of an output, but for its size."""
    pairs = zip(eqn.invars, operands, strict=True)
    names = [value.name for v, value in pairs if value.name and is_inexact(v.aval)]
    nears = [value.near for value in operands if value.near]
    after_backward = any(value.after_backward for value in operands)
    name, at = _part_name(eqn, operands[0]) if operands else ("", 0)
    return Value(
        name=name,
        at=at,
        near=(names or nears or [""])[-1],
        after_backward=after_backward or "transpose(" in scopes(eqn),
    )


def _part_name(eqn: Any, whole: Value) -> tuple[str, int | None]:
    """Return what an output is called after the first operand, and its `Value.at`."""
    name, kind, params = whole.name, eqn.primitive.name, eqn.params
    if not name or kind not in (*PARTS, "reduce_sum"):
        return "", 0
    if kind == "reduce_sum":
        return f"the sum of {name}", None
    if kind not in ("slice", "dynamic_slice"):
        return name, whole.at
    starts, limits = (params.get(f"{end}_indices", ()) for end in ("start", "limit"))
    rest = zip(starts[1:], limits[1:], eqn.invars[0].aval.shape[1:], strict=False)
    is_cut = any((start, limit) != (0, size) for start, limit, size in rest)
    if not starts or is_cut or params["strides"] or whole.at in (None, ONE):
        return name, None
    start = whole.at + starts[0]
    return (f"{name}[{start}]", ONE) if limits[0] == starts[0] + 1 else (name, start)


def _place_of(eqn: Any, same: Value) -> int | None:
    """Return `Value.at` of what has the elements of another array."""
    name, shape = eqn.primitive.name, eqn.invars[0].aval.shape
    if name == "squeeze" and eqn.params["dimensions"] == (0,) and same.at == ONE:
        return 0
    return None if name in REARRANGED and shape else same.at


def _part(stack: Value, i: int, size: float) -> Value:
    """Return a slice of what a scan goes through."""
    if stack.each:
        return stack.each[i]
    name, at, kind = stack.name, stack.at, kind_of(size)
    return stack._replace(
        size=size,
        nan=stack.nan if kind == "nan" else None,
        inf=stack.inf if kind else None,
        name=name if not name or at in (None, ONE) else f"{name}[{at + i}]",
        at=None if at in (None, ONE) else 0,
    )


def _picked(eqn: Equation, operands: list[Value]) -> list[Value]:
    """Return the operands, or the iteration that is sliced from what a scan stacked."""
    if eqn.primitive.name != "slice" or not operands[0].each:
        return operands
    start, limit = (eqn.params[f"{end}_indices"][0] for end in ("start", "limit"))
    return [operands[0].each[start]] if limit == start + 1 else operands


def _stacked(values: Sequence[Value]) -> Value:
    """Return what a scan has stacked."""
    return Value(
        size=float(np.max([value.size for value in values], initial=0.0)),
        nan=joined(value.nan for value in values),
        inf=joined(value.inf for value in values),
        near=values[-1].near if values else "",
        after_backward=any(value.after_backward for value in values),
        each=tuple(values),
    )
