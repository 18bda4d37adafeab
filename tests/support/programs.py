"""What a compiled program says of itself: its temporaries, and its passes over memory.

A pass is one array of the parameters' size read or written by one operation of the optimized program.
"""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

# Nothing is allocated: the steps are only compiled.
LEAVES, WIDTH = 4, 2048


class Cost(NamedTuple):
    temporary: float  # share of the parameters' bytes
    passes: float  # over float32 arrays of the parameters' size; half of one is a pass in bfloat16


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.+?) ([\w-]+)\((.*)$")
_ARRAY = re.compile(r"([a-z]+\d+)\[([\d,]*)\]")
_WIDTHS = {
    "f64": 8,
    "s64": 8,
    "u64": 8,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "s8": 1,
    "u8": 1,
}
_CALLED = re.compile(r"(?:to_apply|body|condition)=%?([\w.-]+)")
# What moves no data.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}


class Operation(NamedTuple):
    name: str
    type: str
    opcode: str
    rest: str


def computations(text: str) -> tuple[str, dict[str, list[Operation]]]:
    entry, name, found = "", "", {}
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            name = match[2]
            entry = name if match[1] else entry
            found[name] = []
        elif match := _INSTRUCTION.match(line):
            found[name].append(Operation(*match.groups()))
    return entry, found


def branches(rest: str) -> list[str]:
    """The computations of which a conditional runs one."""
    if listed := re.search(r"branch_computations=\{([^}]*)\}", rest):
        return re.findall(r"[\w.-]+", listed[1])
    return re.findall(r"(?:true|false)_computation=%?([\w.-]+)", rest)


def large_bytes(kind: str, at_least: int) -> int:
    """The bytes of the arrays in a type that are as large as a leaf; bool, `pred`, counts as nothing."""
    arrays = [(width, [int(n) for n in dims.split(",") if n]) for width, dims in _ARRAY.findall(kind)]
    return sum(
        _WIDTHS.get(width, 4) * int(np.prod(dims)) for width, dims in arrays if np.prod(dims) >= at_least
    )


def traffic(text: str, at_least: int) -> int:
    """The bytes of all leaf-sized arrays that the operations of a program read and write.

    Of the branches of a conditional, the one that moves most. A loop that streams over an array in slices
    is one pass: its body names the array once.
    """
    entry, found = computations(text)

    def looks_up(operation: Operation) -> bool:
        """Whether a fusion makes a scalar of single entries, and not of sums over whole arrays."""
        fused = re.search(r"calls=%?([\w.-]+)", operation.rest)
        opcodes = {o.opcode for o in found[fused[1]]} if fused else {"unknown"}
        return re.search(r"\[[\d,]+\]", operation.type) is None and not opcodes & {"reduce", "dot", "unknown"}

    def sliced(operation: Operation, i: int) -> float:
        """The bytes that a fusion takes from an operand, if it takes nothing but slices."""
        fused = re.search(r"calls=%?([\w.-]+)", operation.rest)
        body = found[fused[1]] if fused else []
        name = next((o.name for o in body if o.opcode == "parameter" and o.rest.startswith(f"{i})")), "")
        users = [o for o in body if re.search(rf"%{re.escape(name)}(?![\w.-])", o.rest)] if name else []
        if not users or any(user.opcode != "slice" for user in users):
            return np.inf
        return sum(large_bytes(user.type, 0) for user in users)

    def walk(name: str) -> int:
        types = {operation.name: operation.type for operation in found[name]}
        total = 0
        for operation in found[name]:
            if operation.opcode in ("while", "call"):
                total += sum(walk(called) for called in _CALLED.findall(operation.rest))
            elif operation.opcode == "conditional":
                total += max(walk(branch) for branch in branches(operation.rest))
            elif operation.opcode not in _FREE:
                operands = re.findall(r"%([\w.-]+)", operation.rest.split("), ")[0])
                total += large_bytes(operation.type, at_least)
                if not looks_up(operation):
                    for i, operand in enumerate(operands):
                        total += min(large_bytes(types.get(operand, ""), at_least), sliced(operation, i))
        return total

    return walk(entry)


def compiled(tx, project=lambda params: params, dtype=jnp.float32, shape=(WIDTH, WIDTH)):
    """A donated train step, compiled for LEAVES arrays."""
    shapes = {f"kernel_{i}": shape for i in range(LEAVES)}
    params = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    wide = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    state = jax.eval_shape(tx.init, wide)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return project(optax.apply_updates(params, updates)), state

    return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params).compile()


def cost_of(program, dtype=jnp.float32) -> Cost:
    """The cost of what `compiled` returned."""
    nbytes = LEAVES * WIDTH * WIDTH * jnp.dtype(dtype).itemsize
    temporary = program.memory_analysis().temp_size_in_bytes / nbytes
    passes = traffic(program.as_text(), WIDTH * WIDTH) / (4 * LEAVES * WIDTH * WIDTH)
    return Cost(temporary, passes)


def cost(tx, project=lambda params: params, dtype=jnp.float32) -> Cost:
    return cost_of(compiled(tx, project, dtype), dtype)


def adam():
    return optax.adam(1e-3, mu_dtype=jnp.float32)


@functools.cache
def adam_alone(dtype):
    return cost(adam(), dtype=dtype)


def chain(*links):
    return optax.chain(*links), lambda params: params
