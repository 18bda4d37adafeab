"""What a bound costs, read off the compiled step without a clock: temporaries, and passes over memory.

A pass is one array of the parameters' size read or written by one operation of the optimized program.
Adam alone takes ten in float32 on XLA's CPU backend; what a bound adds to them is what it costs.
"""

import functools
import os
import re
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import clipjax
from tests.support import ROOT

# Nothing is allocated: the step is only compiled.
LEAVES, WIDTH = 4, 2048

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the counts are those of XLA on CPU")


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


def cost(tx, project=lambda params: params, dtype=jnp.float32) -> Cost:
    program = compiled(tx, project, dtype)
    nbytes = LEAVES * WIDTH * WIDTH * jnp.dtype(dtype).itemsize
    temporary = program.memory_analysis().temp_size_in_bytes / nbytes
    passes = traffic(program.as_text(), WIDTH * WIDTH) / (4 * LEAVES * WIDTH * WIDTH)
    return Cost(temporary, passes)


def adam():
    return optax.adam(1e-3, mu_dtype=jnp.float32)


def chain(*links):
    return optax.chain(*links), lambda params: params


STEPS = {
    "global_norm": chain(clipjax.clip_by_global_norm(1.0), adam()),
    "value": chain(clipjax.clip_by_value(1.0), adam()),
    "rms": chain(clipjax.clip_by_rms(1.0), adam()),
    "norm": chain(clipjax.clip_by_norm(1.0), adam()),
    "max_norm": (adam(), clipjax.max_norm(1.0)),
    "box": (adam(), clipjax.box(-1.0, 1.0)),
    "clip_max_norm": (optax.chain(clipjax.clip_by_global_norm(1.0), adam()), clipjax.max_norm(1.0)),
    "link": (clipjax.chain(adam(), clipjax.max_norm(1.0)), lambda params: params),
    "bounded": chain(
        clipjax.bounded(
            adam(),
            clip=clipjax.clip_by_global_norm(1.0),
            project=clipjax.max_norm(1.0),
            nonfinite="skip",
        )
    ),
}

# The most that each may cost: temporaries, and passes added to Adam's. What must be, in float32:
# - a clip by a norm reads the gradients once more, for the norm; the rescaling is part of Adam's own
#   passes. Its temporaries are the partial sums that keep a float64 sum at the speed of memory.
# - a clip by value reads them once more for its metrics.
# - a projection by a direct call reads the new weights for their norms, and reads and writes them; one of
#   entries is part of Adam's own passes.
# - a link must return an update: Adam's update exists next to the weights, leaf after leaf; it is written,
#   read with them for their norms, and read once more for the new weights.
# - skipping reads the gradients first for non-finite entries, and chooses between two branches,
#   whose results XLA copies where a link's temporaries already are.
# An added pass is half as large in bfloat16. A link's update is float32 there, and so is Adam's.
# One more read is allowed where newer versions of XLA make it.
F32 = {
    "global_norm": (0.02, 1),
    "value": (0.01, 1),
    "rms": (0.02, 1),
    "norm": (0.02, 1),
    "max_norm": (0.02, 3),
    "box": (0.01, 0),
    "clip_max_norm": (0.02, 4),
    "link": (0.3, 4),
    "bounded": (1.3, 9),
}
BF16 = {
    "global_norm": (0.01, 1),
    "value": (0.01, 1),
    "rms": (0.01, 1),
    "norm": (0.01, 1),
    "max_norm": (0.01, 1.5),
    "box": (0.01, 0),
    "clip_max_norm": (0.01, 2.5),
    "link": (0.8, 5),
    "bounded": (2.6, 8.5),
}


@functools.cache
def adam_alone(dtype):
    return cost(adam(), dtype=dtype)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(("dtype", "limits"), [("float32", F32), ("bfloat16", BF16)], ids=["f32", "bf16"])
def test_a_step_costs_no_more_than_it_did(name, dtype, limits):
    measured = cost(*STEPS[name], dtype=dtype)
    temporary, passes = limits[name]
    assert measured.temporary <= temporary
    assert measured.passes - adam_alone(dtype).passes <= passes


