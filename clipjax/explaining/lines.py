"""Where an equation stands: the user's line, the library's, and the pass."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from clipjax.explaining.events import Event
from clipjax.explaining.internals import (
    Equation,
    Frame,
    closed,
    frames,
    is_literal,
    scan_counts,
    scopes,
)
from clipjax.explaining.primitives import callee, measured

_HERE = Path(__file__).parent
_FOLDERS = {
    Path(jax.__file__).parent: "jax",
    _HERE.parent: "clipjax",
    Path(sysconfig.get_path("stdlib")): "python",
    Path(sysconfig.get_path("platstdlib")): "python",
}
# Their wrappers may stand around the user's own functions.
_FRAMEWORKS = {"jax", "python", "clipjax", "optax", "flax", "equinox", "haiku"}
# Functions of JAX that people call by name; the rest of JAX is machinery.
_CALLED = re.compile(r"_src/(nn|scipy|ops|image|numpy/(linalg|reductions|fft))\b")


class Line(NamedTuple):
    """A line of the user's, and the library function that it calls."""

    file: str = ""
    line: int = 0
    function: str = ""
    library: str = ""


def line_of(event: Event) -> Line:
    """Return the innermost line of the user's around an equation.

    If all lines are of installed packages, the outermost one is the user's.
    """
    packages = [_package(frame) for frame in _all_frames(event)]
    others = [each for each in packages if each not in _FRAMEWORKS]
    users = "" if "" in packages or not others else others[-1]
    library, last = "", Line()
    for eqn in event.place.eqns:
        for frame in _frames(eqn):
            if _package(frame) == users:
                return Line(frame.file, frame.line, _own(frame), library)
            name = _library(frame)
            if name and (not library or library.startswith("jax ")):
                library, last = name, Line(frame.file, frame.line, _own(frame))
        if not library and eqn.primitive.name == "jit":
            library = f"jax {eqn.params['name'].lstrip('_')}"
    return last


def _frames(eqn: Equation) -> Iterator[Frame]:
    """Return the lines that made an equation, up to the call of `explain`."""
    for frame in frames(eqn):
        if Path(frame.file).parent == _HERE:
            return
        yield frame


def _package(frame: Frame) -> str:
    """Return the installed package that a line is of, or "" if it is the user's."""
    path = Path(frame.file)
    for folder in ("site-packages", "dist-packages"):
        if folder in path.parts:
            return path.parts[path.parts.index(folder) + 1].removesuffix(".py")
    if frame.file.startswith("<frozen"):
        return "python"
    found = (name for folder, name in _FOLDERS.items() if folder in path.parents)
    return next(found, "")


def _library(frame: Frame) -> str:
    """Return how a library's function is called, or "" if it is machinery."""
    package = _package(frame)
    is_machinery = package == "jax" and not _CALLED.search(Path(frame.file).as_posix())
    if package in ("", "python") or is_machinery:
        return ""
    return f"{package} {_short(frame).lstrip('_')}"


def _short(frame: Frame) -> str:
    """Return the name of a library's function: that of its class or maker."""
    return frame.function.partition(".")[0]


def _own(frame: Frame) -> str:
    """Return the name of a user's function, or that of its class."""
    return frame.function.rpartition("<locals>.")[2].partition(".")[0]


def _site(eqn: Equation) -> Frame | None:
    """Return the line that an equation stands for, in a library or not."""
    found = (each for each in _frames(eqn) if _library(each) or not _package(each))
    return next(found, None)


def decides(check: Event) -> bool:
    """Whether a check of finiteness is about more than single elements.

    The checks in JAX's own functions, as in `logsumexp`, do not count.
    """
    site = _site(check.eqn)
    if site is None or _package(site) == "jax":
        return False
    (flags,), (jaxpr, _) = check.eqn.outvars, check.place.path[-1]
    found, users = {flags}, set()
    for eqn in jaxpr.eqns:
        if not found.isdisjoint(_operands(eqn)):
            users.add(eqn.primitive.name)
            if eqn.primitive.name in ("not", "and", "or", "convert_element_type"):
                found.update(eqn.outvars)
    is_mask = not users.isdisjoint({"select_n", "mul", "jit"})
    is_about_all = not users.isdisjoint({"reduce_and", "reduce_or"})
    if check.operands[0].name:
        # Missing values in what was given are masked, or counted.
        return is_about_all and not is_mask
    return not flags.aval.shape or is_about_all or not is_mask


