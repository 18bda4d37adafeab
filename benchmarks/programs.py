"""Read a compiled program, XLA's optimized HLO: its kernels, the bytes they move and what they compute."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.+?) ([\w-]+)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z\d]*)\[([\d,]*)\](\{[^}]*\})?")
# An array in a TPU's own memory, as its layout says; all others are in the memory whose traffic counts.
_ON_CHIP = re.compile(r"S\([1-9]\)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')

# What neither moves data nor computes.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"),
    *("partition-id", "replica-id", "domain", "add-dependency"),
}
# What moves or makes data without arithmetic.
_MOVES = {
    *(
        "broadcast",
        "iota",
        "reshape",
        "transpose",
        "copy",
        "slice",
        "concatenate",
        "pad",
        "reverse",
        "gather",
    ),
    *("dynamic-slice", "dynamic-update-slice", "bitcast-convert", "copy-start", "copy-done", "custom-call"),
    *("fusion", "while", "call", "conditional", "select"),
}
_SLICES = {"slice", "dynamic-slice", "gather"}
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


class Instruction(NamedTuple):
    """One line of a program."""

    name: str
    type: str
    opcode: str
    operands: list[str]
    rest: str
    root: bool


class Program(NamedTuple):
    """Computations by name, and which of them runs."""

    entry: str
    computations: dict[str, list[Instruction]]


class Work(NamedTuple):
    """What a program does once."""

    bytes: float = 0  # that its kernels read from memory and write to it
    operations: float = 0  # arithmetic, comparisons and conversions, each entry one
    float64: float = 0  # those of them in float64, or that convert from it
    kernels: int = 0
    conditions: int = 0  # what a GPU's host waits for: branches, and loops of unknown length

    def plus(self, other: Work, times: int = 1) -> Work:
        """The sum of both."""
        return Work(*(a + times * b for a, b in zip(self, other, strict=True)))


def parse(text: str) -> Program:
    """Split a program's text."""
    entry, name, found = "", "", {}
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[2]
            entry = name if match[1] else entry
            found[name] = []
        elif match := _INSTRUCTION.match(line):
            root, label, kind, opcode, rest = match.groups()
            operands = re.findall(r"%([\w.-]+)", _inside(rest))
            found[name].append(Instruction(label, kind, opcode, operands, rest, bool(root)))
    return Program(entry, found)


def _inside(rest: str) -> str:
    """What is between the parentheses that have just been opened."""
    depth = 1
    for i, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if not depth:
            return rest[:i]
    return rest


class Array(NamedTuple):
    """One array of a type, which may be a tuple."""

    dtype: str
    size: int
    on_chip: bool


def _arrays(kind: str) -> Iterator[Array]:
    for dtype, dims, layout in _ARRAY.findall(kind):
        yield Array(dtype, math.prod(int(n) for n in dims.split(",") if n), bool(_ON_CHIP.search(layout)))


def _width(dtype: str) -> float:
    return 1 if dtype == "pred" else int(re.sub(r"^[a-z]+(\d+).*", r"\1", dtype)) / 8


def _bytes(kind: str) -> float:
    return sum(_width(x.dtype) * x.size for x in _arrays(kind) if not x.on_chip)


def _entries(kind: str) -> int:
    return max((x.size for x in _arrays(kind)), default=0)


def _transferred(kind: str) -> float:
    """The bytes of a copy or slice that runs beside the kernels: its type has the source and the result."""
    arrays = [x for x in _arrays(kind) if x.size > 1]
    entries = min((x.size for x in arrays), default=0)
    return sum(_width(x.dtype) * entries for x in arrays if not x.on_chip)


def _called(rest: str, *attributes: str) -> list[str]:
    found = []
    for attribute in attributes:
        found += re.findall(rf"\b{attribute}=%?([\w.-]+)", rest)
        for listed in re.findall(rf"\b{attribute}=\{{([^}}]*)\}}", rest):
            found += re.findall(r"[\w.-]+", listed)
    return found


_BRANCHES = ("branch_computations", "true_computation", "false_computation")


