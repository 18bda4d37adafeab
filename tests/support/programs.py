"""Run a row of the table: one compiled program for each row and each structure of
trees.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.trees import DTYPES, SHAPES, draw

TREES = {
    "main": SHAPES,
    "matrices": {"a": (3, 5), "c": (65, 4)},
    "heads": {"layer/query": (6, 3, 4), "layer/key": (6, 3, 4)},
}


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
    return draw(kind, exponent, TREES[row.tree], DTYPES, seed) | draw(
        kind, exponent, {"d": (7,)}, ["float32"], seed
    )


def weights_of(row: Any) -> dict[str, Any] | None:
    """Draw weights for the rows that need them; the first column of each matrix is 0."""
    if not row.params:
        return None
    weights = tree_of(row, seed=1)
    return {k: w.at[:, 0].set(0) if w.ndim > 1 else w for k, w in weights.items()}


def apply(row: Any, tree: Any, state: Any, params: Any, bound: Any) -> tuple[Any, Any]:
    """Return what a row makes of a tree, of gradients or of weights, and the next
    state.
    """
    made = row.make(bound)
    if is_transformation(row):
        return made.update(tree, state, params)
    if row.kind == "layer":
        return jax.vjp(made, jax.tree.map(jnp.zeros_like, tree))[1](tree)[0], state
    return made(tree, params) if row.params else made(tree), state


@functools.cache
def program(row: Any) -> Any:
    """Compile `apply` for a row, once for all tests of a process."""
    return jax.jit(functools.partial(apply, row))


def start(row: Any, tree: Any, params: Any, bound: Any) -> Any:
    """Return the first state of a row, after the past in which norms were at the bound."""
    if not is_transformation(row):
        return None
    state = row.make(bound).init(tree if params is None else params)
    if row.warm:
        past = {k: jnp.zeros_like(x) for k, x in tree.items()}
        for k in (
            past if row.warm == "leaf" else [next(k for k in past if "float32" in k)]
        ):
            most = (
                0.0 if past[k].dtype == np.float16 and bound > 60000 else bound
            )  # such leaves are all 0
            past[k] = (
                past[k]
                .at[(0,) * past[k].ndim]
                .set(jnp.float32(most).astype(past[k].dtype))
            )
        for _ in range(1 if row.warm == "leaf" else 3):
            _, state = program(row)(past, state, params, np.float32(bound))
    return state


def run(
    row: Any, tree: Any, bound: float, params: Any = None, state: Any = None
) -> tuple[Any, Any]:
    """Run the program of a row, from its first state unless another is given."""
    state = start(row, tree, params, bound) if state is None else state
    return program(row)(tree, state, params, np.float32(bound))