class Passes:
    """Tells the forward from the backward pass.

    Under `jvp`, a function's value and its slope are computed together, and a remat
    computes both again. What only transposed equations use is a slope: it belongs to
    the backward pass.
    """

    def __init__(self, program: Any) -> None:
        self._primal: dict[int, Equation] = {}
        self._find(program, range(len(program.outvars)))

    def _find(self, jaxpr: Any, results: Iterable[int]) -> None:
        """Find the equations that some results of a jaxpr need."""
        variables = [v for eqn in jaxpr.eqns for v in _operands(eqn)]
        used = {*variables, *(v for v in jaxpr.outvars if not is_literal(v))}
        outs = [jaxpr.outvars[k] for k in results]
        need = {v for v in outs if not is_literal(v)}
        for eqn in jaxpr.eqns[::-1]:
            if "transpose(" in scopes(eqn):
                continue
            places = [k for k, v in enumerate(eqn.outvars) if v in need]
            # The loss is used by nothing where only gradients are returned.
            if places or used.isdisjoint(eqn.outvars):
                self._primal[id(eqn)] = eqn
                need.update(_operands(eqn))
                for inner, inner_places in _called(eqn, places):
                    self._find(inner, inner_places)

    def of(self, event: Event) -> str:
        """Return "forward", "backward", "update", or "after" the backward pass."""
        names = _scopes(event)
        if "rematted_computation" in names:
            primal = self._at(_site(event.eqn))
            again = any(eqn.primitive.name == event.name for eqn in primal)
            return "forward" if again else "backward"
        if "transpose(" in names:
            return "backward"
        if "jvp(" in names:
            return "forward" if id(event.eqn) in self._primal else "backward"
        if _is_in_optimizer(event):
            return "update"
        after = any(value.after_backward for value in event.operands)
        return "after" if after else "forward"

    def _at(self, site: Frame | None) -> list[Equation]:
        """Return the operations of the forward pass in a line."""
        return [eqn for eqn in self._primal.values() if _site(eqn) == site]

    def slope_of(self, event: Event) -> str:
        """Return the operation whose slope an operation of the backward pass is.

        It stands on the same line, if possible next to it in the dataflow.
        """
        if "transpose(" in _scopes(event) and event.name != "div":
            return ""
        jaxpr, eqn = event.place.path[-1]
        site, mine = _site(eqn), _variables(eqn)
        near = [
            each
            for each in jaxpr.eqns
            if each is not eqn and mine & _variables(each) and _site(each) == site
        ]
        for eqns in (near, self._at(site)):
            judged = [each for each in eqns if measured(each).judged is not None]
            found = [each.primitive.name for each in judged]
            # The slope of a quotient has a power; other slopes have a quotient.
            is_power = event.name == "integer_pow"
            found.sort(key=lambda name: (name in ("div", "integer_pow")) != is_power)
            if found:
                return found[0]
        return ""


def _variables(eqn: Equation) -> set[Any]:
    return {*eqn.outvars, *_operands(eqn)}


def _operands(eqn: Equation) -> list[Any]:
    return [v for v in eqn.invars if not is_literal(v)]


def _called(eqn: Equation, places: list[int]) -> list[tuple[Any, Iterable[int]]]:
    """Return the jaxprs that an equation calls, with the results that are needed."""
    name, params, called = eqn.primitive.name, eqn.params, callee(eqn)
    if name == "scan":
        carried = scan_counts(params)[1]
        return [(closed(params["jaxpr"]).jaxpr, {*range(carried), *places})]
    if name == "while":
        return [(params["body_jaxpr"].jaxpr, range(len(eqn.outvars)))]
    if name == "cond":
        return [(branch.jaxpr, places) for branch in params["branches"]]
    return [(called.jaxpr, places)] if called is not None else []


def _scopes(event: Event) -> str:
    """Return the transformations and named scopes around an operation."""
    return " ".join(map(scopes, event.place.eqns))


def written(event: Event) -> tuple[str, Frame | None]:
    """Return what an operation is called, and the line that wrote it."""
    return event.name, _site(event.eqn) if event.eqn is not None else None


def is_again(event: Event) -> bool:
    """Whether a remat computed an operation of the forward pass again."""
    return "rematted_computation" in _scopes(event)


def is_in_softmax(event: Event) -> bool:
    """Whether a library's function that has it in its name has made an equation."""
    return any(
        "softmax" in frame.function and _package(frame) for frame in _all_frames(event)
    )


def _is_in_optimizer(event: Event) -> bool:
    """Whether an `update` of Optax or clipjax has made an equation."""
    return any(
        "update" in frame.function and _package(frame) in ("optax", "clipjax")
        for frame in _all_frames(event)
    )


def _all_frames(event: Event) -> Iterator[Frame]:
    return (frame for eqn in event.place.eqns for frame in _frames(eqn))