def work(program: Program, pick: Callable[..., Any] = max) -> Work:
    """What a program does, where a condition takes the branch that `pick`, min or max, prefers by bytes.

    A loop counts as often as it is known to run.
    """

    def of(name: str) -> Work:
        types = {i.name: i.type for i in program.computations[name]}
        total = Work()
        for i in program.computations[name]:
            if i.opcode == "conditional":
                total = total.plus(pick(map(of, _called(i.rest, *_BRANCHES)))).plus(Work(conditions=1))
            elif i.opcode == "while":
                trips = _TRIPS.search(i.rest)
                for called in _called(i.rest, "body", "condition"):
                    total = total.plus(of(called), int(trips[1]) if trips else 1)
                total = total.plus(Work(conditions=0 if trips else 1))
            elif i.opcode in ("call", "async-start"):
                for called in _called(i.rest, "to_apply", "calls"):
                    total = total.plus(of(called))
            elif i.opcode not in _FREE and not i.opcode.endswith(("-done", "-update")):
                total = total.plus(_kernel(program, i, types))
        return total

    return of(program.entry)


def _kernel(program: Program, i: Instruction, types: dict[str, str]) -> Work:
    fused = next(iter(_called(i.rest, "calls")), "") if i.opcode == "fusion" else ""
    body = program.computations.get(fused, [])
    if i.opcode in ("copy-start", "slice-start"):
        return Work(bytes=_transferred(i.type))
    moved = _written(i, body) + sum(_read(types.get(o, ""), n, body) for n, o in enumerate(i.operands))
    return _arithmetic(program, body or [i], types).plus(Work(bytes=moved, kernels=1))


def _users(body: Iterable[Instruction], name: str) -> list[Instruction]:
    return [i for i in body if name in i.operands]


def _read(kind: str, position: int, body: list[Instruction]) -> float:
    """The bytes a fusion takes of an operand: slices of it, if it uses nothing else."""
    names = [i.name for i in body if i.opcode == "parameter" and i.rest.startswith(f"{position})")]
    users = _users(body, names[0]) if names else []
    if not users or any(not _is_part(user, names[0]) for user in users):
        return _bytes(kind)
    return min(_bytes(kind), sum(_bytes(user.type) for user in users if user.opcode in _SLICES))


def _is_part(user: Instruction, name: str) -> bool:
    updated_in_place = user.opcode == "dynamic-update-slice" and user.operands[0] == name
    return updated_in_place or (user.opcode in _SLICES and user.operands[0] == name)


def _written(i: Instruction, body: list[Instruction]) -> float:
    """The bytes a fusion writes: of an array that it updates in place, the part."""
    root = next((inner for inner in body if inner.root), i)
    if root.opcode == "dynamic-update-slice" and len(root.operands) > 1:
        types = {inner.name: inner.type for inner in body}
        return _bytes(types.get(root.operands[1], i.type))
    return _bytes(i.type)


def _arithmetic(program: Program, body: Iterable[Instruction], outside: dict[str, str]) -> Work:
    body = list(body)
    types = outside | {i.name: i.type for i in body}
    total = Work()
    for i in body:
        if i.opcode == "fusion":
            for called in _called(i.rest, "calls"):
                total = total.plus(_arithmetic(program, program.computations[called], {}))
        if i.opcode in _FREE | _MOVES:
            continue
        # A reduction computes once for each entry that goes in, everything else for each that comes out.
        reduces = i.opcode.startswith(("reduce", "sort", "all-reduce")) and i.opcode != "reduce-precision"
        entries = _entries(types.get(i.operands[0], "") if reduces and i.operands else i.type)
        kinds = [i.type, *(types.get(o, "") for o in i.operands)]
        wide = any(x.dtype == "f64" for kind in kinds for x in _arrays(kind))
        total = total.plus(Work(operations=entries, float64=entries * wide))
    return total


def copies(program: Program, at_least: int) -> int:
    """How many kernels do nothing but copy an array of at least so many entries."""

    def is_copy(i: Instruction) -> bool:
        body = [
            inner
            for called in (_called(i.rest, "calls") if i.opcode == "fusion" else [])
            for inner in program.computations[called]
        ]
        inner = {x.opcode for x in body} - {"parameter", "tuple", "bitcast"}
        return (i.opcode in ("copy", "copy-start") or inner == {"copy"}) and _entries(i.type) >= at_least

    fused = {c for body in program.computations.values() for i in body for c in _called(i.rest, "calls")}
    return sum(is_copy(i) for name, body in program.computations.items() if name not in fused for i in body)


def collectives(program: Program) -> dict[str, int]:
    """How many there are of each."""
    opcodes = [i.opcode.removesuffix("-start") for body in program.computations.values() for i in body]
    return dict(Counter(o for o in opcodes if o in _COLLECTIVES))


def collective_bytes(program: Program) -> float:
    """The bytes of what all collectives return on a device."""
    return sum(
        _width(array.dtype) * array.size
        for body in program.computations.values()
        for i in body
        if i.opcode.removesuffix("-start") in _COLLECTIVES
        for array in _arrays(i.type)
    )
