"""From the events behind bad results to the causes that are told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from clipjax.explaining.causes import Cause, Input, in_words
from clipjax.explaining.internals import is_inexact
from clipjax.explaining.lines import Passes, line_of
from clipjax.explaining.primitives import MULTIPLY, has_least, judged_operand
from clipjax.explaining.walk import CONSTANT, Event, ancestors


def first_causes(
    results: Mapping[str, Event | None], passes: Passes, arguments: Mapping[str, Any]
) -> list[Cause]:
    """Return what bad results come from, one cause for each line."""
    found: dict[int, Event] = {}
    names: dict[int, list[str]] = {}
    for name, last in results.items():
        for event in ancestors(last) if last else ():
            found[id(event)] = event
            names.setdefault(id(event), []).append(name)
    events = sorted(found.values(), key=lambda event: event.order)
    to_nan: dict[int, Event] = {}
    for event in events:
        if event.eqn is not None and event.parents:
            for root in event.roots:
                to_nan.setdefault(id(root), event)
    nan = {name for name, event in results.items() if event and event.kind == "nan"}

    def rank(event: Event) -> tuple[bool, bool, int]:
        reaches_nan = not nan.isdisjoint(names[id(event)])
        return not reaches_nan, bool(event.given) and event.kind == "inf", event.order

    kept: dict[Any, Cause] = {}
    accused = {
        id(event): event for last in results.values() for event in _accused(last)
    }
    for event in sorted(accused.values(), key=rank):
        cause = cause_of(event, passes, arguments)
        key = cause.file, cause.line, cause.operation, cause.began_in, cause.given
        if key in kept:
            again = passes.is_again(event)
            kept[key] = kept[key]._replace(again=kept[key].again + (not again))
            continue
        later = to_nan.get(id(event))
        if later is not None:
            cause = cause._replace(became_nan=cause_of(later, passes, arguments))
        kept[key] = cause._replace(results=tuple(names[id(event)]))
    return list(kept.values())


def _accused(last: Event | None) -> list[Event]:
    """Return the events that are causes of one result.

    An infinity that was given, as a mask, is one only where something multiplies by it,
    or where nothing else is: otherwise what made NaN of it is the cause. One that was
    only moved to the result is none.
    """
    events = sorted(ancestors(last), key=lambda event: event.order) if last else []
    roots = [event for event in events if not event.parents]
    causes = [event for event in roots if not _is_mild(event)]
    for event in events:
        is_of_mild = event.eqn and event.parents and all(map(_is_mild, event.roots))
        if is_of_mild and not any(each in causes for each in ancestors(event)):
            causes.append(event)
    return causes or [event for event in roots if event.used or event.kind == "nan"]


def _is_mild(event: Event) -> bool:
    if not event.given:
        return False
    if event.given == CONSTANT or event.used is None:
        return True
    return event.kind == "inf" and event.used.eqn.primitive.name not in MULTIPLY


def cause_of(event: Event, passes: Passes, arguments: Mapping[str, Any]) -> Cause:
    """Return the cause that tells an event."""
    if event.given:
        met_by = event.used or event.met_by
        what = _elements(arguments.get(event.given), event.kind)
        cause = Cause(event.kind, given=event.given, what=what)
        return cause._replace(**line_of(met_by)._asdict()) if met_by else cause
    eqn = event.eqn
    began_in = passes.of(event)
    slope_of = passes.slope_of(event) if began_in == "backward" else ""
    name = eqn.primitive.name
    inputs = inputs_of(event)
    dtype = str(eqn.outvars[0].aval.dtype)
    given = (
        {root.given for root in event.roots} - {"", CONSTANT} if event.parents else ()
    )
    is_named = any(each.name for each in inputs)
    near = [value.near for value in event.operands if value.near]
    return Cause(
        event.kind,
        operation=name,
        **line_of(event)._asdict(),
        began_in=began_in,
        iterations=event.place.iterations,
        inputs=inputs,
        given=" and ".join(sorted(given)),
        after="" if is_named or not near else near[-1],
        slope_of=slope_of,
        what=in_words(
            name, slope_of, event.kind, inputs, dtype, is_negative=bool(event.met & 1)
        ),
    )


def inputs_of(event: Event) -> tuple[Input, ...]:
    """Return what is known of the operands of an operation."""
    eqn, inputs = event.eqn, []
    for k, (variable, value) in enumerate(zip(eqn.invars, event.operands, strict=True)):
        aval = variable.aval
        has_ends = has_least(eqn) and k == judged_operand(eqn)
        inputs.append(
            Input(
                value.name,
                str(getattr(aval, "dtype", aval)),
                tuple(getattr(aval, "shape", ())),
                value.size if is_inexact(aval) else None,
                event.least if has_ends else None,
            )
        )
    return tuple(inputs)


def _elements(x: Any, kind: str) -> str:
    """Say how many elements of an argument are bad, and where the first is."""
    if x is None:
        return ""
    flags = jnp.isnan(x) if kind == "nan" else jnp.isinf(x)
    if not flags.ndim:
        return ""
    first = np.unravel_index(int(jnp.argmax(flags)), flags.shape)
    place = ", ".join(str(int(i)) for i in first)
    return f"{int(flags.sum())} of {flags.size} elements, first at [{place}]"


def large_argument(name: str, times: float, size: float, usual: float) -> Cause:
    """Return the cause that tells of an argument that is larger than usual."""
    what = f"up to {size:.3g}, usually {usual:.3g}"
    return Cause("large", given=name, times=times, what=what)


def large_operation(event: Event, times: float, passes: Passes) -> Cause:
    """Return the cause that tells where sizes grow more than usual."""
    cause = cause_of(event, passes, {})
    return cause._replace(kind="large", times=times)
