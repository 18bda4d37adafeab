"""What is inside comes back bit for bit; shape, dtype and weak type always stay."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract.members import ROWS, Row
from tests.support.programs import apply, is_transformation, run, tree_of
from tests.support.trees import changed

INSIDE = 0.6875 * 2.0**14  # exact in all dtypes


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.keeps], ids=lambda row: row.id
)
def test_inside_nothing_changes(row: Row) -> None:
    """Entries are normal and subnormal numbers, 0 and -0; XLA on a CPU would flush
    subnormal ones in a product.
    """
    params = tree_of(row, seed=1) if row.params else None
    for exponent in (0, -20):
        tree = {
            name: with_tiny_entries(x)
            for name, x in tree_of(row, "inside", exponent).items()
        }
        result, _ = run(row, tree, INSIDE * row.times, params)
        assert not changed(tree, result)


def with_tiny_entries(x: Any) -> Any:
    """Replace the first column, or first entries, by numbers down to the smallest."""
    info = jnp.finfo(x.dtype)
    tiny = np.array(
        [info.smallest_subnormal, -3 * info.smallest_subnormal, -0.0, 0.0, info.tiny]
    ).astype(x.dtype)
    entries = np.array(x)
    first = entries[..., 0] if x.ndim > 1 else entries
    first[:] = np.where(np.arange(len(first)) < 5, np.resize(tiny, len(first)), first)
    return jnp.asarray(entries)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.tree == "main"], ids=lambda row: row.id
)
def test_types_stay(row: Row) -> None:
    tree = {
        "c_weak": 2.0,
        "a_weak": jnp.asarray(2.0),
        "bf16": jnp.ones(3, jnp.bfloat16),
        "f16": jnp.ones((), np.float16),
    }
    tree |= {"matrix": jnp.ones((2, 3), jnp.bfloat16), "f32": jnp.ones(3)}

    def program(tree: Any) -> Any:
        params = tree if row.params else None
        state = row.make(0.5).init(tree) if is_transformation(row) else None
        return apply(row, tree, state, params, 0.5)[0]

    assert jax.eval_shape(program, tree) == jax.eval_shape(lambda tree: tree, tree)
