"""Run a row: one compiled program for each row and structure of trees."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.trees import SHAPES, draw

TREES = {
    "main": SHAPES,
    "matrices": {"a": (3, 5), "c": (65, 4)},
    "heads": {"layer/query": (6, 3, 4), "layer/key": (6, 3, 4)},
}
# Each leaf costs each program: of 16 bits one dtype is of few entries, one of many.
DTYPES = {"a": ["float16"], "c": ["float32", "bfloat16"], "d": ["float32"]}


def is_transformation(row: Any) -> bool:
    return row.kind in ("clip", "step")


def tree_of(
    row: Any, kind: str = "normal", exponent: int = 0, seed: int = 0
) -> dict[str, Any]:
    """Draw the tree of a row, in which "d" is a bias."""
    if row.tree == "heads":
        return {
            k.removesuffix("_float32"): x
            for k, x in draw(kind, exponent, TREES["heads"], ["float32"]).items()
        }
    tree: dict[str, Any] = {}
    for name, shape in (TREES[row.tree] | {"d": (7,)}).items():
        tree |= draw(kind, exponent, {name: shape}, DTYPES[name], seed)
    return tree


def weights_of(row: Any) -> dict[str, Any] | None:
    """Draw weights for the rows that need them; each matrix has a first column of 0."""
    if not row.params:
        return None
    weights = tree_of(row, seed=1)
    return {k: put(w, (..., 0), 0) if w.ndim > 1 else w for k, w in weights.items()}


def put(x: Any, place: Any, value: float) -> Any:
    """Replace entries by NumPy, which compiles nothing."""
    entries = np.array(x)
    entries[place] = np.float32(value)
    return jnp.asarray(entries)


def stepped(tx: Any, *steps: Any, params: Any = None) -> Any:
    """Run over some trees as one program; return the last updates and the state."""

    @jax.jit
    def whole(steps: Any, params: Any) -> Any:
        def step(state: Any, updates: Any) -> Any:
            updates, state = tx.update(updates, state, params)
            return state, updates

        first = tx.init(steps[0] if params is None else params)
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *steps)
        state, updates = jax.lax.scan(step, first, stacked)
        return jax.tree.map(lambda x: x[-1], updates), state

    return whole(steps, params)


def apply(row: Any, tree: Any, state: Any, params: Any, bound: Any) -> tuple[Any, Any]:
    """Return what a row makes of a tree, and the next state."""
    made = row.make(bound)
    if is_transformation(row):
        return made.update(tree, state, params)
    if row.kind == "layer":
        return jax.vjp(made, jax.tree.map(jnp.zeros_like, tree))[1](tree)[0], state
    function = getattr(made, "apply", made)  # a projection, or a function of the tree
    return function(tree, params) if row.params else function(tree), state


@functools.cache
def program(row: Any) -> Any:
    """Compile `apply` for a row, once for all tests of a process."""
    return jax.jit(functools.partial(apply, row))


def start(row: Any, tree: Any, params: Any, bound: Any) -> Any:
    """Return the first state of a row, after a past of norms at the bound."""
    if not is_transformation(row):
        return None
    state = row.make(bound).init(tree if params is None else params)
    if not row.warm:
        return state
    past = {k: jnp.asarray(np.zeros(x.shape, x.dtype)) for k, x in tree.items()}
    first = next(k for k in past if "float32" in k)
    for k in past if row.shares == "leaf" else [first]:
        # Such leaves are all 0.
        too_large = past[k].dtype == np.float16 and bound > 60000
        past[k] = put(past[k], (0,) * past[k].ndim, 0 if too_large else bound)
    for _ in range(1 if row.shares == "leaf" else 3):
        _, state = program(row)(past, state, params, np.float32(bound))
    return state


def run(
    row: Any, tree: Any, bound: float, params: Any = None, state: Any = None
) -> tuple[Any, Any]:
    """Run the program of a row, from its first state unless another is given."""
    state = start(row, tree, params, bound) if state is None else state
    return program(row)(tree, state, params, np.float32(bound))
