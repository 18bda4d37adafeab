"""A wrong call ends in an error that names the argument, the value and the leaf, as
early as they are known.
"""

import ast
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental.sparse import BCOO

import clipjax
from tests.errors.table import CALLS, Row


@functools.cache
def names() -> dict[str, Any]:
    """Return what the calls of the table use: the public members, and small trees."""
    params = {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)}
    heads = {name: {"kernel": jnp.ones((4, 2, 3))} for name in ("query", "key")}
    return {name: getattr(clipjax, name) for name in clipjax.__all__} | {
        "clipjax": clipjax,
        "jax": jax,
        "jnp": jnp,
        "optax": optax,
        "x": jnp.ones(3),
        "params": params,
        "grads": params,
        "heads": heads,
        "attention": heads | {"out": params},
        "kernels": {"query": jnp.ones((4, 2, 3)), "key": jnp.ones((4, 2, 3))},
        "flat": {"query": jnp.ones((4, 4)), "key": jnp.ones((4, 4))},
        "conv": {"conv": jnp.ones((2, 3, 4))},
        "other_shape": {"kernel": jnp.ones(3), "bias": jnp.ones(3)},
        "adam": optax.adam(1e-3),
        "sgd": optax.sgd(1e-3),
        "clip": clipjax.clip_by_global_norm(1.0),
        "schedule": optax.constant_schedule(1.0),
        # One index twice, as the gradient of an embedding has it.
        "sparse": BCOO((jnp.ones(2), jnp.zeros((2, 1), int)), shape=(4,)),
        "state_of": lambda tx: tx.init(params),
    }


def outcome(call: str) -> Any:
    """Run a call; return its error, or else its value."""
    *before, last = ast.parse(call).body
    own = dict(names())
    try:
        exec(compile(ast.Module(before, []), "<call>", "exec"), own)
        value: Any = last
        return eval(compile(ast.Expression(value.value), "<call>", "eval"), own)
    except Exception as error:
        return error


def test_each_call_is_once_in_the_table_and_every_member_is() -> None:
    calls = [row.call for row in CALLS]
    assert len(set(calls)) == len(calls)
    nodes = [node for call in calls for node in ast.walk(ast.parse(call))]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    missing = set(clipjax.__all__) - used - {"SKIP", "fan_in"}
    assert not missing, f"wrong calls of {missing} are missing in tests/errors/table.py"


@pytest.mark.parametrize("row", CALLS, ids=lambda row: row.call)
def test_a_wrong_call_says_what_is_wrong(row: Row) -> None:
    error = outcome(row.call)
    kinds = row.error if isinstance(row.error, tuple) else (row.error,)
    assert type(error) in kinds, repr(error)
    for word in row.words:
        assert word in str(error)
    assert len(str(error)) <= 600
