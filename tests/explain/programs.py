"""Random programs with one fault at a known line, among harmless infinities."""

import itertools
from typing import Any, NamedTuple

import jax
import numpy as np

SIZE = 4

# What may stand in any place: each line makes `h` from `h`, a (4, 4) array, and `w`.
PLAIN = (
    "h = jnp.tanh(h @ w)",
    "h = h + jax.nn.relu(h @ w)",
    "h = h / (1 + jnp.abs(h))",
    "h = jax.nn.softmax(h) - h",
    "h = jnp.sin(h) * w",
    "h = (h - h.mean()) / jnp.sqrt(h.var() + 1e-3)",
    "h = h.astype(jnp.bfloat16).astype(jnp.float32)",
)
# Infinities that do not reach the result.
HARMLESS = (
    "h = jax.nn.softmax(jnp.where(LOWER, h @ w, -jnp.inf)) @ h",
    "h = h + jax.nn.softmax(jnp.where(LOWER, h, jnp.finfo(h.dtype).min))",
    "h = h - jax.nn.logsumexp(jnp.where(LOWER, h, -jnp.inf), axis=-1)[:, None]",
    "h = jnp.minimum(h, jnp.inf) + jnp.clip(h, -jnp.inf, 3.0)",
    "h = h + jnp.nan_to_num(lax.stop_gradient(jnp.exp(h + 200)), posinf=0)",
    "h = h + jnp.exp(-lax.stop_gradient(jnp.exp(h + 200)))",
    "h = h + jnp.max(h[:0], initial=-jnp.inf).clip(-1)",
    "h = h + 1 / (1 + lax.stop_gradient(jnp.exp(h + 150)))",
)


class Fault(NamedTuple):
    line: str
    operations: tuple[str, ...]
    began_in: str = "forward"


FAULTS = (
    Fault("h = jnp.log(h - 40)", ("log",)),
    Fault("h = jnp.sqrt(h - 40)", ("sqrt",)),
    Fault("h = jnp.exp(h + 300)", ("exp",)),
    Fault("h = h / jnp.zeros_like(h)", ("div",)),
    Fault("h = (h + 9).astype(jnp.float16) * 3e4 + 1", ("mul",)),
    Fault("h = (h * 1e30) @ (w * 1e30 + 1e30)", ("dot_general",)),
    Fault("h = jnp.arcsin(jnp.abs(h) + 2)", ("asin", "acos", "atan2", "asin")),
    Fault("h = h + jnp.linalg.cholesky(-jnp.eye(4) - h[0, 0] ** 2)", ("cholesky",)),
    Fault("h = h + jnp.take(h, 9, axis=0, mode='fill')", ("gather",)),
    Fault(
        "h = jax.nn.softmax(jnp.where(LOWER & (h > 1e9), h, -jnp.inf)) + h", ("sub",)
    ),
    Fault("h = h * jnp.power(h * 0, -1.0)", ("pow", "div", "integer_pow")),
    Fault("h = h + h.sum() * 3e38 * 10", ("mul",)),
    Fault("h = h + jnp.where(h > 99, jnp.sqrt(h * 0), 0)", ("div",), "backward"),
    Fault("h = h + jnp.linalg.norm(h - h)", ("div",), "backward"),
    Fault("h = h + jnp.where(h > 99, jnp.log(h * 0), 0)", ("div",), "backward"),
    Fault("h = h + 0 * jnp.std(h * 0)", ("div",), "backward"),
    Fault("h = h + lame(h)", ("div", "log", "mul"), "backward"),
)

HEADER = """
import jax, jax.numpy as jnp
from jax import lax
LOWER = jnp.tril(jnp.ones((4, 4), bool))
@jax.custom_vjp
def lame(h): return h * 1
lame.defvjp(lambda h: (h * 1, h), lambda h, g: (jnp.log(-1 - h * h) * g,))
"""


class Program(NamedTuple):
    source: str
    run: Any
    args: tuple[Any, ...]
    line: int  # of the fault; 0 if there is none
    fault: Fault | None
    at: tuple[int, int | None] | None  # the only iteration that meets the fault


def program(seed: int) -> Program:
    """Return a program: a fault in two of three, and a frame around its lines."""
    random = np.random.default_rng(seed)
    fault = FAULTS[random.integers(len(FAULTS))] if random.random() < 2 / 3 else None
    lines = [_pick(random) for _ in range(random.integers(2, 6))]
    frame = str(
        random.choice(["plain", "scan", "remat scan", "cond", "jit", "while", "vmap"])
    )
    if fault is not None and fault.began_in == "backward" and frame == "while":
        frame = "scan"
    place = int(random.integers(len(lines) + 1))
    index, length = int(random.integers(4)), 4
    if fault is not None:
        lines.insert(place, fault.line)
    is_loop = frame in ("scan", "remat scan", "while")
    if is_loop and fault is not None:
        # Only one iteration meets the fault.
        lines[place] = f"h = lax.cond(i == {index}, fault, lambda h, w: h, h, w)"
    text = [*HEADER.splitlines()]
    if is_loop and fault is not None:
        text += [
            "def fault(h, w):",
            f"    {fault.line}",
            "    return h.astype(w.dtype)",
        ]
    text += ["def block(h, w, i):", *(f"    {line}" for line in lines)]
    text += ["    return h.astype(jnp.float32)", *_frame(frame, random)]
    source = "\n".join(text) + "\n"
    space: dict[str, Any] = {}
    exec(compile(source, f"<program {seed}>", "exec"), space)
    key = jax.random.key(seed)
    ws, x = (
        jax.random.normal(key, (length, SIZE, SIZE)),
        jax.random.normal(key, (SIZE, SIZE)),
    )
    run = jax.value_and_grad(space["loss"]) if frame != "while" else space["loss"]
    run = jax.jit(run)
    line = source.splitlines().index(f"    {fault.line}") + 1 if fault else 0
    at = (index, length if frame != "while" else None) if is_loop and fault else None
    return Program(source, run, (ws * 0.5, x), line, fault, at)


def _pick(random: Any) -> str:
    lines = HARMLESS if random.random() < 0.4 else PLAIN
    return lines[random.integers(len(lines))]


def _frame(frame: str, random: Any) -> list[str]:
    body = {
        "plain": ["h = block(h, ws[0], 0)", "h = jnp.tanh(h @ ws[1])"],
        "jit": ["h = jax.jit(block)(h, ws[0], 0)", "h = jnp.tanh(h @ ws[1])"],
        "vmap": ["h = jax.vmap(block, (None, 0, None))(h, ws, 0).sum(0)"],
        "cond": [
            "step = lambda h: block(h, ws[0], 0)",
            "h = lax.cond(h.sum() > 99, jnp.sin, step, h)",
        ],
        "scan": [
            "h, _ = lax.scan(lambda h, wi: (block(h, *wi), h), h, (ws, jnp.arange(4)))"
        ],
        "remat scan": [
            "step = jax.checkpoint(lambda h, wi: (block(h, *wi), h.sum()))",
            "h, _ = lax.scan(step, h, (ws, jnp.arange(4)))",
        ],
        "while": [
            "step = lambda c: (c[0] + 1, block(c[1], ws[0], c[0]))",
            "h = lax.while_loop(lambda c: c[0] < 4, step, (0, h))[1]",
        ],
    }[frame]
    return [
        "def loss(ws, h):",
        *(f"    {line}" for line in body),
        "    return (h ** 2).mean()",
    ]


def programs(start: int, count: int) -> Any:
    return map(program, itertools.islice(itertools.count(start), count))
