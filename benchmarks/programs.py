"""Reading a program, XLA's optimized HLO: kernels, bytes that move, collectives."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.+?) ([\w-]+)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z\d]*)\[([\d,]*)\](\{[^}]*\})?")
# An array in a TPU's own memory, as its layout says; all others are in the memory whose
# traffic counts.
_ON_CHIP = re.compile(r"S\([1-9]\)")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|\w+_computations?)=\{?((?:%[\w.-]+(?:, )?)+)"
)
_NAMES = re.compile(r"%([\w.-]+)")

# What neither moves data nor computes.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "opt-barrier",
}
_FREE |= {"partition-id", "replica-id", "add-dependency"}
_COLLECTIVES = {
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
}


class Instruction(NamedTuple):
    """One line of a program."""

    name: str
    type: str
    opcode: str
    operands: list[str]
    called: list[str]


class Program(NamedTuple):
    """Computations by name, and which of them runs."""

    entry: str
    computations: dict[str, list[Instruction]]


def parse(text: str) -> Program:
    """Split a program's text."""
    entry, name, found = "", "", {}
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[2]
            entry = name if match[1] else entry
            found[name] = []
        elif match := _INSTRUCTION.match(line):
            label, kind, opcode, rest = match.groups()
            called = [
                each
                for group in _CALLED.findall(rest)
                for each in _NAMES.findall(group)
            ]
            # Operands are names, without parentheses around them.
            found[name].append(
                Instruction(
                    label, kind, opcode, _NAMES.findall(rest.split(")")[0]), called
                )
            )
    return Program(entry, found)


def _arrays(kind: str) -> Iterator[tuple[float, bool]]:
    """Yield the bytes of each array of a type, and whether it is in memory."""
    for dtype, dims, layout in _ARRAY.findall(kind):
        bits = 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
        yield (
            bits / 8 * math.prod(int(n) for n in dims.split(",") if n),
            not _ON_CHIP.search(layout),
        )


def bytes_of(kind: str) -> float:
    """Return the bytes in memory of a type such as `(f32[8,128]{1,0}, pred[])`."""
    return sum(size for size, in_memory in _arrays(kind) if in_memory)


def transferred(kind: str) -> float:
    """Return the bytes of a copy beside the kernels.

    Its type has the source, which is perhaps larger, and the copy.
    """
    arrays = [(size, in_memory) for size, in_memory in _arrays(kind) if size > 4]
    return min((size for size, _ in arrays), default=0) * sum(
        in_memory for _, in_memory in arrays
    )


def work(program: Program) -> tuple[int, float]:
    """Return how many kernels run, and the bytes of their operands and results.

    A condition counts with its longer branch, a loop once.
    """

    def of(name: str) -> tuple[int, float]:
        types = {i.name: i.type for i in program.computations[name]}
        kernels, moved = 0, 0.0
        for i in program.computations[name]:
            if i.opcode in _FREE or i.opcode.endswith(("-done", "-update")):
                continue
            if i.opcode in ("copy-start", "slice-start"):
                more, size = 0, transferred(i.type)
            elif i.opcode == "conditional":
                more, size = max(map(of, i.called))
            elif i.opcode in ("call", "while", "async-start"):
                inner = [of(each) for each in i.called]
                more, size = sum(x for x, _ in inner), sum(x for _, x in inner)
            else:
                more = 1
                size = bytes_of(i.type) + sum(
                    bytes_of(types.get(o, "")) for o in i.operands
                )
            kernels, moved = kernels + more, moved + size
        return kernels, moved

    return of(program.entry)


def collectives(program: Program) -> dict[str, int]:
    """Return how many collectives of each kind a program has."""
    opcodes = (
        i.opcode.removesuffix("-start")
        for body in program.computations.values()
        for i in body
    )
    return dict(Counter(each for each in opcodes if each in _COLLECTIVES))
