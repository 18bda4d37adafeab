"""From the events behind bad results to the causes that are told."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from clipjax.explaining.causes import Bad, Cause, Input
from clipjax.explaining.events import CONSTANT, ONE, Event, Value
from clipjax.explaining.internals import is_inexact, is_literal
from clipjax.explaining.lines import (
    Line,
    Passes,
    is_again,
    is_in_softmax,
    line_of,
    written,
)
from clipjax.explaining.primitives import (
    HAS_END_AT_0,
    HAVE_POLES,
    MOVES,
    MULTIPLY,
    PARTS,
    measured,
)

# How many operands a text tells.
TOLD = 3
# What is more than this many times as large as usual is told, for some lines.
LARGE, MOST = 3.0, 3


def first_causes(
    results: Mapping[str, Event], passes: Passes, arguments: Mapping[str, Any]
) -> list[Cause]:
    """Return what bad results come from, one cause for each line."""
    names: dict[int, list[str]] = {}  # the results that come from an event
    became_nan: dict[int, Event] = {}
    accused: dict[int, Event] = {}
    for name, last in results.items():
        for event in sorted(last.ancestors, key=lambda event: event.order):
            names.setdefault(id(event), []).append(name)
            if event.eqn is not None and event.parents:
                for root in event.roots:
                    if root.kind == "inf":
                        became_nan.setdefault(id(root), event)
        accused |= {id(event): event for event in _accused(last, passes)}
    nan = {name for name, event in results.items() if event.kind == "nan"}

    def rank(event: Event) -> tuple[bool, bool, int, bool]:
        never_nan, is_inf = nan.isdisjoint(names[id(event)]), event.kind == "inf"
        return never_nan, bool(event.given) and is_inf, event.order, is_inf

    # Those of an operation in all iterations, which may be of both kinds.
    alike: dict[Any, list[Event]] = {}
    for event in sorted(accused.values(), key=rank):
        place = id(event) if event.given else event.place.key
        alike.setdefault(place, []).append(event)
    causes: dict[Any, Cause] = {}
    keys: dict[Any, Any] = {}  # by what was written, in a library or not
    for event, *others in alike.values():
        times = len({event.order, *(each.order for each in others)})
        cause = cause_of(event, passes, arguments)
        key = cause.file, cause.line, cause.operation, cause.began_in, cause.given
        what = written(event)
        if is_again(event) and what in keys:
            # Of a remat of a library's function, only this has the user's line.
            line = {field: getattr(cause, field) for field in Line._fields}
            causes[keys[what]] = causes[keys[what]]._replace(**line)
            continue
        keys.setdefault(what, key)
        if key in causes:
            causes[key] = causes[key]._replace(again=causes[key].again + times)
            continue
        lines = [(each.file, each.line) for each in causes.values()]
        if cause.began_in == "backward" and (cause.file, cause.line) in lines:
            continue  # one fault often breaks several slopes of a line
        if id(event) in became_nan:
            later = cause_of(became_nan[id(event)], passes, arguments)
            cause = cause._replace(became_nan=later)
        reached = tuple(names[id(event)])
        causes[key] = cause._replace(again=times - 1, results=reached)
    return list(causes.values())


def _accused(last: Event, passes: Passes) -> list[Event]:
    """Return the events that are causes of one result.

    An infinity that was given, as a mask, is one only where something multiplies by it,
    or where nothing else is: otherwise what made NaN of it is the cause. One that was
    only moved to the result is none. Where the forward pass broke, the backward pass
    breaks as well, and is none.
    """
    events = sorted(last.ancestors, key=lambda event: event.order)
    roots = [event for event in events if not event.parents]
    causes = [event for event in roots if not _is_mild(event)]
    for event in events:
        is_of_mild = event.eqn and event.parents and all(map(_is_mild, event.roots))
        if is_of_mild and not any(each in causes for each in event.ancestors):
            causes.append(event)
    first = {event.place.key: event for event in causes[::-1] if event.eqn}
    began_in = {place: passes.of(event) for place, event in first.items()}
    if "forward" in began_in.values():
        return [e for e in causes if began_in.get(e.place.key) != "backward"]
    return causes or [e for e in roots if e.kind == "nan" or _is_used(e)]


def _is_used(event: Event) -> bool:
    """Whether what was given came into more than another place in an array."""
    return event.used is not None and event.used.name not in MOVES


def _is_mild(event: Event) -> bool:
    """Whether it was given, and may be meant."""
    if not event.given:
        return False
    if event.given == CONSTANT or event.used is None or event.used.name in MOVES:
        return True
    return event.kind == "inf" and event.used.name not in MULTIPLY


def cause_of(event: Event, passes: Passes, arguments: Mapping[str, Any]) -> Cause:
    """Return the cause that tells an event."""
    if event.given:
        used = event.first_used if event.given == CONSTANT else event.used
        line = line_of(used) if used else Line()
        bad = _bad_of(arguments.get(event.given), event.kind)
        return Cause(event.kind, **line._asdict(), given=event.given, bad=bad)
    inputs, began_in = _inputs(event), passes.of(event)
    is_slope = began_in == "backward" and event.least == 0
    slope_of = passes.slope_of(event) if is_slope else ""
    roots = {root.given for root in event.roots if event.parents} - {"", CONSTANT}
    is_named = any(each.name for each in inputs)
    nears = [value.near for value in event.operands if value.near]
    return Cause(
        event.kind,
        event.name,
        **line_of(event)._asdict(),
        began_in=began_in,
        iterations=event.place.iterations,
        inputs=inputs,
        given=" and ".join(sorted(roots)),
        after=nears[-1] if nears and not is_named else "",
        what=_in_words(event, inputs, slope_of),
        bad=_bad_in(event),
    )


def _inputs(event: Event) -> tuple[Input, ...]:
    """Return what is known of the operands of an operation."""
    eqn, judged = event.eqn, measured(event.eqn).judged
    least = event.least
    if least is not None and least > 0 and event.name != "div":
        judged = None  # it is not at an end of the domain

    def is_told(v: Any, value: Value) -> bool:
        """Whether the size is known; an infinity beside it made nothing bad here."""
        return is_inexact(v.aval) and (bool(event.parents) or not value.is_bad)

    return tuple(
        Input(
            value.name,
            str(getattr(v.aval, "dtype", v.aval)),
            tuple(getattr(v.aval, "shape", ())),
            value.size if is_told(v, value) else None,
            least if k == judged else _signed(v),
            moved=value.at not in (0, ONE),
        )
        for k, (v, value) in enumerate(zip(eqn.invars, event.operands, strict=True))
    )


def _signed(v: Any) -> float | None:
    """Return a number in the program's text, of which a value has no sign."""
    is_real = is_literal(v) and jnp.issubdtype(v.aval.dtype, jnp.floating)
    return float(v.val) if is_real else None