@pytest.mark.parametrize("name", ["max_norm", "clip_max_norm"])
def test_rescaled_units_are_stored_whole(name):
    """A choice between an entry and its product, in the place of the entry, is a masked store."""
    text = compiled(*STEPS[name]).as_text()
    ends = re.findall(rf"ROOT \S+ = f32\[{WIDTH},{WIDTH}\]\S* ([\w-]+)\(", text)
    assert "add" in ends  # Adam's
    assert "select" not in ends


def divide_by_norms(params):
    norms = clipjax.functional.leaf_norms(params)
    return jax.tree.map(lambda w, norm: w / (1 + norm), params, norms)


# What reads the new weights, which are then overwritten, and how many leaves of temporaries it may take.
READERS = {
    "max_norm": (*STEPS["max_norm"], 0.4),
    "leaf_norms": (adam(), divide_by_norms, 1.1),  # partial sums of all leaves, side by side
    "clip ord=inf": (adam(), lambda p: clipjax.functional.clip_by_norm(p, 1.0, ord=jnp.inf), 0.4),
    "clip_by_global_norm": (adam(), lambda p: clipjax.functional.clip_by_global_norm(p, 1.0)[0], 0.4),
    # Adam's updates are kept for their norm.
    "adam, clip_by_global_norm": (*chain(adam(), clipjax.clip_by_global_norm(1.0)), LEAVES + 0.4),
    "adam, clip_by_rms": (*chain(adam(), clipjax.clip_by_rms(1.0)), LEAVES + 0.4),
}


@pytest.mark.parametrize("shape", [(512, 1024), (2048, 2048), (60_000, 17), (9, 512, 512)], ids=str)
@pytest.mark.parametrize("name", READERS)
def test_what_is_measured_is_not_copied(name, shape):
    tx, project, leaves = READERS[name]
    temporary = compiled(tx, project, shape=shape).memory_analysis().temp_size_in_bytes
    assert temporary < leaves * 4 * np.prod(shape)


def test_either_scheduler_keeps_one_update_of_a_link():
    # XLA reads its flags once: in a process of its own.
    code = "import tests.core.test_cost as t; print(t.cost(*t.STEPS['link']).temporary)"
    flags = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "XLA_FLAGS": flags},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= F32["link"][0]


@pytest.mark.parametrize("name", ["global_norm", "value"])
def test_small_leaves_of_one_shape_are_measured_together(name):
    tx, _ = STEPS[name]
    grads = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 64
    text = jax.jit(tx.update).lower(grads, jax.eval_shape(tx.init, grads)).compile().as_text()
    entry = text[text.index("ENTRY ") :]
    # Adam's three operations for each leaf, of which two rescale it, and few for all.
    assert entry.count(" fusion(") <= 3 * len(grads) + 16


def test_clips_of_many_examples_widen_none():
    # Under vmap a leaf has the size of one example, and the program that of all.
    examples = jax.ShapeDtypeStruct((2000, 1000), jnp.float32)
    clip = jax.jit(jax.vmap(lambda g: clipjax.functional.clip_by_norm(g, 1.0)))
    analysis = clip.lower(examples).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 0.01 * 4 * examples.size


@pytest.mark.parametrize(("dtype", "one_pass"), [("float32", 1), ("bfloat16", 0.5)])
def test_a_link_whose_place_is_not_checked_reads_the_weights_once_more(dtype, one_pass):
    unchecked = cost(*chain(adam(), clipjax.max_norm(1.0)), dtype=dtype)
    assert unchecked.passes - cost(*STEPS["link"], dtype=dtype).passes == one_pass


def test_the_count_of_passes_counts():
    # 40 bytes per parameter in float32: three fusions, each of which reads what it needs.
    assert adam_alone("float32").passes == 10
    # Optax' clip divides, and XLA keeps the quotients: a temporary, written and read by two.
    assert cost(optax.chain(optax.clip_by_global_norm(1.0), adam())).passes > 12
