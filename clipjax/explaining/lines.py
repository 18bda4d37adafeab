"""Where an equation stands: the user's line, the library's, and the pass."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from clipjax.explaining.internals import (
    Equation,
    Frame,
    closed,
    frames,
    is_literal,
    scan_counts,
    scopes,
)
from clipjax.explaining.primitives import HAS_ENDS, callee
from clipjax.explaining.walk import Event

_JAX = str(Path(jax.__file__).parent)
_OWN = str(Path(__file__).parent.parent)
_INSTALLED = tuple(sysconfig.get_path(key) for key in ("purelib", "platlib", "stdlib"))
# Functions of JAX that people call by name; the rest of JAX is machinery.
_CALLED = re.compile(r"_src/(nn|scipy|ops|image|numpy/(linalg|reductions|fft))\b")


class Line(NamedTuple):
    """A line of the user's, and the library function that it calls."""

    file: str = ""
    line: int = 0
    function: str = ""
    library: str = ""


def line_of(event: Event) -> Line:
    """Return the innermost line of the user's around an equation."""
    library, last = "", Line()
    for eqn in _outwards(event):
        for frame in frames(eqn):
            if _is_users(frame):
                return Line(frame.file, frame.line, _short(frame), library)
            name = _library(frame)
            if name and (not library or library.startswith("jax ")):
                library, last = name, Line(frame.file, frame.line, _short(frame))
        if not library and eqn.primitive.name in ("jit", "pjit"):
            library = f"jax {eqn.params['name'].lstrip('_')}"
    return last


def _outwards(event: Event) -> list[Equation]:
    callers = [eqn for _, eqn in event.place.calls]
    return [*([event.eqn] if event.eqn else []), *callers[::-1]]


def _is_users(frame: Frame) -> bool:
    is_installed = frame.file.startswith((*_INSTALLED, _JAX, _OWN))
    return not is_installed and not frame.file.startswith("<frozen")


def _library(frame: Frame) -> str:
    """Return how a library's function is called, or "" if it is machinery."""
    if frame.file.startswith(_JAX):
        is_called = _CALLED.search(frame.file)
        return f"jax {_short(frame).lstrip('_')}" if is_called else ""
    for folder in _INSTALLED[:2]:
        if frame.file.startswith(folder):
            return f"{Path(frame.file).relative_to(folder).parts[0]} {_short(frame)}"
    return f"clipjax {_short(frame)}" if frame.file.startswith(_OWN) else ""


def _short(frame: Frame) -> str:
    """Return the name of a function: that of its class or maker, if it has one."""
    first, _, rest = frame.function.partition(".")
    return first if rest else frame.function


def _is_in_optimizer(event: Event) -> bool:
    """Whether an `update` of Optax or clipjax has made an equation."""
    return any(
        "update" in frame.function
        and _library(frame).startswith(("optax ", "clipjax "))
        for eqn in _outwards(event)
        for frame in frames(eqn)
    )


def _site(eqn: Equation) -> Frame | None:
    """Return the line that an equation stands for, in a library or not."""
    found = (each for each in frames(eqn) if _library(each) or _is_users(each))
    return next(found, None)


def decides(jaxpr: Any, check: Event) -> bool:
    """Whether a check of finiteness is about more than single elements.

    The checks in JAX's own functions, as in `logsumexp`, do not count.
    """
    site = _site(check.eqn)
    if site is None or site.file.startswith(_JAX):
        return False
    flags = check.eqn.outvars[0]
    users = [eqn for eqn in jaxpr.eqns if flags in eqn.invars]
    by_element = {"select_n", "jit"}
    return not flags.aval.shape or not any(
        u.primitive.name in by_element for u in users
    )


class Passes:
    """Tells the forward from the backward pass.

    Under `jvp`, a function's value and its slope are computed together, and a remat
    computes both again. What only transposed equations use is a slope: it belongs to
    the backward pass.
    """

    def __init__(self, program: Any) -> None:
        self._primal: set[int] = set()
        self._sites: dict[Frame | None, list[str]] = {}
        self._find(program, range(len(program.outvars)))

    def _find(self, jaxpr: Any, results: Iterable[int]) -> None:
        """Find the equations that some results of a jaxpr need."""
        variables = [v for eqn in jaxpr.eqns for v in eqn.invars]
        used = {v for v in (*variables, *jaxpr.outvars) if not is_literal(v)}
        outs = [jaxpr.outvars[k] for k in results]
        need = {v for v in outs if not is_literal(v)}
        for eqn in jaxpr.eqns[::-1]:
            if "transpose(" in scopes(eqn):
                continue
            places = [k for k, v in enumerate(eqn.outvars) if v in need]
            # The loss is used by nothing where only gradients are returned.
            if places or used.isdisjoint(eqn.outvars):
                self._primal.add(id(eqn))
                self._sites.setdefault(_site(eqn), []).append(eqn.primitive.name)
                need.update(v for v in eqn.invars if not is_literal(v))
                self._enter(eqn, places)

    def _enter(self, eqn: Equation, places: list[int]) -> None:
        name, called = eqn.primitive.name, callee(eqn)
        if name == "scan":
            carried = scan_counts(eqn.params)[1]
            body = closed(eqn.params["jaxpr"]).jaxpr
            self._find(body, {*range(carried), *places})
        elif name == "while":
            self._find(eqn.params["body_jaxpr"].jaxpr, range(len(eqn.outvars)))
        elif name == "cond":
            for branch in eqn.params["branches"]:
                self._find(branch.jaxpr, places)
        elif called is not None:
            self._find(called.jaxpr, places)

    def of(self, event: Event) -> str:
        """Return "forward", "backward", or "update" for what uses gradients."""
        names = [scopes(eqn) for eqn in _outwards(event)]
        if _any("rematted_computation", names):
            sites = self._sites.get(_site(event.eqn), [])
            return "forward" if event.eqn.primitive.name in sites else "backward"
        if _any("transpose(", names):
            return "backward"
        if _any("jvp(", names):
            return "forward" if id(event.eqn) in self._primal else "backward"
        after = any(value.after_backward for value in event.operands)
        return "update" if after or _is_in_optimizer(event) else "forward"

    def is_again(self, event: Event) -> bool:
        """Whether a remat computed an operation of the forward pass again."""
        return _any("rematted_computation", [scopes(eqn) for eqn in _outwards(event)])

    def slope_of(self, event: Event) -> str:
        """Return the operation whose slope an operation of the backward pass is.

        It has an operand in common with it, or stands on the same line.
        """
        eqn = event.eqn
        is_transposed = _any("transpose(", [scopes(each) for each in _outwards(event)])
        if is_transposed and eqn.primitive.name != "div":
            return ""
        others = [each for each in event.jaxpr.eqns if each is not eqn]
        near = [each.primitive.name for each in others if _share(each, eqn)]
        for names in (near, self._sites.get(_site(eqn), [])):
            found = list(dict.fromkeys(name for name in names if name in HAS_ENDS))
            if found:
                return " or ".join(found)
        return ""


def _any(part: str, names: list[str]) -> bool:
    return any(part in name for name in names)


def _share(one: Equation, other: Equation) -> bool:
    """Whether equations of one line have an operand in common, or follow each other."""
    operands = {v for v in other.invars if not is_literal(v)}
    mine = {v for v in (*one.invars, *one.outvars) if not is_literal(v)}
    return not operands.isdisjoint(mine) and _site(one) == _site(other)