def _bad_of(x: Any, kind: str) -> Bad | None:
    """Return which elements of an argument are bad; None for a constant."""
    if x is None:
        return None
    flags = np.asarray(jnp.isnan(x) if kind == "nan" else jnp.isinf(x))
    return Bad(int(flags.sum()), flags.shape, _index(int(flags.argmax()), flags.shape))


def _bad_in(event: Event) -> Bad | None:
    """Return which elements of an output are bad."""
    places = measured(event.eqn).outputs
    for k, each in zip(places, event.outputs, strict=True):
        count, first = each.nan if event.kind == "nan" else each.inf
        if event.kind and count:
            aval = event.eqn.outvars[k].aval
            is_at_end = event.name in HAVE_POLES or event.least == 0
            is_moved = event.name in MOVES - PARTS
            is_over = event.kind == "inf" and not is_at_end and not is_moved
            limit = float(jnp.finfo(aval.dtype).max) if is_over else None
            index = _index(first, aval.shape)
            return Bad(count, aval.shape, index, str(aval.dtype), limit)
    return None


def _index(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(place, shape))


def _in_words(event: Event, inputs: tuple[Input, ...], slope_of: str) -> str:
    """Say what an operation did."""
    name, kind, least = event.name, event.kind, event.least
    operands = " and ".join(map(str, inputs[:TOLD]))
    operands += f" and {len(inputs) - TOLD} more" if len(inputs) > TOLD else ""
    plain = f"{name} of {operands}"
    if kind == "nan" and event.parents:
        if name == "sub" and event.met & 1:
            is_masked = is_in_softmax(event)
            row = "; a whole row of the softmax is -inf" if is_masked else ""
            return f"-inf - -inf{row}"
        signs = {"mul": "0 · inf", "div": "inf / inf"}
        signs |= dict.fromkeys(("add", "add_any", "sub"), "inf - inf")
        return signs.get(name, plain)
    if slope_of:
        end = "0" if slope_of in HAS_END_AT_0 else "an end of its domain"
        return f"the slope of {slope_of} at {end} ({plain})"
    if name == "div" and least == 0:
        is_real = not jnp.issubdtype(
            event.eqn.outvars[0].aval.dtype, jnp.complexfloating
        )
        zeros = kind == "nan" and is_real  # of complex numbers, 1 / 0 is NaN as well
        return f"{'0 / 0' if zeros else 'a division by 0'} ({plain})"
    if name == "cholesky":
        return f"{plain}, which is not positive definite"
    if name == "gather" and kind == "nan":
        return f"{plain}, with an index out of bounds"
    return plain


def larger(
    arguments: Mapping[str, tuple[float, float]],
    operations: Sequence[tuple[Event, Event]],
    passes: Passes,
) -> list[Cause]:
    """Return the arguments that are larger than usual, and where sizes grow most.

    Args:
      arguments: the size of each, and the usual one.
      operations: each with the same one in a usual call.
      passes: tells the passes apart.
    """
    causes = [
        Cause("large", given=name, times=times, what=_than(size, usual))
        for name, (size, usual) in arguments.items()
        if (times := _times(size, usual, of_none=math.inf)) > LARGE
    ]
    growths = [(_growth(event, usual), event) for event, usual in operations]
    lines: dict[Any, Cause] = {}
    grown = [each for each in growths if each[0] > LARGE]
    for times, event in sorted(grown, key=lambda each: -each[0]):
        cause = cause_of(event, passes, {})._replace(kind="large", times=times)
        if not cause.library.startswith("clipjax "):  # which measures, as a probe does
            lines.setdefault((cause.file, cause.line, cause.began_in), cause)
    return [*causes, *list(lines.values())[:MOST]]


def _than(size: float, usual: float) -> str:
    return f"up to {size:.3g}, usually {usual:.3g}"


def _times(size: float, usual: float, of_none: float = 1.0) -> float:
    return 1.0 if not size else size / usual if usual else of_none


def _growth(now: Event, usual: Event) -> float:
    """Return how many times as much as usual an operation made its inputs grow."""
    operands = list(zip(now.operands, usual.operands, strict=True))
    if any(x.is_bad or y.is_bad for x, y in operands):  # as a mask is
        return 1.0
    before = [_times(x.size, y.size) for x, y in operands]
    outputs = zip(now.outputs, usual.outputs, strict=True)
    after = [_times(x.size, y.size) for x, y in outputs]
    return max(after, default=1.0) / max([1.0, *before])
